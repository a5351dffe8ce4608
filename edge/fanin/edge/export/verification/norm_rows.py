"""The sample of each row of the input of a norm, so that a norm leaves the padding of a batch out.

An input has a row for each sample, or several: a norm over tokens has the rows (B * T, C) of ``x.flatten(0, 1)``, or of
its transpose. The order is found by a second pass, in which the last sample has other values.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fanin.edge.export.app.calls import guarded
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.graph.examples import checked_output, example_batch
from fanin.edge.export.module.draws import recorded
from fanin.edge.export.module.kernels import plain_kernels
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.export.refusals import Place, Untraceable


def with_rows(prepared: Prepared) -> Prepared:
    """Return the App with the order of the rows of its norms. Raises Untraceable for rows of no single sample."""
    if not prepared.tracked:
        return prepared
    inputs, *_ = example_batch(prepared)
    num = prepared.app.batch_size
    before = _inputs_of_norms(prepared, inputs)
    if all(len(x) == num for _, x in before):
        return prepared
    others = {name: torch.cat([value[:-1], value[:1]]) for name, value in inputs.items()}
    while (wrong := _first_wrong(before, _inputs_of_norms(prepared, others), prepared)) is not None:
        name, x = wrong
        if name in prepared.positions_first:
            place = Place(module=name, kind=type(prepared.eager.get_submodule(name)).__name__)
            raise Untraceable(
                f"{prepared.what}: {place} normalizes {tuple(x.shape)}, whose rows are not in the order of the {num} "
                "samples, expected the rows of each sample after each other; a norm leaves padded samples out",
                "give the norm (batch, channels, ...), or (batch, ..., channels).flatten(0, -2)",
                place,
                code="FN-0768",
            )
        prepared = replace(prepared, positions_first=prepared.positions_first | {name})
        before = _inputs_of_norms(prepared, inputs)
    return prepared


def _inputs_of_norms(prepared: Prepared, inputs: Tensors) -> Sequence[tuple[str, Tensor]]:
    """Return the name and the input of each norm in a pass. The last sample does not count."""
    num = prepared.app.batch_size
    mask = (torch.arange(num) < num - 1).float()
    run = partial(checked_output, prepared.app, prepared.module, inputs)
    with torch.no_grad(), plain_kernels(), recorded([]), prepared.norms(mask) as norms:
        guarded(f"{prepared.what}: the train step", prepared.module, run)
    seen: Sequence[tuple[str, Tensor]] = norms.inputs
    return seen


def _first_wrong(
    before: Sequence[tuple[str, Tensor]], after: Sequence[tuple[str, Tensor]], prepared: Prepared
) -> tuple[str, Tensor] | None:
    """Return the first norm and its input with changes in rows of other samples than the last one."""
    num = prepared.app.batch_size
    for (name, x), (_, other) in zip(before, after, strict=True):
        shape = (-1, num) if name in prepared.positions_first else (num, -1)
        is_changed = (x != other).flatten(1).any(1).reshape(shape)
        of_others = is_changed[:, :-1] if name in prepared.positions_first else is_changed[:-1]
        if bool(of_others.any()):
            return name, x
    return None

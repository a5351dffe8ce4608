"""An App with lengths: its data and its graphs for one of them.

The export of an App with ``lengths`` is one export for each length. Each traces the same prepared module on the
calibration data cut to that length. So tracing, conversion and verification do not depend on lengths.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fanin.edge.lengths import TARGETS, Lengths
from fanin.edge.signatures import TRAIN
from fanin.protos.errors import UnsupportedModel

if TYPE_CHECKING:
    from fanin.edge.export.app.app import App
    from fanin.edge.export.module.prepare import Prepared


def check_lengths(app: "App") -> None:
    """Raise UnsupportedModel unless the lengths of an App, if it has any, fit its calibration data."""
    lengths, what = app.lengths, f"App {app.name}: lengths"
    if lengths is None:
        return
    if not isinstance(lengths, Lengths):
        raise UnsupportedModel(
            f"{what}: got {lengths!r}, expected Lengths(sizes=(16, 32), axes={{'x': 1}}) of fanin.edge.export"
        )
    if app.preprocess is not None:
        raise UnsupportedModel(f"{what}: got preprocess, too, expected one of them; preprocess the data before")
    if unknown := sorted(lengths.axes.keys() - {*app.inputs, TARGETS}):
        raise UnsupportedModel(f"{what}: got axes of {unknown}, expected names of {[*app.inputs, TARGETS]}")
    arrays = dict(app.inputs)
    if app.declared_targets is not None:
        arrays[TARGETS] = app.declared_targets
    for name, axis in lengths.axes.items():
        if name not in arrays:
            continue
        shape = tuple(arrays[name].shape)
        if axis >= len(shape) or shape[axis] != lengths.longest:
            raise UnsupportedModel(
                f"{what}: got {name} of shape {shape}, expected the longest length {lengths.longest} on axis {axis}; "
                "pad the rows to it"
            )
        padding = lengths.padding[name]
        if not arrays[name].is_floating_point() and (padding % 1 or (padding < 0 and name != TARGETS)):
            raise UnsupportedModel(
                f"{what}: got the padding {padding:g} of {name}, whose values are integers; expected an integer of at "
                "least 0"
            )


def at_length(prepared: "Prepared", size: int) -> "Prepared":
    """Return a prepared App for one of its lengths: the same module, and all of its data cut to that length."""
    app = prepared.app
    lengths = app.lengths
    assert lengths is not None, "the caller knows the lengths"

    def cut(name: str, value: Tensor) -> Tensor:
        axis = lengths.axes.get(name)
        return value if axis is None else value.narrow(axis, 0, size).contiguous()

    declared = app.declared_targets
    single = replace(
        app,
        lengths=None,
        validation=None,
        calibration={name: cut(name, value) for name, value in app.inputs.items()},
        targets=None if declared is None else cut(TARGETS, declared),
    )
    return replace(prepared, app=single, length=size)


def each_length(prepared: "Prepared") -> Iterator[tuple[str, "Prepared"]]:
    """Yield the name of the train Signature and the App for each single length, the longest last."""
    lengths = prepared.app.lengths
    if lengths is None:
        yield TRAIN, prepared
        return
    for size in lengths.sizes:
        yield lengths.signature(TRAIN, size), at_length(prepared, size)


def check_targets(prepared: "Prepared") -> None:
    """Raise UnsupportedModel if the targets of an App with lengths have the length, and the App does not say so."""
    lengths = prepared.app.lengths
    if lengths is None or TARGETS in lengths.axes or lengths.longest == 1:
        return
    # With a single length there are no graphs of another one to compare with.
    longest, shorter = (at_length(prepared, size).app.target_shape for size in (lengths.longest, lengths.longest - 1))
    if longest is not None and shorter is not None and longest != shorter:
        raise UnsupportedModel(
            f"{prepared.what}: lengths: got an output for each position, whose targets y have the length of the "
            f"inputs, but axes {dict(lengths.axes)}; add the axis of y, such as {TARGETS!r}: "
            f"{1 + next(dim for dim, size in enumerate(longest) if size != shorter[dim])}"
        )


def groups_of(app: "App", arrays: dict[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield each length with the indices of its rows (k,); 0 with all rows for an App without lengths.

    Args:
        app: The App.
        arrays: Its inputs and, if their length counts, the targets ``y``, each (n, ...).

    Raises:
        ValueError: A row is longer than the longest length.
    """
    if app.lengths is None:
        yield 0, torch.arange(len(next(iter(arrays.values()))))
        return
    sizes = app.lengths.sizes_of({name: value.numpy() for name, value in arrays.items()})
    for size in app.lengths.sizes:
        if (sizes == size).any():
            yield size, torch.from_numpy((sizes == size).nonzero()[0])

"""Whether the rows of an App with lengths depend on the padding after their end.

The graphs are verified against the module, so they learn from padding as the module does. A forgotten mask shows only
here: rows of a shorter length are compared with the same rows padded to the longest one, as a device pads them. The
comparison is in eager torch. A module that accepts the longest length alone is not compared.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from fanin.edge.export.app.app import App
from fanin.edge.export.app.calls import guarded
from fanin.edge.export.app.inputs.outputs import Output
from fanin.edge.export.app.losses import values_of
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.graph.examples import ExampleBatch, checked_output, example_batch, loss_targets
from fanin.edge.export.module.draws import refused
from fanin.edge.export.module.kernels import plain_encoders, plain_kernels
from fanin.edge.export.module.lengths import at_length
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.export.refusals import Untraceable
from fanin.edge.lengths import TARGETS, Lengths
from fanin.protos.errors import UnsupportedModel

TOLERANCE: Final = 1e-3
"""Relative to the largest value: sums in another order differ by 1e-6, and a mean over padding by some percent."""


def notes_on_padding(prepared: Prepared) -> tuple[str, ...]:
    """Return a note if the output or the loss of a row depends on its padding; none for an App without lengths.

    Raises:
        Untraceable: The module needs an input in its length that ``axes`` of the lengths do not name.
    """
    lengths = prepared.app.lengths
    if lengths is None or lengths.longest == 1:
        return ()
    size = lengths.shorter[-1] if lengths.shorter else lengths.longest // 2
    batch = _batch(prepared, size)
    if batch is None:
        _check_axes(prepared, lengths, size)
        return ()
    try:
        with torch.no_grad(), plain_kernels(), refused():
            part = guarded(prepared.what, prepared.app.module, partial(_dependent, prepared.app, lengths, batch))
    except UnsupportedModel:
        return ()  # the trace reports an error of the longest length
    advice = {
        "": "",
        "output": "hide padding in forward, by a mask as a further input with its axis in lengths, or by x != 0",
        "loss": "exclude padded positions from the loss, by the padding of y in lengths",
    }[part]
    what = f"the {part} of a row of {size} positions changes if it is padded to {lengths.longest}"
    return (f"{what}, so the model also learns from padding; {advice}",) if part else ()


def notes_on_encoders(prepared: Prepared) -> tuple[str, ...]:
    """Return a note if torch's fused kernel for encoders has another result in evaluation than in training."""
    app = prepared.app
    names = [name for name, layer in app.module.named_modules() if isinstance(layer, nn.TransformerEncoder)]
    if not names:
        return ()
    module, (inputs, *_) = copy.deepcopy(app.module).eval(), example_batch(prepared)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors", category=UserWarning)
        fused = app.predicted(checked_output(app, module, inputs))
        with plain_encoders():
            plain = app.predicted(checked_output(app, module, inputs))
    if not _differ(plain, fused):
        return ()
    what = f"module {names[0] or 'itself'} (TransformerEncoder)"
    return (
        (
            f"in evaluation, torch itself sets the padded positions of {what} to 0, and devices compute them as in "
            "training; write enable_nested_tensor=False, so that torch does, too"
        ),
    )


def _batch(prepared: Prepared, size: int) -> ExampleBatch | None:
    """Return rows of a length; None if the module does not accept it."""
    try:
        return example_batch(at_length(prepared, size))
    except UnsupportedModel:
        return None


def _check_axes(prepared: Prepared, lengths: Lengths, size: int) -> None:
    """Raise Untraceable if the module accepts a shorter length only together with inputs that have no axis."""
    for axes in _further_axes(prepared.app, lengths):
        app = replace(prepared.app, lengths=replace(lengths, axes={**lengths.axes, **axes}))
        if _batch(replace(prepared, app=app), size) is not None:
            raise Untraceable(
                f"{prepared.what}: lengths: got axes {dict(lengths.axes)}, but the module accepts {size} positions "
                f"only if {' and '.join(axes)} {'have' if len(axes) > 1 else 'has'} as many",
                f"add {str(axes)[1:-1]} to axes",
                code="FN-0741",
            )


def _further_axes(app: App, lengths: Lengths) -> Iterator[Mapping[str, int]]:
    """Yield axes of inputs without one that have the longest length: of each input, then of all together."""
    further = {
        name: shape.index(lengths.longest) + 1
        for name, shape in app.input_shapes.items()
        if name not in lengths.axes and lengths.longest in shape
    }
    yield from ({name: axis} for name, axis in further.items())
    if len(further) > 1:
        yield further


def _dependent(app: App, lengths: Lengths, batch: ExampleBatch) -> str:
    """Return which part of the rows of a batch depends on padding: ``output``, ``loss`` or neither ("")."""
    inputs, y, _ = batch
    module = copy.deepcopy(app.module).eval()
    ends = torch.from_numpy(lengths.row_lengths({name: value.numpy() for name, value in inputs.items()}))
    axis = lengths.axes.get(TARGETS, 0)
    if axis:
        positions = torch.arange(y.shape[axis]).reshape(-1, *(1 for _ in y.shape[axis + 1 :]))
        is_used = positions < ends.reshape(-1, *(1 for _ in y.shape[1:]))
        y = torch.where(is_used, y, torch.tensor(lengths.padding[TARGETS], dtype=y.dtype))

    def pass_of(data: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
        output: Output = checked_output(app, module, data)
        mask = torch.ones(len(targets))
        prediction, losses = app.predicted(output), values_of(app.loss, output, loss_targets(targets), mask)
        if axis:
            rows = prediction.movedim(axis, 1)
            prediction = rows[torch.arange(rows.shape[1]) < ends[:, None]]
        return prediction, losses

    short, long = pass_of(inputs, y), pass_of(*_padded(lengths, inputs, y))
    return next((part for part, a, b in zip(("output", "loss"), short, long, strict=True) if _differ(a, b)), "")


def _padded(lengths: Lengths, inputs: Tensors, y: Tensor) -> tuple[Tensors, Tensor]:
    """Return inputs and targets at the longest length."""
    arrays = {
        name: torch.from_numpy(lengths.fit(name, value.numpy(), lengths.longest))
        for name, value in {**inputs, TARGETS: y}.items()
    }
    return {name: arrays[name] for name in inputs}, arrays[TARGETS]


def _differ(a: Tensor, b: Tensor) -> bool:
    a, b = torch.nan_to_num(a), torch.nan_to_num(b)
    return a.shape == b.shape and not torch.allclose(a, b, rtol=0.0, atol=TOLERANCE * float(a.abs().max()))

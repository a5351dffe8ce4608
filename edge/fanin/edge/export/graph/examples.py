"""Example batches for tracing and verification, and the form of the output and the loss.

There are two batches. A graph that captured a constant from the traced batch returns wrong results for the other one.
"""

import copy
from functools import partial
from typing import Final

import torch
from torch import Tensor

from fanin.edge.export.app.app import App
from fanin.edge.export.app.calls import check_parameters, guarded, succeeds, versions
from fanin.edge.export.app.inputs.named import forms_of, num_samples, rows_of
from fanin.edge.export.app.inputs.outputs import Output, paths_of
from fanin.edge.export.app.losses import BatchLoss, cross_entropy, function_of, next_token, values_of
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.module.kernels import plain_kernels
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.export.refusals import LOSS, NoForm, Place, Untraceable, WrongOutput
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.texts import counted

MIN_TRACE_BATCH: Final = 2
"""The tracer would treat a batch of one as the constant 1."""
OTHER_SEED: Final = 1
SAMPLES: Final = (
    "write x.shape[0] instead of that number in the forward (x.view(x.shape[0], -1) or x.flatten(1)), and replace "
    "loops over the samples (for row in x, range(x.shape[0])), int(x.shape[0]) and conditions on it"
)
ExampleBatch = tuple[Tensors, Tensor, Tensor]
"""(inputs by name, y, mask) of one batch."""


def example_batch(prepared: Prepared) -> ExampleBatch:
    """Return the batch to trace and to verify with.

    Its labels cycle through all classes. Declared targets are used unchanged. A batch of three or more has its last
    sample masked out. A batch of sequences has one position without a token.

    Returns:
        The inputs by name, each (B, ...), y (B, ...) as int32 or float32 targets, and mask (B,).

    Raises:
        UnsupportedModel: The module fails on the inputs, or its output has another form than logits.
    """
    app = prepared.app
    inputs = app.examples(app.batch_size)
    output = app.predicted(_output(prepared, inputs))
    shape = output.shape[1:-1] if app.num_classes else output.shape[1:]
    num = app.batch_size * shape.numel()
    y = torch.arange(num) % app.num_classes if app.num_classes else torch.linspace(-1.0, 1.0, num)
    y = y.to(app.target_dtype).reshape(app.batch_size, *shape)
    if app.declared_targets is not None:
        y = _cycled(app.declared_targets, app.batch_size, first=0)
    if len(shape) and app.num_classes:
        y[0, -1] = NO_TOKEN
    mask = torch.ones(app.batch_size)
    # Two samples remain: a norm over the batch is undefined for one.
    if app.batch_size > 2:
        mask[-1] = 0.0
    return inputs, y, mask


def check_output(app: App, output: object, line: str = "") -> Output:
    """Return the part of the module's output for a batch that the loss uses.

    Args:
        app: The App.
        output: The part that ``output`` of the App names.
        line: ``file:line`` by which the forward returns, for the error; "" if unknown.

    Raises:
        WrongOutput: The predictions have another form than logits, or a path names no tensor.
    """
    if not isinstance(app.output, tuple):
        return _check_predicted(app, output, line)
    assert isinstance(output, dict), "several paths are picked into a dict"
    first, *others = output
    for path in others:
        if not isinstance(output[path], Tensor):
            raise WrongOutput(
                f"App {app.name}: {app.place(line)} returned {_form(output[path])} at the path {path!r}, expected a "
                "tensor (batch, ...), or a scalar tensor that depends on parameters alone",
                "remove the path from output=, or return a tensor",
                app.place(line),
                code="FN-0737",
            )
    return {first: _check_predicted(app, output[first], line)} | {path: output[path] for path in others}


def _check_predicted(app: App, output: object, line: str) -> Tensor:
    axis, num_classes = app.class_axis, app.num_classes
    if isinstance(output, Tensor) and output.dim() > 1:
        has_axis = -output.dim() < axis < output.dim()
        if not num_classes or (has_axis and output.shape[axis] == num_classes):
            return output
    expected = "a tensor (batch, ...)"
    if num_classes:
        expected = (
            f"logits of {f'shape (batch, {num_classes})' if axis == -1 else f'{num_classes} classes in axis {axis}'}"
        )
    from fanin.edge.export.diagnosis.outputs import advice_on_output

    raise WrongOutput(
        f"App {app.name}: {app.place(line)} returned {_form(output)}, expected {expected}",
        advice_on_output(output, [*paths_of(output)], num_classes, axis),
        app.place(line),
        code="FN-0738",
    )


def _form(output: object) -> str:
    return str(tuple(output.shape)) if isinstance(output, Tensor) else type(output).__name__


def other_batch(prepared: Prepared, examples: ExampleBatch) -> ExampleBatch:
    """Return a second batch that shares no values with ``examples``: other inputs, other labels and another mask.

    Inputs stay within the range of the calibration data, so that the int8 graph is valid for them. Float values are
    pulled towards their mean, each sample by a random share. Tokens are exchanged among the samples. For a module with
    several inputs, tokens and masks are exchanged by complete samples.

    Args:
        prepared: The App.
        examples: The batch of ``example_batch``.
    """
    app, (_, y, mask) = prepared.app, examples
    num, num_data = app.batch_size, num_samples(app.inputs)
    generator = torch.Generator().manual_seed(OTHER_SEED)
    index = torch.randint(num_data, (num,), generator=generator)
    if len(app.inputs) > 1:
        # Another sample than the traced one at each position: inputs that belong together are not mixed.
        index = (torch.arange(num) + 1 + index % (num_data - 1)) % num_data
    inputs = {name: _other(data, index, generator, len(app.inputs) > 1) for name, data in app.inputs.items()}
    if app.declared_targets is not None:
        y = _cycled(app.declared_targets, num, first=1).flip(0)
    else:
        y = torch.where(y == NO_TOKEN, y, (y + 1) % app.num_classes).flip(0) if app.num_classes else -0.5 * y
    mask = mask.flip(0)
    if num == 2 and not prepared.tracked:
        mask = torch.tensor([0.0, 1.0])
    return inputs, y, mask


def _cycled(targets: Tensor, num: int, first: int) -> Tensor:
    """Return ``num`` of the declared targets, from the number ``first`` on, repeated as often as needed."""
    return targets[(torch.arange(num) + first) % len(targets)]


def _other(data: Tensor, index: Tensor, generator: torch.Generator, is_one_of_several: bool) -> Tensor:
    """Return other values of an input (num, ...), from its data (n, ...) and the indices (num,) of samples."""
    x = data[index].clone()
    is_mask = bool(((data == 0) | (data == 1)).all())
    if is_one_of_several and (is_mask or not x.is_floating_point()):
        return x
    if x.is_floating_point():
        share = torch.rand((len(x), *(1 for _ in x.shape[1:])), generator=generator) / 2 + 0.25
        mean = data.mean(0)
        return mean + share * (x - mean)
    return data.gather(0, torch.randint(len(data), x.shape, generator=generator))


def loss_targets(y: Tensor) -> Tensor:
    """Return y in the dtype that a loss receives: torch's own losses accept int64 labels only."""
    return y if y.is_floating_point() else y.to(torch.int64)


def _output(prepared: Prepared, inputs: Tensors) -> Output:
    """Return the module's output for the first samples of the inputs. Raises UnsupportedModel."""
    # A copy: a pass may change running statistics.
    module = copy.deepcopy(prepared.eager).eval()
    before = versions(module)
    with torch.no_grad(), plain_kernels():
        first, num = rows_of(inputs, slice(MIN_TRACE_BATCH)), num_samples(inputs)
        what = f"{prepared.what}: the inference of calibration data {forms_of(first)}"
        run = partial(checked_output, prepared.app, module, first)
        try:
            output = guarded(what, module, run)
        except Untraceable as exc:
            if (
                not isinstance(exc, WrongOutput)
                and num > MIN_TRACE_BATCH
                and succeeds(lambda: prepared.app.call(module, inputs))
            ):
                raise fixed_batch(what, num, exc) from exc
            raise
        check_parameters(f"App {prepared.app.name}", module, before, run)
    return output


def checked_output(app: App, module: torch.nn.Module, inputs: Tensors) -> Output:
    """Return the output for the loss. Raises WrongOutput with the line of the forward's return statement."""

    def call(line: str = "") -> Output:
        return check_output(app, app.call(module, inputs, line), line)

    try:
        return call()
    except WrongOutput:
        from fanin.edge.export.diagnosis.lines import return_line

        return call(return_line(module, call))


def fixed_batch(what: str, num: int, exc: Untraceable) -> NoForm:
    """Return the error for a forward that accepts one number of samples only.

    Args:
        what: Prefix of the message.
        num: The accepted number of samples.
        exc: The error for another number.
    """
    where = str(exc.place) or "the module"
    return NoForm(
        f"{what}: {where} accepts only {counted(num, 'sample')} at a time, expected any number",
        SAMPLES,
        exc.place,
        code="FN-0777",
    )


def constant_batch(what: str, num: int, exc: Untraceable) -> NoForm:
    """Return the error for a forward whose graph would be one for the example number of samples only.

    Args:
        what: Prefix of the message.
        num: That number.
        exc: The error of torch.
    """
    where = str(exc.place) or "the module"
    return NoForm(
        f"{what}: {where} computes with the number of samples as a constant, {num} in the example batch, and its graph "
        "would accept no other, expected any number",
        SAMPLES,
        exc.place,
        code="FN-0777",
    )


def loss_values_of(prepared: Prepared, output: Output, y: Tensor, mask: Tensor) -> Tensor:
    """Return the result of the loss of a batch: a number for each sample, or a single one of a BatchLoss.

    Raises:
        Untraceable: The loss fails, or its result has another shape. The advice names the shape that y has.
    """
    app, what = prepared.app, f"App {prepared.app.name}: the loss"

    def losses_of(labels: Tensor) -> object:
        return values_of(app.loss, output, loss_targets(labels), mask)

    def call() -> object:
        return losses_of(y)

    try:
        losses = guarded(what, prepared.module, call)
    except Untraceable as exc:
        if exc.advice:
            raise
        from fanin.edge.export.diagnosis.outputs import advice_on_loss

        advice = advice_on_loss(
            y,
            output,
            accepts=lambda labels: succeeds(lambda: losses_of(labels)),
            has_positions=app.class_axis != -1 and app.loss in (cross_entropy, next_token),
            is_declared=bool(app.num_classes) or app.declared_targets is not None,
        )
        if not advice:
            raise
        raise Untraceable(exc.reason, advice, exc.place, code="FN-0778") from exc
    shape, wanted = y.shape[:1], "one loss for each sample"
    if isinstance(app.loss, BatchLoss):
        shape, wanted = y.shape[:0], "one number for the batch, the mean over the samples with mask 1"
    if not isinstance(losses, Tensor) or losses.shape != shape:
        from fanin.edge.export.diagnosis.lines import return_line
        from fanin.edge.export.diagnosis.outputs import advice_on_losses

        place = Place(kind=LOSS, line=return_line(function_of(app.loss), call))
        raise Untraceable(
            f"{what}{f' {place}' if place.line else ''} returned {_form(losses)}, expected {tuple(shape)}: {wanted}",
            advice_on_losses(losses, y, app.num_classes, is_of_batch=isinstance(app.loss, BatchLoss)),
            place,
            code="FN-0778",
        )
    return losses

"""Example batches for tracing and verification, and the state that a forward pass must not change.

There are two batches. A graph that captured a constant from the traced batch returns wrong results for the other one.
"""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor

from fanin.edge.export.app import App
from fanin.edge.export.inputs.named import call_module, forms_of, num_samples, rows_of
from fanin.edge.export.inputs.outputs import Output, of_rows, paths_of, predicted
from fanin.edge.export.modules.draws import check_size, recorded
from fanin.edge.export.modules.finite import first_not_finite
from fanin.edge.export.modules.repeated import check_repeats, check_samples
from fanin.edge.export.optimizers.optimizer import Tensors
from fanin.edge.export.prepare import Prepared
from fanin.edge.export.refusals import SAMPLES, NoForm, Untraceable, guarded, succeeds
from fanin.edge.export.tracing.kernels import plain_kernels
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.edge.runtimes.randomness import MAX_RANDOM_BYTES, RandomPort
from fanin.protos.errors import UnsupportedModel

MIN_TRACE_BATCH: Final = 2
"""The tracer would treat a batch of one as the constant 1."""
OTHER_SEED: Final = 1
KEEP_FINITE: Final = (
    "keep the arguments of divisions, logarithms and roots away from 0 (x.clamp(min=1e-6)), and those of exponentials "
    "below 88"
)
ExampleBatch = tuple[Tensors, Tensor, Tensor]
"""(inputs by name, y, mask) of one batch."""


def example_batch(prepared: Prepared) -> ExampleBatch:
    """Return the batch to trace and to verify with.

    Its labels cycle through all classes. Declared targets are used unchanged. A batch of three or more has its last
    sample masked out. A batch of sequences has one position without a token.

    Returns:
        The inputs by name, each (B, ...), y (B, ...) as int32 classes or float32 targets, and mask (B,).

    Raises:
        UnsupportedModel: The module fails on the inputs, or its output has another form than logits.
    """
    app = prepared.app
    inputs = app.examples(app.batch_size)
    output = predicted(check_output(app, _output(prepared, inputs)))
    shape = output.shape[1:-1] if app.num_classes else output.shape[1:]
    num = app.batch_size * shape.numel()
    y = torch.arange(num) % app.num_classes if app.num_classes else torch.linspace(-1.0, 1.0, num)
    y = y.to(torch.int32 if app.num_classes else torch.float32).reshape(app.batch_size, *shape)
    if app.declared_targets is not None:
        y = _cycled(app.declared_targets, app.batch_size, first=0)
    if len(shape) and app.num_classes:
        y[0, -1] = NO_TOKEN
    mask = torch.ones(app.batch_size)
    # Two samples remain: a norm over the batch is undefined for one.
    if app.batch_size > 2:
        mask[-1] = 0.0
    return inputs, y, mask


def check_output(app: App, output: object) -> Output:
    """Return the part of the module's output for a batch that the loss uses.

    Raises:
        Untraceable: The predictions have another form than logits, or a path names no tensor (B, ...).
    """
    if not isinstance(app.output, tuple):
        return _check_predicted(app, output)
    assert isinstance(output, dict), "several paths are picked into a dict"
    first, *others = output
    for path in others:
        if not isinstance(output[path], Tensor) or not output[path].dim():
            raise Untraceable(
                f"App {app.name}: the module returned {_form(output[path])} at the path {path!r}, expected a tensor "
                "(batch, ...)",
                "remove the path from output=, or return a value for each sample",
            )
    return {first: _check_predicted(app, output[first])} | {path: output[path] for path in others}


def _check_predicted(app: App, output: object) -> Tensor:
    if isinstance(output, Tensor) and output.dim() > 1 and app.num_classes in (0, output.shape[-1]):
        return output
    expected = f"logits of shape (batch, {app.num_classes})" if app.num_classes else "a tensor (batch, ...)"
    raise Untraceable(
        f"App {app.name}: the module returned {_form(output)}, expected {expected}", _output_advice(app, output)
    )


def _form(output: object) -> str:
    return str(tuple(output.shape)) if isinstance(output, Tensor) else type(output).__name__


def _output_advice(app: App, output: object) -> str:
    """Return the remedy for an output of a wrong form."""
    if paths := [*paths_of(output)]:
        return f"set output= in the App to the path of that tensor, one of {paths}"
    if not isinstance(output, Tensor):
        return "return that tensor alone in forward, not inside a tuple, list or other object"
    if not app.num_classes:
        return "return output.unsqueeze(-1) in forward"
    if app.num_classes in output.shape[1:-1]:
        dim = list(output.shape).index(app.num_classes, 1)
        return f"the classes are dimension {dim}, and must be the last one: return output.movedim({dim}, -1) in forward"
    if output.dim() < 2:
        return "return one row of logits for each sample"
    if output.dim() == 2 and output.shape[0] == output.shape[1] == MIN_TRACE_BATCH:
        return "a score for each pair of samples depends on other samples: return an embedding of each by itself"
    return f"set num_classes={output.shape[-1]} in the App, or give the last layer {app.num_classes} outputs"


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


def labels_of(prepared: Prepared, y: Tensor) -> Tensor:
    """Return y in the dtype that a loss accepts: torch's own losses accept int64 labels only."""
    return y.to(torch.int64) if prepared.app.num_classes else y


def _output(prepared: Prepared, inputs: Tensors) -> object:
    """Return the module's output for the first samples of the inputs. Raises UnsupportedModel."""
    # A copy: a pass may change running statistics.
    module = copy.deepcopy(prepared.eager).eval()
    before = {name: value._version for name, value in module.named_parameters()}
    with torch.no_grad(), plain_kernels():
        first, num = rows_of(inputs, slice(MIN_TRACE_BATCH)), num_samples(inputs)
        what = f"{prepared.what}: the inference of calibration data {forms_of(first)}"
        try:
            output = guarded(what, module, lambda: prepared.app.call(module, first))
        except Untraceable as exc:
            if num > MIN_TRACE_BATCH and succeeds(module, lambda: prepared.app.call(module, inputs)):
                raise fixed_batch(what, num, exc) from exc
            raise
    _check_kept(prepared, before, module)
    return output


def fixed_batch(what: str, num: int, exc: Untraceable) -> NoForm:
    """Return the error for a forward that accepts one number of samples only.

    Args:
        what: Prefix of the message.
        num: The accepted number of samples.
        exc: The error for another number.
    """
    where = f"module {exc.module or 'itself'} ({exc.kind})" if exc.kind else "the module"
    return NoForm(
        f"{what}: {where} accepts only {num} samples at a time, expected any number", SAMPLES, exc.module, exc.kind
    )


def check_kept(prepared: Prepared) -> tuple[RandomPort, ...]:
    """Run one training pass and check that it changes neither buffers nor parameters.

    Returns:
        The random numbers that the pass draws, in order.

    Raises:
        UnsupportedModel: A buffer or a parameter changes, in place or by assignment. Or the loss or an output in
            evaluation is not finite, or the pass draws more than 16 MB of random numbers.
    """
    module = prepared.module
    before = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    parameters = {name: value._version for name, value in module.named_parameters()}
    inputs, y, mask = example_batch(prepared)
    prepared.with_mask(mask)
    draws: list[RandomPort] = []
    with torch.no_grad(), plain_kernels(), recorded(draws, MAX_RANDOM_BYTES):
        output = guarded(f"{prepared.what}: the train step", module, lambda: prepared.app.call(module, inputs))
        check_size(prepared.what, draws, MAX_RANDOM_BYTES)
        _check_loss(prepared, output, inputs, y)
    _check_calibrated(prepared)
    _check_kept(prepared, parameters, module)
    after = dict(module.named_buffers())
    changed = sorted(name for name, old in before.items() if _differs(*old, after.get(name)))
    if changed:
        owner = changed[0].rpartition(".")[0]
        kind = type(module.get_submodule(owner)).__name__
        raise UnsupportedModel(
            f"App {prepared.app.name}: module {owner or 'itself'} ({kind}) changes its buffers {changed} in training, "
            "but a graph keeps no state between steps; compute them from the inputs of each step, or freeze that "
            "part with .eval()"
        )
    return tuple(draws)


def _check_loss(prepared: Prepared, output: object, inputs: Tensors, y: Tensor) -> None:
    """Raise Untraceable for a loss that is not finite, if the module's output (B, ...) has the right form."""
    app = prepared.app
    try:
        checked = check_output(app, output)
    except Untraceable:
        return  # the trace reports it
    losses = sample_losses_of(prepared, checked, y)
    if not bool(losses.isfinite().all()):
        seen = [checked] if isinstance(checked, Tensor) else checked.values()
        is_finite = all(bool(value.isfinite().all()) for value in seen)
        cause = "the module's output is finite"
        if not is_finite:
            cause = first_not_finite(prepared.module, partial(call_module, prepared.module, inputs))
        raise Untraceable(
            f"App {app.name}: the loss is not finite on the calibration data; {cause}",
            "hide a class by a large negative number (masked_fill with -1e9), not by -inf, and keep outputs finite",
        )


def _check_calibrated(prepared: Prepared) -> None:
    """Raise Untraceable for an output of the module that is not finite on the calibration data of ``infer``."""
    app, module = prepared.app, copy.deepcopy(prepared.eager).eval()
    size = app.batch_size
    stop = num_samples(app.inputs) - size
    # A module may accept batches of one size only, so the last one overlaps.
    starts = [*range(0, stop, size), stop] if stop >= 0 else []
    for inputs in [rows_of(app.inputs, slice(start, start + size)) for start in starts] or [app.examples(size)]:
        try:
            with torch.no_grad(), plain_kernels():
                output = guarded(prepared.what, module, partial(app.call, module, inputs))
                logits = predicted(check_output(app, output))
        except UnsupportedModel:
            return  # the trace reports it
        if not bool(logits.isfinite().all()):
            where = first_not_finite(module, partial(call_module, module, inputs))
            raise Untraceable(
                f"App {app.name}: the module's output in evaluation is not finite on the calibration data; {where}",
                KEEP_FINITE,
            )


def check_pure(prepared: Prepared) -> None:
    """Check that a pass depends only on its batch, and each sample only on itself. A trace does not show this.

    Raises:
        Untraceable: A pass uses more than its batch, the parameters and torch's draws, or the output or the loss of a
            sample depends on other samples.
    """
    inputs, y, mask = example_batch(prepared)
    app, evaluated = prepared.app, copy.deepcopy(prepared.eager).eval()
    y = labels_of(prepared, y)
    drawn: list[RandomPort] = []

    def passed() -> object:
        with recorded([]):
            output = check_output(app, app.call(prepared.with_mask(mask), inputs))
            return output, app.loss(output, y)

    def output_of(rows: slice) -> Output:
        return check_output(app, app.call(evaluated, rows_of(inputs, rows)))

    def losses_of(rows: slice) -> Tensor:
        with recorded(drawn):
            return app.loss(of_rows(output_of(slice(None)), rows), y[rows])

    with torch.no_grad(), plain_kernels():
        check_repeats(f"{prepared.what}: the train step", prepared.module, passed)
        # Rounded activations may be rounded another way by sums in another order.
        if not app.recipe.quantization_aware:
            check_samples(f"{prepared.what}: the output of a sample", output_of, len(y))
        losses_of(slice(None))
        if not drawn:
            check_samples(f"{prepared.what}: the loss of a sample", losses_of, len(y))


def sample_losses_of(prepared: Prepared, output: Output, y: Tensor) -> Tensor:
    """Return the losses of a batch. Raises Untraceable; the advice names the shape that y has."""
    app, what = prepared.app, f"App {prepared.app.name}: the loss"
    try:
        return guarded(what, prepared.module, lambda: app.loss(output, labels_of(prepared, y)))
    except Untraceable as exc:
        if exc.advice:
            raise
        if not isinstance(output, Tensor):
            advice = f"the loss receives a dict of the tensors at {[*output]}: write loss= as a function of it and y"
        elif app.num_classes or app.declared_targets is not None:
            raise
        else:
            advice = (
                f"y has the shape {tuple(y.shape)} of the output; if the output has the logits of classes, set "
                f"num_classes={y.shape[-1]} in the App; else declare targets of another shape by targets="
            )
        raise Untraceable(exc.reason, advice, exc.module, exc.kind) from exc


def _check_kept(prepared: Prepared, before: Mapping[str, int], module: torch.nn.Module) -> None:
    after = dict(module.named_parameters())
    changed = sorted(name for name, version in before.items() if name not in after or after[name]._version != version)
    if changed:
        owner = changed[0].rpartition(".")[0]
        kind = type(module.get_submodule(owner)).__name__
        raise UnsupportedModel(
            f"App {prepared.app.name}: module {owner or 'itself'} ({kind}) writes its parameters {changed} in forward, "
            "which a functional graph cannot do; compute another tensor from them (an Embedding: without max_norm)"
        )


def _differs(old: Tensor, version: int, new: Tensor | None) -> bool:
    """Return whether a buffer has changed. A buffer that is recreated with equal values has not."""
    if new is old:
        return old._version != version
    return new is not None and not torch.equal(old, new)

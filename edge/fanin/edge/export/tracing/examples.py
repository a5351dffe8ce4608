"""Example batches for tracing and verification, and the state that a forward pass must not change.

There are two batches. A graph that captured a constant from the traced batch returns wrong results for the other one.
"""

import copy
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from fanin.edge.export.app import App
from fanin.edge.export.prepare import Prepared
from fanin.edge.export.refusals import SAMPLES, NoForm, Untraceable, guarded, succeeds
from fanin.edge.export.tracing.kernels import plain_kernels
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.errors import UnsupportedModel

MIN_TRACE_BATCH: Final = 2
"""The tracer would treat a batch of one as the constant 1."""
OTHER_SEED: Final = 1
ExampleBatch = tuple[Tensor, Tensor, Tensor]
"""(x, y, mask) of one batch."""


def example_batch(prepared: Prepared) -> ExampleBatch:
    """Return the batch to trace and to verify with.

    Its labels cycle through all classes. A batch of three or more has its last sample masked out. A batch of sequences
    has one position without a token.

    Returns:
        x (B, ...), y (B, ...) as int32 classes or float32 targets, and mask (B,).

    Raises:
        UnsupportedModel: The module fails on the inputs, or its output has another form than logits.
    """
    app = prepared.app
    x = app.examples(app.batch_size)
    output = check_output(app, _output(prepared, x))
    shape = output.shape[1:-1] if app.num_classes else output.shape[1:]
    num = app.batch_size * shape.numel()
    y = torch.arange(num) % app.num_classes if app.num_classes else torch.linspace(-1.0, 1.0, num)
    y = y.to(torch.int32 if app.num_classes else torch.float32).reshape(app.batch_size, *shape)
    if len(shape) and app.num_classes:
        y[0, -1] = NO_TOKEN
    mask = torch.ones(app.batch_size)
    # Two samples remain: a norm over the batch is undefined for one.
    if app.batch_size > 2:
        mask[-1] = 0.0
    return x, y, mask


def check_output(app: App, output: object) -> Tensor:
    """Return the module's output for a batch. Raises Untraceable if it has another form than logits."""
    if isinstance(output, Tensor) and output.dim() > 1 and app.num_classes in (0, output.shape[-1]):
        return output
    got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    expected = f"logits of shape (batch, {app.num_classes})" if app.num_classes else "a tensor (batch, ...)"
    raise Untraceable(f"App {app.name}: the module returned {got}, expected {expected}", _output_advice(app, output))


def _output_advice(app: App, output: object) -> str:
    """Return the remedy for an output of a wrong form."""
    if not isinstance(output, Tensor):
        return "return that tensor alone in forward, not inside a tuple, list or other object"
    if not app.num_classes:
        return "return output.unsqueeze(-1) in forward"
    if app.num_classes in output.shape[1:-1]:
        dim = list(output.shape).index(app.num_classes, 1)
        return f"the classes are dimension {dim}, and must be the last one: return output.movedim({dim}, -1) in forward"
    if output.dim() < 2:
        return "return one row of logits for each sample"
    return f"set num_classes={output.shape[-1]} in the App, or give the last layer {app.num_classes} outputs"


def other_batch(prepared: Prepared, examples: ExampleBatch) -> ExampleBatch:
    """Return a second batch that shares no values with ``examples``: other inputs, other labels and another mask.

    Inputs stay within the range of the calibration data, so that the int8 graph is valid for them. Float values are
    pulled towards their mean, each sample by a random share. Tokens are exchanged among the samples.

    Args:
        prepared: The App.
        examples: The batch of ``example_batch``.
    """
    app, (_, y, mask) = prepared.app, examples
    data, num = app.calibration.detach(), app.batch_size
    generator = torch.Generator().manual_seed(OTHER_SEED)
    x = data[torch.randint(len(data), (num,), generator=generator)].clone()
    if x.is_floating_point():
        share = torch.rand((num, *(1 for _ in app.input_shape)), generator=generator) / 2 + 0.25
        mean = data.mean(0)
        x = mean + share * (x - mean)
    else:
        rows = torch.randint(len(data), x.shape, generator=generator)
        x = data.gather(0, rows)
    y = torch.where(y == NO_TOKEN, y, (y + 1) % app.num_classes).flip(0) if app.num_classes else -0.5 * y
    mask = mask.flip(0)
    if num == 2 and not prepared.tracked:
        mask = torch.tensor([0.0, 1.0])
    return x, y, mask


def labels_of(prepared: Prepared, y: Tensor) -> Tensor:
    """Return y in the dtype that a loss accepts: torch's own losses accept int64 labels only."""
    return y.to(torch.int64) if prepared.app.num_classes else y


def _output(prepared: Prepared, x: Tensor) -> object:
    """Return the module's output for the first samples of x. Raises UnsupportedModel."""
    # A copy: a pass may change running statistics.
    module = copy.deepcopy(prepared.eager).eval()
    before = {name: value._version for name, value in module.named_parameters()}
    with torch.no_grad(), plain_kernels():
        kind = str(x.dtype).removeprefix("torch.")
        what = f"{prepared.what}: the inference of calibration data {kind} {tuple(x[:MIN_TRACE_BATCH].shape)}"
        try:
            output: object = guarded(what, module, lambda: module(x[:MIN_TRACE_BATCH]))
        except Untraceable as exc:
            if len(x) > MIN_TRACE_BATCH and succeeds(module, lambda: module(x)):
                raise fixed_batch(what, len(x), exc) from exc
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


def check_kept(prepared: Prepared) -> None:
    """Run one training pass and check that it changes neither buffers nor parameters.

    Raises:
        UnsupportedModel: A buffer or a parameter changes, in place or by assignment, or the loss is not finite.
    """
    module = prepared.module
    before = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    parameters = {name: value._version for name, value in module.named_parameters()}
    x, y, mask = example_batch(prepared)
    prepared.with_mask(mask)
    with torch.no_grad():
        output = guarded(f"{prepared.what}: the train step", module, lambda: module(x))
        _check_loss(prepared, output, y)
    _check_kept(prepared, parameters, module)
    after = dict(module.named_buffers())
    changed = sorted(name for name, old in before.items() if _differs(*old, after.get(name)))
    if changed:
        raise UnsupportedModel(
            f"App {prepared.app.name}: module itself ({type(prepared.app.module).__name__}) changes its buffers "
            f"{changed} in training, which a functional graph cannot do; compute them in forward, or freeze that part "
            "with .eval()"
        )


def _check_loss(prepared: Prepared, output: object, y: Tensor) -> None:
    """Raise Untraceable for a loss that is not finite, if the module's output (B, ...) has the right form."""
    app = prepared.app
    if not isinstance(output, Tensor) or (app.num_classes and output.shape[-1] != app.num_classes):
        return
    losses = guarded(f"App {app.name}: the loss", prepared.module, lambda: app.loss(output, labels_of(prepared, y)))
    if not bool(losses.isfinite().all()):
        is_finite = bool(output.isfinite().all())
        cause = "the module's output is finite" if is_finite else "the module's output is not finite either"
        raise Untraceable(
            f"App {app.name}: the loss is not finite on the calibration data; {cause}",
            "hide a class by a large negative number (masked_fill with -1e9), not by -inf, and keep outputs finite",
        )


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

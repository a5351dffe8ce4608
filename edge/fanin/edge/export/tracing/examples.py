"""Batches to trace and to verify with, and what a pass over one must leave as it was.

Two of them: a graph that has kept something of the batch that it was traced with gives another batch's result as wrong
as it is.
"""

import copy
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from fanin.edge.export.prepare import Prepared
from fanin.edge.export.refusals import SAMPLES, NoForm, Untraceable, guarded, succeeds
from fanin.edge.export.tracing.kernels import plain_kernels
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.errors import UnsupportedModel

MIN_TRACE_BATCH: Final = 2
"""A batch of one would be traced as the constant 1."""
OTHER_SEED: Final = 1
Examples = tuple[Tensor, Tensor, Tensor]
"""x, y and mask."""


def example_batch(prepared: Prepared) -> Examples:
    """x, y and mask to trace and to verify with: all classes in turn, the last sample masked out if there are three."""
    app = prepared.app
    x = app.examples(app.batch_size)
    said = _said(prepared, x)
    if not isinstance(said, Tensor) or said.dim() < 2:
        got = tuple(said.shape) if isinstance(said, Tensor) else type(said).__name__
        raise UnsupportedModel(f"App {app.name}: the module gave {got}, expected a tensor (batch, ...)")
    shape = said.shape[1:-1] if app.num_classes else said.shape[1:]
    num = app.batch_size * shape.numel()
    y = torch.arange(num) % app.num_classes if app.num_classes else torch.linspace(-1.0, 1.0, num)
    y = y.to(torch.int32 if app.num_classes else torch.float32).reshape(app.batch_size, *shape)
    if len(shape) and app.num_classes:
        y[0, -1] = NO_TOKEN
    mask = torch.ones(app.batch_size)
    # Two are left: a norm over the batch has nothing to say to one.
    if app.batch_size > 2:
        mask[-1] = 0.0
    return x, y, mask


def other_batch(prepared: Prepared, examples: Examples) -> Examples:
    """Another batch than ``examples``: other inputs within what the calibration data spans, other labels, another mask.

    Values are drawn towards their mean, each sample by a share of its own; tokens change places among the samples.
    """
    app, (_, y, mask) = prepared.app, examples
    found, num = app.calibration.detach(), app.batch_size
    drawn = torch.Generator().manual_seed(OTHER_SEED)
    x = found[torch.randint(len(found), (num,), generator=drawn)].clone()
    if x.is_floating_point():
        share = torch.rand((num, *(1 for _ in app.input_shape)), generator=drawn) / 2 + 0.25
        mean = found.mean(0)
        x = mean + share * (x - mean)
    else:
        rows = torch.randint(len(found), x.shape, generator=drawn)
        x = found.gather(0, rows)
    y = torch.where(y == NO_TOKEN, y, (y + 1) % app.num_classes).flip(0) if app.num_classes else -0.5 * y
    mask = mask.flip(0)
    if num == 2 and not prepared.tracked:
        mask = torch.tensor([0.0, 1.0])
    return x, y, mask


def labels_of(prepared: Prepared, y: Tensor) -> Tensor:
    """y as a loss is given it: torch's own take int64 labels only."""
    return y.to(torch.int64) if prepared.app.num_classes else y


def _said(prepared: Prepared, x: Tensor) -> object:
    """What the module says to the first samples of x. Raises UnsupportedModel."""
    # A copy: a pass may move running statistics.
    module = copy.deepcopy(prepared.eager).eval()
    before = {name: value._version for name, value in module.named_parameters()}
    with torch.no_grad(), plain_kernels():
        what = f"{prepared.what}: the inference"
        try:
            said: object = guarded(what, module, lambda: module(x[:MIN_TRACE_BATCH]))
        except Untraceable as exc:
            if len(x) > MIN_TRACE_BATCH and succeeds(module, lambda: module(x)):
                raise fixed_batch(what, len(x), exc) from exc
            raise
    _check_kept(prepared, before, module)
    return said


def fixed_batch(what: str, num: int, exc: Untraceable) -> NoForm:
    """The error of a forward that takes no other number of samples than ``num``; ``exc`` is that of another number."""
    where = f"module {exc.module or 'itself'} ({exc.kind})" if exc.kind else "the module"
    return NoForm(
        f"{what}: {where} takes {num} samples at a time only, expected any number", SAMPLES, exc.module, exc.kind
    )


def check_kept(prepared: Prepared) -> None:
    """Raise UnsupportedModel if a pass in training changes a buffer or a parameter, in place or by another tensor."""
    module = prepared.module
    before = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    parameters = {name: value._version for name, value in module.named_parameters()}
    x, y, mask = example_batch(prepared)
    prepared.with_mask(mask)
    with torch.no_grad():
        said = guarded(f"{prepared.what}: the train step", module, lambda: module(x))
        _check_loss(prepared, said, y)
    _check_kept(prepared, parameters, module)
    after = dict(module.named_buffers())
    changed = sorted(name for name, old in before.items() if _differs(*old, after.get(name)))
    if changed:
        raise UnsupportedModel(
            f"App {prepared.app.name}: module itself ({type(prepared.app.module).__name__}) changes its buffers "
            f"{changed} in training, which a functional graph cannot; compute them in forward, or freeze that part "
            "with .eval()"
        )


def _check_loss(prepared: Prepared, said: object, y: Tensor) -> None:
    """Raise Untraceable for a loss that is not finite where what the module says (B, ...) is as it should be."""
    app = prepared.app
    if not isinstance(said, Tensor) or (app.num_classes and said.shape[-1] != app.num_classes):
        return
    losses = guarded(f"App {app.name}: the loss", prepared.module, lambda: app.loss(said, labels_of(prepared, y)))
    if not bool(losses.isfinite().all()):
        why = "the module's output holds values that are not finite" if not bool(said.isfinite().all()) else "got those"
        raise Untraceable(
            f"App {app.name}: the loss is not finite on the calibration data: {why}",
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
            "which a functional graph cannot; compute another tensor from them (an Embedding: without max_norm)"
        )


def _differs(old: Tensor, version: int, new: Tensor | None) -> bool:
    """Whether a buffer is not what it was; one that is made anew each time, and alike, is."""
    if new is old:
        return old._version != version
    return new is not None and not torch.equal(old, new)

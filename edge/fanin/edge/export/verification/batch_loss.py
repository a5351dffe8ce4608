"""The check of a BatchLoss: its value and its gradient are those of the real samples alone.

A device pads the last batch of its data, and the mask excludes the padding. In eager torch the loss is computed for
batches with few and with many real samples. Each time, the others have different contents, and then they are cut off.
The gradient is compared, too: a loss may have the right value and still train on padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fanin.edge.export.app.calls import guarded
from fanin.edge.export.app.inputs.outputs import Output, of_rows
from fanin.edge.export.app.losses import BatchLoss
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.export.refusals import LOSS, Place, Untraceable
from fanin.protos.texts import counted

TOLERANCE: Final = 1e-3
"""Relative to the largest value of all batches: above other orders of additions, below a padded sample that counts."""
LEAVE_OUT: Final = (
    "leave samples with mask 0 out of each sum, mean and comparison: multiply by the mask and divide by mask.sum(), "
    "not by len(y); hide them by masked_fill(mask == 0, -1e9) before a softmax, a logsumexp or a maximum "
    "(docs/howto/batch-losses.md)"
)
KEEP_FINITE: Final = (
    "the last batch of a device may have one sample: write (mask.sum() - 1).clamp(min=1) for the divisor of a "
    "variance, add a small number before a root or a logarithm, and hide samples by -1e9, not by -inf"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """The value of a loss (1,), and its gradient by the outputs as one row for each sample (B, ...)."""

    value: Tensor
    gradient: Tensor


def check_batch_loss(prepared: Prepared, loss: BatchLoss, output: Output, y: Tensor) -> None:
    """Check that a loss leaves masked samples out.

    Args:
        prepared: The App.
        loss: Its loss.
        output: The output of its module for a batch.
        y: The targets of the batch, as the loss receives them.

    Raises:
        Untraceable: The loss raises, is not finite, or depends on masked samples.
    """
    num, what = len(y), f"App {prepared.app.name}: the loss"

    def computed(outputs: Output, targets: Tensor, mask: Tensor) -> _Result:
        return guarded(what, prepared.module, lambda: _result(loss, outputs, targets, mask))

    sizes = sorted({1, min(2, num), (num + 1) // 2, max(1, num - 1), num})
    masks = {size: (torch.arange(num) < size).float() for size in sizes}
    results = {size: computed(output, y, mask) for size, mask in masks.items()}
    for size, result in results.items():
        if not bool(result.value.isfinite().all() and result.gradient.isfinite().all()):
            part = "gradient" if bool(result.value.isfinite().all()) else "value"
            reason = f"its {part} is not finite for a batch with {counted(size, 'real sample')}"
            raise _refusal(loss, f"{what}: {reason}", KEEP_FINITE, "FN-0781")
    spread = _Result(
        value=torch.stack([each.value.abs().max() for each in results.values()]).max(),
        gradient=torch.stack([each.gradient.abs().max() for each in results.values()]).max(),
    )
    for size, result in results.items():
        others = [("with another content", computed(*each, masks[size])) for each in _contents(output, y, size)]
        rows = slice(size)
        others.append(("without them", computed(of_rows(output, rows), y[rows], torch.ones(size))))
        for how, other in others:
            if part := _difference(result, other, size, spread):
                raise _refusal(
                    loss,
                    f"{what} of a batch of {num} with {counted(size, 'real sample')} depends on the {num - size} "
                    f"masked ones: its {part} differs {how}",
                    LEAVE_OUT,
                    "FN-0782",
                )


def _result(loss: BatchLoss, output: Output, y: Tensor, mask: Tensor) -> _Result:
    parts = [output] if isinstance(output, Tensor) else [*output.values()]
    with torch.enable_grad():
        leaves = [part.detach().clone().requires_grad_(part.is_floating_point()) for part in parts]
        outputs = leaves[0] if isinstance(output, Tensor) else dict(zip(output, leaves, strict=True))
        value = loss(outputs, y, mask)
        learning = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = [torch.zeros_like(leaf) for leaf in learning]
        if value.requires_grad:
            gradients = [*torch.autograd.grad(value, learning, allow_unused=True, materialize_grads=True)]
    # The gradient of a scalar output is that of all samples; the first one is always real.
    first = (torch.arange(len(y)) == 0).float()[:, None]
    rows = [
        each.flatten(1) if each.dim() > 1 else each.reshape(-1, 1) * (1.0 if each.dim() else first)
        for each in gradients
    ]
    return _Result(value=value.detach().reshape(-1), gradient=torch.cat(rows, dim=1))


def _contents(output: Output, y: Tensor, size: int) -> Iterator[tuple[Output, Tensor]]:
    """Yield the batch with other samples after the first ``size``: copies of the first, as on a device, and several."""
    num = len(y)
    if size == num:
        return
    real = torch.arange(size)
    for padding in (torch.zeros(num - size, dtype=torch.int64), torch.arange(num - size)):
        index = torch.cat([real, padding])
        parts = {"": output} if isinstance(output, Tensor) else output
        taken = {path: part[index] if part.dim() else part for path, part in parts.items()}
        yield taken[""] if isinstance(output, Tensor) else taken, y[index]


def _difference(one: _Result, other: _Result, size: int, spread: _Result) -> str:
    """Return in what two results differ: ``value``, ``gradient`` or neither ("")."""
    if float((one.value - other.value).abs().max()) > TOLERANCE * float(spread.value):
        return "value"
    padding = torch.cat([each.gradient[size:].flatten() for each in (one, other)])
    wrong = torch.cat([(one.gradient[:size] - other.gradient[:size]).flatten(), padding]).abs()
    return "gradient" if float(wrong.max()) > TOLERANCE * float(spread.gradient) else ""


def _refusal(loss: BatchLoss, reason: str, advice: str, code: str) -> Untraceable:
    from fanin.edge.export.diagnosis.lines import first_line_of

    return Untraceable(reason, advice, Place(kind=LOSS, line=first_line_of(loss.function)), code=code)

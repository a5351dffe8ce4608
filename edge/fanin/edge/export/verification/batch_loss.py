"""The check of a BatchLoss: its value and its gradient are those of the real samples alone.

A device pads the last batch of its data, and the mask excludes the padding. In eager torch the loss is computed for
batches with few and with many real samples, at the begin and at the end. Each time, the others have different contents,
and then they are cut off.
The gradient is compared, too: a loss may have the right value and still train on padding.
"""

from collections.abc import Callable, Iterator, Sequence
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
FLOOR: Final = 1e-4
"""Floor of the scale of an output's gradient, relative to the largest of all outputs: less is rounding."""
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
    """The value of a loss, and its gradient by each output: one row for each sample (B, ...), or a scalar."""

    value: Tensor
    gradients: Sequence[Tensor]

    @property
    def not_finite(self) -> str:
        """The part that is not finite; "" if all are."""
        is_finite = bool(self.value.isfinite().all())
        gradients_are = all(bool(each.isfinite().all()) for each in self.gradients)
        return "" if is_finite and gradients_are else "gradient" if is_finite else "value"


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

    def computed(rows: Tensor, mask: Tensor) -> _Result:
        return guarded(what, prepared.module, lambda: _result(loss, of_rows(output, rows), y[rows], mask))

    every = torch.arange(num)
    sizes = sorted({1, min(2, num), (num + 1) // 2, max(1, num - 1), num})
    masks = [mask for size in sizes for mask in (every < size, every >= num - size)]
    results = [computed(every, mask.float()) for mask in masks]
    for mask, result in zip(masks, results, strict=True):
        if part := result.not_finite:
            reason = f"{what}: its {part} is not finite for a batch with {counted(int(mask.sum()), 'real sample')}"
            raise _refusal(loss, reason, KEEP_FINITE, "FN-0781")
    spreads = [max(float(each.value.abs()) for each in results)]
    spreads += [
        max(float(each.abs().max()) for each in parts)
        for parts in zip(*(result.gradients for result in results), strict=True)
    ]
    for mask, result in zip(masks, results, strict=True):
        for how, other in _others(mask, computed):
            if part := _difference(mask, result, other, spreads):
                size = int(mask.sum())
                raise _refusal(
                    loss,
                    f"{what} of a batch of {num} with {counted(size, 'real sample')} depends on the {num - size} "
                    f"masked ones: its {part} differs {how}",
                    LEAVE_OUT,
                    "FN-0782",
                )


def _result(loss: BatchLoss, output: Output, y: Tensor, mask: Tensor) -> _Result:
    parts = {"": output} if isinstance(output, Tensor) else output
    with torch.enable_grad():
        leaves = {path: part.detach().clone().requires_grad_(part.is_floating_point()) for path, part in parts.items()}
        value = loss(leaves[""] if isinstance(output, Tensor) else leaves, y, mask)
        learning = [leaf for leaf in leaves.values() if leaf.requires_grad]
        gradients: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in learning]
        if value.requires_grad:
            gradients = torch.autograd.grad(value, learning, allow_unused=True, materialize_grads=True)
    return _Result(value=value.detach(), gradients=gradients)


def _others(mask: Tensor, computed: Callable[[Tensor, Tensor], _Result]) -> Iterator[tuple[str, _Result]]:
    """Yield the results of the real samples with copies of the first one, as on a device, with others, and alone.

    Args:
        mask: The real samples (B,).
        computed: Computes the loss of these samples with this mask.
    """
    every, real = torch.arange(len(mask)), mask.nonzero()[:, 0]
    if len(real) < len(mask):
        for padding in (real[:1], every.flip(0)):
            yield "with another content", computed(torch.where(mask, every, padding), mask.float())
        yield "without them", computed(real, torch.ones(len(real)))


def _difference(mask: Tensor, one: _Result, other: _Result, spreads: Sequence[float]) -> str:
    """Return in what two results differ: ``value``, ``gradient`` or neither ("").

    Args:
        mask: The real samples (B,).
        one: The result of the batch.
        other: That of another one with the same real samples, or of these alone.
        spreads: The largest value, and the largest gradient of each output.
    """
    if float((one.value - other.value).abs()) > TOLERANCE * spreads[0]:
        return "value"
    for first, second, spread in zip(one.gradients, other.gradients, spreads[1:], strict=True):
        limit = TOLERANCE * max(spread, FLOOR * max(spreads[1:]))
        expected = second
        if first.dim():
            expected = torch.zeros_like(first)
            expected[mask] = second[mask] if len(second) == len(mask) else second
        if float((first - expected).abs().max()) > limit:
            return "gradient"
    return ""


def _refusal(loss: BatchLoss, reason: str, advice: str, code: str) -> Untraceable:
    from fanin.edge.export.diagnosis.lines import first_line_of

    return Untraceable(reason, advice, Place(kind=LOSS, line=first_line_of(loss.function)), code=code)

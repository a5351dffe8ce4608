"""The cross-entropy of logits that are split over the vocabulary: each rank of ``tp`` has some columns of the head.

No rank ever has the full logits. For each token the ranks exchange the largest logit, the sum of the exponentials and
the target's logit: 3 numbers instead of the vocabulary. Every rank then has the same losses. The backward pass needs no
exchange, because the gradient of a rank's logits depends on these numbers and on its own logits.

torch's ``loss_parallel`` replaces operators in the complete process while the loss and its backward pass run. A
schedule of a pipeline runs them in one call with all its layers, and an objective over samples needs the loss of each
token.

Reference:
    Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3, for the parallel cross-entropy.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fanin.edge.runtimes.graphs import NO_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """The columns of the logits that this rank has.

    Attributes:
        group: the ranks of ``tp``.
        first: the token of the first column.
        size: number of columns. It may be 0, because torch gives equal shards to the first ranks.
    """

    group: dist.ProcessGroup
    first: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup, vocabulary: int) -> "VocabularyShard":
        """Return the shard of this rank, as DTensor's ``Shard`` splits a dimension of ``vocabulary`` rows."""
        each = -(-vocabulary // group.size())
        first = min(group.rank() * each, vocabulary)
        return cls(group=group, first=first, size=min(each, vocabulary - first))

    def sum_loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the summed cross-entropy over all tokens, without NO_TOKEN."""
        return self.losses(logits, tokens).sum()

    def mean_losses(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy over the tokens of each sample (B,)."""
        return self.losses(logits, tokens).sum(dim=1) / (tokens != NO_TOKEN).sum(dim=1).clamp(min=1)

    def losses(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the cross-entropy at each token, in float32 or wider; 0 at NO_TOKEN.

        Args:
            logits: this rank's columns (..., size).
            tokens: the targets (...), the same on every rank.
        """
        losses: Tensor = _ShardedCrossEntropy.apply(logits, tokens, self)  # type: ignore[no-untyped-call]
        return losses

    def predict(self, logits: Tensor) -> Tensor:
        """Return the token with the largest logit (...), the first of equal ones."""
        if self.size:
            largest, column = logits.max(dim=-1)
        else:
            largest, column = _least(logits), torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        peak = largest.clone()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.group)
        none = torch.iinfo(torch.long).max
        token = torch.where((largest == peak) & (self.size > 0), column + self.first, none)
        dist.all_reduce(token, dist.ReduceOp.MIN, group=self.group)
        return token


class _Context(Protocol):
    """The values that autograd keeps from the forward pass for the backward pass."""

    dtype: torch.dtype
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _ShardedCrossEntropy(torch.autograd.Function):
    """The cross-entropy at each token, from one rank's columns of the logits."""

    @staticmethod
    def forward(ctx: _Context, logits: Tensor, tokens: Tensor, shard: VocabularyShard) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        peak = wide.amax(dim=-1) if shard.size else _least(wide)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=shard.group)
        wide = wide - peak[..., None]
        column = tokens.long() - shard.first
        is_own = (column >= 0) & (column < shard.size)
        column = torch.where(is_own, column, 0)
        own = wide.gather(-1, column[..., None])[..., 0] if shard.size else torch.zeros_like(peak)
        exponentials = wide.exp_()
        sums = torch.stack((exponentials.sum(dim=-1), torch.where(is_own, own, 0.0)))
        dist.all_reduce(sums, group=shard.group)
        total, target = sums
        ctx.save_for_backward(exponentials.div_(total[..., None]), column, is_own, tokens != NO_TOKEN)
        ctx.dtype = logits.dtype
        return torch.where(tokens != NO_TOKEN, total.log() - target, 0.0)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None, None]:
        shares, column, is_own, is_target = ctx.saved_tensors
        factor = torch.where(is_target, gradients[0], 0.0)[..., None]
        result = shares * factor
        if result.shape[-1]:
            result.scatter_add_(-1, column[..., None], -factor * is_own[..., None])
        return result.to(ctx.dtype), None, None


def _least(logits: Tensor) -> Tensor:
    """Return a value below every logit for each token, for a rank without columns."""
    return torch.full(logits.shape[:-1], -torch.inf, dtype=logits.dtype, device=logits.device)

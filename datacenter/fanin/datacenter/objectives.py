"""What a job's model is trained for, samples that say nothing left out, and how often it is right when evaluated.

An App's loss is one number a sample and its mean is over samples. A model of tokens may have its mean over tokens
instead, which is the default for a decoder. Both are sums with a count, so padding costs nothing and changes nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fanin.datacenter.parallel.objective import TOKENS, Objective, sample_objective
from fanin.edge.runtimes.graphs import NO_TOKEN

SampleLoss = Callable[[Tensor, Tensor], Tensor]
"""(outputs (B, ...), targets (B, ...)) -> the loss of each sample (B,)."""


def real_samples(targets: Tensor) -> Tensor:
    """Which samples (B,) are not there to fill up a batch."""
    each = targets.reshape(len(targets), -1)
    return ~each.isnan().all(dim=1) if targets.is_floating_point() else (each != NO_TOKEN).any(dim=1)


def filled_objective(loss: SampleLoss) -> Objective:
    """The mean of ``loss`` over the samples that are real."""

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        real = real_samples(targets)
        # A loss is given what it can take, and its gradient for such a sample is nothing. Places without a token in
        # a real sample are the loss's own business.
        safe = targets.nan_to_num() if targets.is_floating_point() else targets.clamp(min=0)
        wanted = torch.where(real.reshape(-1, *[1] * (targets.ndim - 1)), targets, safe)
        return torch.where(real, loss(outputs, wanted), 0.0)

    return Objective(loss_sum=sample_objective(losses).loss_sum, count=lambda targets: real_samples(targets).sum())


def token_means(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy over the tokens of each sample (B,), of logits (B, T, vocabulary)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(wide.transpose(1, 2), tokens.long(), ignore_index=NO_TOKEN, reduction="none")
    return losses.sum(dim=1) / (tokens != NO_TOKEN).sum(dim=1).clamp(min=1)


def token_objective(*, over_samples: bool) -> Objective:
    """The mean over tokens, or over samples of their means over tokens."""
    return filled_objective(token_means) if over_samples else TOKENS


class Scored:
    """An objective that counts, while nothing is trained, how many labels or tokens were asked for and how many found.

    It does so where the outputs are: on the ranks of a pipeline's last stage.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._found = [0, 0]

    @property
    def objective(self) -> Objective:
        """The objective as an engine takes it."""
        return Objective(loss_sum=self._loss_sum, count=self._objective.count)

    def take(self) -> Tensor:
        """(found, asked) since the last time, of this rank."""
        found, self._found = torch.tensor(self._found, dtype=torch.float64), [0, 0]
        return found

    def _loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled() and not targets.is_floating_point():
            asked = targets != NO_TOKEN
            self._found[0] += int((outputs.argmax(dim=-1) == targets)[asked].sum())
            self._found[1] += int(asked.sum())
        return self._objective.loss_sum(outputs, targets)

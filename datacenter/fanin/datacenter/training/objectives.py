"""What a job's model is trained for, samples that say nothing left out, and how often it is right when evaluated.

An App's loss is one number a sample and its mean is over samples. A model of tokens may have its mean over tokens
instead, which is the default for a decoder. Both are sums with a count, so padding costs nothing and changes nothing.
"""

from collections.abc import Callable
from dataclasses import replace

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
    """An objective that counts, as it is evaluated, how many labels or tokens were asked for and how many found.

    It does so where the outputs are: on the ranks of a pipeline's last stage.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._found = torch.zeros(2, dtype=torch.float64)

    @property
    def objective(self) -> Objective:
        """The objective as an engine takes it."""
        return replace(self._objective, observer=self)

    def take(self) -> Tensor:
        """(found, asked) since the last time, of this rank."""
        found, self._found = self._found, torch.zeros(2, dtype=torch.float64)
        return found

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(found, asked) in these; nothing is asked of values."""
        if targets.is_floating_point():
            return torch.zeros(2, dtype=torch.float64)
        asked = targets != NO_TOKEN
        found = (outputs.argmax(dim=-1) == targets)[asked].sum()
        return torch.tensor([int(found), int(asked.sum())], dtype=torch.float64)

    def add(self, score: Tensor) -> None:
        """Let a score count."""
        self._found += score

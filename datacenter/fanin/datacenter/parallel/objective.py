"""Training objectives: a summed loss, and its divisor.

Sums and counts add up over any split of a batch. Means do not: with padding, the parts of a batch have different
counts. Therefore the engine divides once, by the count of the batch over all ranks, and every rank divides by the same
count. Padding contributes nothing to the sum or to the count.

An App's loss is one number per sample, and its mean is over samples. The mean of a token model is over tokens by
default, or over samples. A loss that compares the samples of a batch does not add up: its batch must not be split.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fanin.datacenter.parallel.vocabulary import VocabularyShard
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.errors import InvalidInput

SampleLoss = Callable[[Tensor, Tensor], Tensor]
"""(outputs (B, ...), targets (B, ...)) -> the loss of each sample (B,)."""
BatchLossSum = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(outputs (B, ...), targets (B, ...), mask of the real samples (B,)) -> the sum of the loss over these, a scalar."""


class EvaluationObserver(Protocol):
    """A consumer of the predictions of an evaluation.

    ``score`` has no side effects, because the engine does not count every batch that it scores.
    """

    def score(self, predictions: Tensor, targets: Tensor) -> Tensor: ...

    def add(self, score: Tensor) -> None: ...


def largest(outputs: Tensor) -> Tensor:
    """Return the index of the largest output along the last dimension."""
    return outputs.argmax(dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss as the engine computes it.

    Attributes:
        loss_sum: (outputs, targets) -> the summed loss, a scalar.
        count: (targets) -> the divisor of the sum, a scalar.
        observer: Receives the predictions of evaluations, but not those of training.
        predict: (outputs) -> the token or class with the largest output; the values of a model of values.
        sharded: (this rank's columns of the vocabulary) -> the same objective on these columns of the logits. None: the
            loss needs full outputs, so the ranks of tp gather them. Replace it together with ``loss_sum``.
    """

    loss_sum: Callable[[Tensor, Tensor], Tensor]
    count: Callable[[Tensor], Tensor]
    observer: EvaluationObserver | None = None
    predict: Callable[[Tensor], Tensor] = largest
    sharded: "Callable[[VocabularyShard], Objective] | None" = None


def token_loss_sum(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the summed cross-entropy of ``logits`` (B, T, vocabulary) against ``tokens`` (B, T), without NO_TOKEN.

    The sum is computed in float32 or wider.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide.flatten(0, -2), tokens.flatten().long(), ignore_index=NO_TOKEN, reduction="sum")


def count_tokens(tokens: Tensor) -> Tensor:
    """Return the number of target tokens."""
    return (tokens != NO_TOKEN).sum()


def _sharded_tokens(shard: VocabularyShard) -> Objective:
    return Objective(loss_sum=shard.sum_loss, count=count_tokens, predict=shard.predict)


TOKENS: Final = Objective(loss_sum=token_loss_sum, count=count_tokens, sharded=_sharded_tokens)
"""The mean cross-entropy over tokens."""


def sample_objective(loss: SampleLoss) -> Objective:
    """Return the mean of ``loss`` over samples, without regard to padding."""
    return Objective(
        loss_sum=lambda outputs, targets: loss(outputs, targets).sum(),
        count=lambda targets: torch.tensor(len(targets), device=targets.device),
    )


def mark_padding(targets: Tensor, is_padding: Tensor) -> None:
    """Remove the targets of padding (B,) from ``targets`` (B, ...): NO_TOKEN for integers, NaN for floats."""
    targets[is_padding] = float("nan") if targets.is_floating_point() else NO_TOKEN


def real_samples(targets: Tensor) -> Tensor:
    """Return which samples (B,) are not padding, as ``mark_padding`` has marked it."""
    each = targets.reshape(len(targets), -1)
    return ~each.isnan().all(dim=1) if targets.is_floating_point() else (each != NO_TOKEN).any(dim=1)


def padded_objective(loss: SampleLoss) -> Objective:
    """Return the mean of ``loss`` over the samples that are not padding."""

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        real, safe_targets = _with_valid_padding(targets)
        # A sum of losses in half precision has three digits, and in float16 it may overflow.
        per_sample = loss(_widened(_checked(outputs)), safe_targets)
        if per_sample.shape != real.shape:
            raise InvalidInput(
                f"loss: got shape {tuple(per_sample.shape)} for {len(real)} samples, expected {tuple(real.shape)}, one "
                "number for each sample; use reduction='none' and take the mean over the other dimensions, or write "
                "loss=BatchLoss(function) if it compares samples",
                code="FN-1305",
            )
        return torch.where(real, per_sample, 0.0)

    return Objective(loss_sum=sample_objective(losses).loss_sum, count=lambda targets: real_samples(targets).sum())


def batch_objective(loss_sum: BatchLossSum) -> Objective:
    """Return the mean over the samples that are not padding of a loss that compares them. The batch must be whole."""

    def total(outputs: Tensor, targets: Tensor) -> Tensor:
        real, safe_targets = _with_valid_padding(targets)
        wide = _widened(_checked(outputs))
        return loss_sum(wide, safe_targets, real.to(wide.dtype))

    return Objective(loss_sum=total, count=lambda targets: real_samples(targets).sum())


def _with_valid_padding(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return which samples are real (B,), and the targets with valid ones for padding: the loss needs them, too.

    Its gradient there is zero. Positions without a token inside of a real sample are left to the loss.
    """
    real = real_samples(targets)
    valid = targets.nan_to_num() if targets.is_floating_point() else targets.clamp(min=0)
    return real, torch.where(real.reshape(-1, *[1] * (targets.ndim - 1)), targets, valid)


def _widened(outputs: Tensor) -> Tensor:
    """Return outputs in half precision as float32."""
    return outputs.float() if outputs.is_floating_point() and outputs.element_size() < 4 else outputs


def _checked(outputs: object) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    raise InvalidInput(
        f"model: the module returned {type(outputs).__name__}, expected a tensor; return that tensor alone in forward",
        code="FN-1306",
    )


def token_means(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy over the tokens of each sample (B,), from logits (B, T, vocabulary)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(wide.transpose(1, 2), tokens.long(), ignore_index=NO_TOKEN, reduction="none")
    return losses.sum(dim=1) / (tokens != NO_TOKEN).sum(dim=1).clamp(min=1)


def token_objective(*, over_samples: bool) -> Objective:
    """Return the mean over all tokens, or the mean over samples of each sample's mean over tokens."""
    return replace(padded_objective(token_means), sharded=_sharded_samples) if over_samples else TOKENS


def _sharded_samples(shard: VocabularyShard) -> Objective:
    return replace(padded_objective(shard.mean_losses), predict=shard.predict)


class ScoredObjective:
    """An objective that also counts correct predictions while it is evaluated.

    It counts where the outputs are: on the ranks of a pipeline's last stage. It implements EvaluationObserver.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._score = torch.zeros(2, dtype=torch.float64)

    @property
    def objective(self) -> Objective:
        """The objective to build an engine with."""
        return replace(self._objective, observer=self)

    def take(self) -> Tensor:
        """Return this rank's (correct, targets) since the last call, (2,), and reset them."""
        score, self._score = self._score, torch.zeros(2, dtype=torch.float64)
        return score

    def score(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return (correct, targets) of a batch, (2,). Floating-point targets and predictions count as none."""
        if targets.is_floating_point() or predictions.is_floating_point():
            return torch.zeros(2, dtype=torch.float64)
        is_target = targets != NO_TOKEN
        correct = (predictions == targets)[is_target].sum()
        return torch.tensor([int(correct), int(is_target.sum())], dtype=torch.float64)

    def add(self, score: Tensor) -> None:
        """Add a batch's score."""
        self._score += score

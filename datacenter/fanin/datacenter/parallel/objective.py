"""What a model is trained for: a loss that is summed, and what it is divided by.

Sums and counts add up over any division of a batch, means do not: with padding, pieces of a batch count differently
much. The one division is by the count of the whole batch, over all ranks, and every rank makes it alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fanin.edge.runtimes.graphs import NO_TOKEN


class EvaluationObserver(Protocol):
    """Receives the outputs of an evaluation.

    ``score`` must not change the observer, because not every score is added.
    """

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor: ...

    def add(self, score: Tensor) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """``loss_sum`` (outputs, targets) to a scalar, and ``count`` (targets) to a scalar: what it is a sum of.

    ``observer`` is shown what is evaluated, and nothing of what is trained.
    """

    loss_sum: Callable[[Tensor, Tensor], Tensor]
    count: Callable[[Tensor], Tensor]
    observer: EvaluationObserver | None = None


def token_loss_sum(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of ``logits`` (B, T, vocabulary) against ``tokens`` (B, T), NO_TOKEN left out; float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide.flatten(0, -2), tokens.flatten().long(), ignore_index=NO_TOKEN, reduction="sum")


def count_tokens(tokens: Tensor) -> Tensor:
    """Tokens that are asked for."""
    return (tokens != NO_TOKEN).sum()


TOKENS: Final = Objective(loss_sum=token_loss_sum, count=count_tokens)
"""The mean over tokens."""


def sample_objective(loss: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    """The mean over samples of a ``loss`` (outputs, targets) -> (B,), as an App has it."""
    return Objective(
        loss_sum=lambda outputs, targets: loss(outputs, targets).sum(),
        count=lambda targets: torch.tensor(len(targets), device=targets.device),
    )

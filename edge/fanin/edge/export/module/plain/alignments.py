"""``ctc_loss`` by its recursion over time, in logarithms: the shape of a result of torch's kernel depends on values.

Reference:
    Graves et al. 2006, Connectionist temporal classification, section 4.1.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

NEVER: Final = -1e30
"""The logarithm of the probability of an impossible alignment. It is finite: minus infinity has no gradient."""
Lengths = Tensor | Sequence[int]


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> object:
    """Compute ``ctc_loss`` of a batch (T, B, C) with padded targets (B, S)."""
    if log_probs.dim() != 3 or targets.dim() != 2:
        return NotImplemented
    num_steps, num = log_probs.shape[:2]
    ends, sizes = (torch.as_tensor(each).reshape(-1, 1) for each in (input_lengths, target_lengths))
    # The states of a sample: its labels with a blank before, between and after them (B, 2 S + 1).
    labels = targets.clamp(min=0).to(torch.int64)
    blanks = torch.full((num, 1), blank)
    pairs = torch.stack([torch.full(labels.shape, blank), labels], 2).flatten(1)
    states = torch.cat([pairs, blanks], 1)
    emitted = log_probs.transpose(0, 1).gather(2, states.unsqueeze(1).expand(-1, num_steps, -1))
    # A label follows the label before it directly, unless they are equal.
    may_skip = torch.cat([states[:, :2] < 0, (states[:, 2:] != blank) & (states[:, 2:] != states[:, :-2])], 1)
    places = torch.arange(states.shape[1])
    alphas = torch.where(places < 2, emitted[:, 0], NEVER)
    for step in range(1, num_steps):
        before = torch.nn.functional.pad(alphas, (2, 0), value=NEVER)
        sources = torch.stack([alphas, before[:, 1:-1], torch.where(may_skip, before[:, :-2], NEVER)])
        following = torch.logsumexp(sources, 0) + emitted[:, step]
        alphas = torch.where(step < ends, following, alphas)
    is_last = (places == 2 * sizes) | (places == 2 * sizes - 1)
    losses = -torch.logsumexp(torch.where(is_last, alphas, NEVER), 1)
    is_possible = losses < -0.5 * NEVER
    losses = torch.where(is_possible, losses, 0.0 if zero_infinity else torch.inf)
    if reduction == "mean":
        return (losses / sizes.reshape(-1).clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses

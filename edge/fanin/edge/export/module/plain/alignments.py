"""``ctc_loss`` by its recursion over time, in logarithms: the shape of a result of torch's kernel depends on values.

The gradient is that of the paper, by the forward and the backward variables. Both recursions run in the same steps, the
backward one over reversed time and states. Autograd through the steps of one recursion would be three times as many
operators.

Reference:
    Graves et al. 2006, Connectionist temporal classification, section 4.1.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

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
    emitted = log_probs.gather(2, states.expand(num_steps, -1, -1))
    # A label follows the label before it directly, unless they are equal.
    may_skip = torch.cat([states[:, :2] < 0, (states[:, 2:] != blank) & (states[:, 2:] != states[:, :-2])], 1)
    places = torch.arange(states.shape[1])
    is_last = (places == 2 * sizes) | (places == 2 * sizes - 1)
    losses: Tensor = _Alignments.apply(emitted, may_skip, is_last, ends)  # type: ignore[no-untyped-call]  # torch's
    is_possible = losses < -0.5 * NEVER
    losses = torch.where(is_possible, losses, 0.0 if zero_infinity else torch.inf)
    if reduction == "mean":
        return (losses / sizes.reshape(-1).clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses


class _Alignments(torch.autograd.Function):
    """The negative logarithm of the probability of all alignments of each sample (B,).

    ``emitted`` (T, B, L) are the logarithms of the probabilities of the states in each step, ``may_skip`` (B, L) the
    states that may follow the state before the last one, ``is_last`` (B, L) those of the end, and ``ends`` (B, 1) the
    number of steps.
    """

    @staticmethod
    def forward(ctx: BackwardCFunction, emitted: Tensor, may_skip: Tensor, is_last: Tensor, ends: Tensor) -> Tensor:
        num_steps, num = emitted.shape[:2]
        # Over reversed time and states, the backward variables follow each other as the forward ones do.
        skips = torch.cat([may_skip[:, 2:], torch.zeros_like(may_skip[:, :2])], 1).flip(1)
        begins, firsts = num_steps - ends, is_last.flip(1)
        scores = emitted.flip(0).flip(2)
        if ctx.needs_input_grad[0]:
            first = torch.arange(emitted.shape[2]).expand(num, -1) < 2
            begins, firsts = torch.cat([begins, torch.zeros_like(begins)]), torch.cat([firsts, first])
            scores, skips = torch.cat([scores, emitted], 1), torch.cat([skips, may_skip])
        variables = _recursion(scores, skips, (begins, firsts))
        betas = variables[:, :num].flip(0).flip(2)
        # The alignments begin in the first two states.
        losses = -torch.logsumexp(betas[0, :, :2], 1)
        if ctx.needs_input_grad[0]:
            shares = (variables[:, num:] + betas - emitted + losses.reshape(-1, 1)).clamp(max=0.0).exp()
            is_step = torch.arange(num_steps).reshape(-1, 1, 1) < ends
            is_possible = (losses < -0.5 * NEVER).reshape(-1, 1)
            ctx.save_for_backward(torch.where(is_step & is_possible, shares, 0.0))
        return losses

    @staticmethod
    def backward(ctx: BackwardCFunction, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (shares,) = ctx.saved_tensors
        return -gradient.reshape(-1, 1) * shares, None, None, None


def _recursion(scores: Tensor, may_skip: Tensor, begin: tuple[Tensor, Tensor]) -> Tensor:
    """Return the logarithms of the probabilities of all paths to each state in each step (T, B, L).

    Args:
        scores: The logarithms of the probabilities of the states in each step (T, B, L).
        may_skip: The states that may follow the state before the last one (B, L).
        begin: The step of the begin of each path (B, 1), and its states (B, L).
    """
    num_steps, num, width = scores.shape
    steps, (first_steps, firsts) = torch.arange(num_steps).reshape(-1, 1, 1), begin
    starts = torch.where((steps == first_steps) & firsts, scores, NEVER)
    penalties = torch.where(may_skip, 0.0, NEVER).to(scores.dtype)
    before = torch.full((num, 2), NEVER, dtype=scores.dtype)
    values, variables = torch.full((num, width), NEVER, dtype=scores.dtype), []
    for start, score in zip(starts.unbind(), scores.unbind(), strict=True):
        wide = torch.cat([before, values], 1)
        direct, skipped = wide[:, 1:-1], wide[:, :-2] + penalties
        largest = torch.maximum(torch.maximum(values, direct), skipped)
        total = (values - largest).exp() + (direct - largest).exp() + (skipped - largest).exp()
        values = torch.maximum(largest + total.log() + score, start)
        variables.append(values)
    return torch.stack(variables)

"""Losses without a reduction, in operators that every runtime has.

A loss gives one number for each sample (B,), so that a mask can leave out the padding of a last short batch. The
right class is found by comparison: ``one_hot`` and ``gather`` either look at the labels while they are traced, or
need a scatter in the backward pass that not every runtime has. It is multiplied by 1 and the others by 0, as choosing
takes longer on devices (6 % of a step in onnxruntime, 9 in LiteRT, where the loss is most of it); so a class is hidden
by a large negative number, not by minus infinity.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]
"""(what the module gave (B, ...), y (B, ...)) -> the loss of each sample (B,)."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in nats of each sample (B,), of logits (B, num_classes) and labels (B,)."""
    return -(_right(logits, labels) * torch.log_softmax(logits, dim=-1)).sum(dim=-1)


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the places of each sample (B,), of logits (B, T, V) and tokens (B, T).

    A place with the token -1 is left out.
    """
    taken = (tokens >= 0).to(logits.dtype)
    losses = -(_right(logits, tokens) * torch.log_softmax(logits, dim=-1)).sum(dim=-1)
    return (taken * losses).sum(dim=1) / taken.sum(dim=1).clamp(min=1.0)


def squared_error(values: Tensor, wanted: Tensor) -> Tensor:
    """Mean squared error over the values of each sample (B,), both (B, ...) and alike.

    Raises ValueError for shapes that differ: broadcast, they would give a number that means nothing.
    """
    if values.shape != wanted.shape:
        raise ValueError(f"squared error: got values {tuple(values.shape)} and y {tuple(wanted.shape)}, expected alike")
    return (values - wanted).square().flatten(start_dim=1).mean(dim=1)


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    """1 at the right class and 0 elsewhere, in the shape of the logits."""
    classes = torch.arange(logits.shape[-1], device=logits.device, dtype=labels.dtype)
    return (labels.unsqueeze(-1) == classes).to(logits.dtype)

"""Losses without a reduction, in operators that every runtime has.

A loss returns one number for each sample (B,), so that a mask can exclude the padding of a last short batch. The right
class is selected by a comparison. ``one_hot`` and ``gather`` would read the labels while they are traced, or need a
scatter in the backward pass, which not every runtime has.

The comparison becomes a product with 1 and 0. A selection is slower: where the loss dominates, it costs 6 % of a step
in onnxruntime and 9 % in LiteRT. A product of 0 and infinity is NaN, so a module must hide a class by a large negative
number and not by minus infinity.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[..., Tensor]
"""(output of the module (B, ...), y (B, ...)) -> loss of each sample (B,). The output is a dict of tensors by path for
an App with several paths in ``output``."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each sample in nats.

    Args:
        logits: (B, num_classes).
        labels: (B,) integer classes.

    Returns:
        Losses (B,).
    """
    return -(_right(logits, labels) * torch.log_softmax(logits, dim=-1)).sum(dim=-1)


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy over the positions of each sample, in nats.

    Args:
        logits: (B, T, V).
        tokens: (B, T) next tokens. A position with the token -1 is excluded.

    Returns:
        Losses (B,).
    """
    counted = (tokens >= 0).to(logits.dtype)
    losses = -(_right(logits, tokens) * torch.log_softmax(logits, dim=-1)).sum(dim=-1)
    return (counted * losses).sum(dim=1) / counted.sum(dim=1).clamp(min=1.0)


def squared_error(values: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error over the values of each sample.

    Args:
        values: Output of the module (B, ...).
        target: Targets of the same shape.

    Returns:
        Losses (B,).

    Raises:
        ValueError: The shapes differ. Broadcasting them would return a meaningless number.
    """
    if values.shape != target.shape:
        raise ValueError(
            f"squared error: got values {tuple(values.shape)} and y {tuple(target.shape)}, expected the same"
        )
    return (values - target).square().flatten(start_dim=1).mean(dim=1)


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 at the right class and 0 elsewhere, in the shape of the logits."""
    classes = torch.arange(logits.shape[-1], device=logits.device, dtype=labels.dtype)
    return (labels.unsqueeze(-1) == classes).to(logits.dtype)

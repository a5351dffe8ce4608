"""Gradients of operators that select, as matrix products and padding: nothing is scattered.

What torch adds to selected places is here the product with a matrix that has a one where a row was selected, or the
selected part with zeros around it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fanin.edge.export.decompositions.portable import resized, stuffed
from fanin.protos.errors import UnsupportedModel


def embedding_backward(dy: Tensor, indices: Tensor, num: int, padding: int, by_frequency: bool) -> Tensor:
    """``aten.embedding_dense_backward``, whose arguments these are."""
    if by_frequency:
        raise UnsupportedModel(
            "embedding: got scale_grad_by_freq=True in a trained part, expected False; scale the loss instead"
        )
    chosen = one_hot(indices.reshape(-1), num, dy.dtype)
    if padding >= 0:
        kept = torch.tensor([[0.0 if index == padding else 1.0 for index in range(num)]], dtype=dy.dtype)
        chosen = chosen * kept
    return chosen.t() @ dy.reshape(-1, dy.shape[-1])


def one_hot(indices: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    """(...) -> (..., num): 1 at the index and 0 elsewhere; all 0 for an index out of range."""
    return (indices.unsqueeze(-1) == torch.arange(num, dtype=indices.dtype)).to(dtype)


def slice_backward(dy: Tensor, sizes: Sequence[int], dim: int, *rest: *tuple[int, int, int]) -> Tensor:
    """``aten.slice_backward``, whose arguments these are: the slice with zeros around it."""
    start, _, step = rest
    dim, have = dim % len(sizes), sizes[dim]
    first = min(max(start + have if start < 0 else start, 0), have)
    wide = stuffed(dy, dim, step)
    return resized(wide, dim, first, have - first - wide.shape[dim])


def select_backward(dy: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    """``aten.select_backward``, whose arguments these are."""
    dim, have = dim % len(sizes), sizes[dim]
    first = index % have
    return resized(dy.unsqueeze(dim), dim, first, have - first - 1)


def nll_loss(
    scores: Tensor, labels: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """``aten.nll_loss_forward`` and ``nll_loss2d_forward``, whose arguments these are."""
    share = _shares(scores, labels, weight, ignored)
    losses, total = -(share * scores).sum(_classes(scores)), share.sum()
    if reduction == NONE:
        return losses, torch.zeros_like(total)
    return (losses.sum() / total if reduction == MEAN else losses.sum()), total


def nll_loss_backward(
    dy: Tensor,
    scores: Tensor,
    labels: Tensor,
    *rest: *tuple[Tensor | None, int, int, Tensor],
) -> Tensor:
    """``aten.nll_loss_backward`` and ``nll_loss2d_backward``, whose arguments these are."""
    weight, reduction, ignored, total = rest
    share = _shares(scores, labels, weight, ignored)
    if reduction == NONE:
        dy = dy.unsqueeze(_classes(scores))
    return -share * (dy / total if reduction == MEAN else dy)


NONE, MEAN = 0, 1
"""torch's numbers for a loss's reduction; 2 is the sum."""


def _classes(scores: Tensor) -> int:
    """The dimension that holds the classes: the first without samples, else the second."""
    return 0 if scores.dim() == 1 else 1


def _shares(scores: Tensor, labels: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """What each score counts, in the shape of the scores."""
    dim = _classes(scores)
    column = [-1 if index == dim else 1 for index in range(scores.dim())]
    places = torch.arange(scores.shape[dim], dtype=labels.dtype).reshape(column)
    wanted = labels.unsqueeze(dim)
    share = ((wanted == places) & (wanted != ignored)).to(scores.dtype)
    return share if weight is None else share * weight.reshape(column)

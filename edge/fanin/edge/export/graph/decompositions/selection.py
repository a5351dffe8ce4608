"""Gradients of operators that select, and additions at an index, without a scatter: not every runtime has one.

To add values at selected positions is a product with a matrix that has a one where a row was selected. The gradient of
a slice is the slice with zeros around it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fanin.edge.export.graph.decompositions.windows import resized, stuffed
from fanin.edge.export.refusals import NoForm, Place, running_line
from fanin.protos.errors import UnsupportedModel


def embedding_backward(
    dy: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Compute ``aten.embedding_dense_backward``. Raises UnsupportedModel for ``scale_grad_by_freq``."""
    if scale_grad_by_freq:
        raise UnsupportedModel(
            "embedding: got scale_grad_by_freq=True in a trained part, expected False; scale the loss instead",
            code="FN-0783",
        )
    chosen = one_hot(indices.reshape(-1), num_weights, dy.dtype)
    if padding_idx >= 0:
        mask = torch.tensor([[0.0 if row == padding_idx else 1.0 for row in range(num_weights)]], dtype=dy.dtype)
        chosen = chosen * mask
    return chosen.t() @ dy.reshape(-1, dy.shape[-1])


def one_hot(indices: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    """Return (..., num) for indices (...): 1 at the index and 0 elsewhere; all 0 for an index out of range."""
    return (indices.unsqueeze(-1) == torch.arange(num, dtype=indices.dtype)).to(dtype)


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> object:
    """Compute ``aten.index_put`` with a mask, or at integers along dimensions that follow each other.

    Keep the operator otherwise. A position that occurs twice gets its last value, as in torch's own kernel.
    """
    pairs = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    (dim, first), num_dims = pairs[0], len(pairs)
    if num_dims == 1 and first.dtype == torch.bool:
        target = _where(x, dim, first, values)
        if target is None:
            return NotImplemented
        where, value = target
        return torch.where(where, x + value if accumulate else value, x)
    if any(each.dtype == torch.bool for _, each in pairs) or pairs[-1][0] - dim != num_dims - 1:
        return NotImplemented
    before, sizes, after = x.shape[:dim], x.shape[dim : dim + num_dims], x.shape[dim + num_dims :]
    parts = torch.broadcast_tensors(*(each for _, each in pairs))  # type: ignore[no-untyped-call]  # torch's has no types
    places = torch.zeros((), dtype=first.dtype)
    for size, part in zip(sizes, parts, strict=True):
        places = places * size + torch.where(part < 0, part + size, part)
    num = sizes.numel()
    chosen = one_hot(places.reshape(-1), num, values.dtype)
    if not accumulate:
        later = torch.ones(len(chosen), len(chosen), dtype=values.dtype).triu(1) @ chosen
        chosen = torch.where(later > 0.0, 0.0, chosen)
    rows = values.expand(*before, *places.shape, *after).reshape(*before, -1, *after).movedim(dim, -1)
    # In two dimensions: the converter's products of more dimensions are slower.
    added = (rows.reshape(-1, places.numel()) @ chosen).reshape(*rows.shape[:-1], num).movedim(-1, dim).reshape(x.shape)
    if accumulate:
        return x + added
    return torch.where(chosen.sum(0).reshape(*sizes, *(1 for _ in after)) > 0.0, added, x)


def index_put_into(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> object:
    """Compute ``aten.index_put_``: ``index_put``, written into ``x``."""
    result = index_put(x, indices, values, accumulate)
    return x.copy_(result) if isinstance(result, Tensor) else NotImplemented


def _where(x: Tensor, dim: int, mask: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return a mask over the dimensions of ``x`` from ``dim`` on, and values, so that both broadcast with ``x``.

    Returns None for values that differ between the positions of the mask: their number depends on the mask.
    """
    num_after = x.dim() - dim - mask.dim()
    if values.numel() > 1 and values.dim() > num_after:
        return None
    where = mask.reshape(*mask.shape, *[1] * num_after)
    return where, values.reshape(()) if values.numel() == 1 else values


def index(x: Tensor, indices: Sequence[Tensor | None]) -> object:
    """Keep ``aten.index``, but index a mask as integers, and refuse a mask as index. Raises NoForm.

    tflite-runtime has no GATHER_ND of true and false, and TFLite's converter needs integers as index.
    """
    if any(each is not None and each.dtype == torch.bool for each in indices):
        place = Place(line=running_line())
        raise NoForm(
            f"the graphs for TFLite: an index of true and false{f' {place}' if place.line else ''} has no form, "
            "expected an index of whole numbers",
            "compute the numbers once in __init__ (keep.nonzero().flatten(), as a buffer) and use index_select",
            place,
            code="FN-0783",
        )
    return torch.ops.aten.index(x.to(torch.int32), indices) != 0 if x.dtype == torch.bool else NotImplemented


def slice_backward(dy: Tensor, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    """Compute ``aten.slice_backward``: the slice, surrounded by zeros."""
    dim, have = dim % len(input_sizes), input_sizes[dim]
    first = min(max(start + have if start < 0 else start, 0), have)
    wide = stuffed(dy, dim, step)
    return resized(wide, dim, first, have - first - wide.shape[dim])


def slice_scatter(
    x: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Compute ``aten.slice_scatter``: ``x`` with the slice replaced by ``src``."""
    dim %= x.dim()
    if not src.shape[dim]:
        return x
    if step != 1:
        place = (x.shape, dim, start or 0, x.shape[dim], step)
        where = slice_backward(torch.ones([size if each == dim else 1 for each, size in enumerate(src.shape)]), *place)
        return torch.where(where > 0.0, slice_backward(src, *place), x)
    have, first = x.shape[dim], start or 0
    first = min(max(first + have if first < 0 else first, 0), have)
    last = first + src.shape[dim]
    parts = (x.narrow(dim, 0, first), src, x.narrow(dim, last, have - last))
    return torch.cat([part for part in parts if part.shape[dim]], dim)


def select_backward(dy: Tensor, input_sizes: Sequence[int], dim: int, index: int) -> Tensor:
    """Compute ``aten.select_backward``: the selected slice, surrounded by zeros."""
    dim, have = dim % len(input_sizes), input_sizes[dim]
    first = index % have
    return resized(dy.unsqueeze(dim), dim, first, have - first - 1)


def diagonal_backward(dy: Tensor, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Tensor:
    """Compute ``aten.diagonal_backward``: (..., n) on the diagonal of zeros."""
    rows, columns = input_sizes[dim1], input_sizes[dim2]
    places = torch.arange(dy.shape[-1])
    is_row = one_hot(places + max(-offset, 0), rows, dy.dtype)
    is_column = one_hot(places + max(offset, 0), columns, dy.dtype)
    return ((is_row.t() * dy.unsqueeze(-2)) @ is_column).movedim((-2, -1), (dim1, dim2))


def diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Compute ``aten.diagonal_scatter``: ``x`` with the diagonal replaced by ``src`` (..., n)."""
    where, values = (diagonal_backward(each, x.shape, offset, dim1, dim2) for each in (torch.ones(src.shape), src))
    return torch.where(where > 0.0, values, x)


def unfold_backward(dy: Tensor, input_sizes: Sequence[int], dim: int, size: int, step: int) -> Tensor:
    """Compute ``aten.unfold_backward``: the sum of windows (..., num, ..., size) where they overlap."""
    dim %= len(input_sizes)
    num = dy.shape[dim]
    places = (torch.arange(num) * step).unsqueeze(-1) + torch.arange(size)
    windows = dy.movedim(dim, -2).flatten(-2)
    return (windows @ one_hot(places.flatten(), input_sizes[dim], dy.dtype)).movedim(-1, dim)


def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Compute ``aten.nll_loss_forward`` and ``aten.nll_loss2d_forward``."""
    share = _shares(x, target, weight, ignore_index)
    losses, total_weight = -(share * x).sum(_class_dim(x)), share.sum()
    if reduction == NONE:
        return losses, torch.zeros_like(total_weight)
    return (losses.sum() / total_weight if reduction == MEAN else losses.sum()), total_weight


def nll_loss_backward(
    dy: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Compute ``aten.nll_loss_backward`` and ``aten.nll_loss2d_backward``."""
    share = _shares(x, target, weight, ignore_index)
    if reduction == NONE:
        dy = dy.unsqueeze(_class_dim(x))
    return -share * (dy / total_weight if reduction == MEAN else dy)


NONE, MEAN = 0, 1
"""torch's numbers of a loss reduction; 2 is the sum."""


def _class_dim(x: Tensor) -> int:
    """Return the dimension of the classes: the first for a single sample, otherwise the second."""
    return 0 if x.dim() == 1 else 1


def _shares(x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the weight of each log-probability in the loss, in the shape of ``x``."""
    dim = _class_dim(x)
    column = [-1 if index == dim else 1 for index in range(x.dim())]
    classes = torch.arange(x.shape[dim], dtype=target.dtype).reshape(column)
    labels = target.unsqueeze(dim)
    share = ((labels == classes) & (labels != ignore_index)).to(x.dtype)
    return share if weight is None else share * weight.reshape(column)

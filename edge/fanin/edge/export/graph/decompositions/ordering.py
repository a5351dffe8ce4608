"""Sorting, and additions at an index that is computed, for TFLite, whose runtimes have neither; and logcumsumexp.

The order of n values is computed by comparing all pairs. Values move by a product with a matrix of zeros and ones. So
the memory and the time grow with n x n: these forms are for rows of some hundred values.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload

from fanin.edge.export.graph.decompositions.selection import one_hot

aten = torch.ops.aten


def forward_table() -> dict[OpOverload, Callable[..., object]]:
    """Return the forms of the operators that modules call."""
    return {**table(), aten.argsort.default: argsort}


def table() -> dict[OpOverload, Callable[..., object]]:
    """Return the forms for graphs that train."""
    return {
        aten.sort.default: sort,
        aten.sort.stable: stable_sort,
        aten.topk.default: topk,
        aten.scatter.src: scatter,
        aten.scatter_add.default: scatter_add,
        aten.index_add.default: index_add,
    }


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> object:
    """Compute ``aten.sort``. Equal values keep their order."""
    return _ordered(x, dim, x.shape[dim], descending=descending) if x.dim() else NotImplemented


def stable_sort(x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> object:
    """Compute ``aten.sort.stable``, as ``sort``."""
    return sort(x, dim, descending)


def argsort(x: Tensor, dim: int = -1, descending: bool = False) -> object:
    """Compute ``aten.argsort``: the indices of ``sort``."""
    return _ordered(x, dim, x.shape[dim], descending=descending)[1] if x.dim() else NotImplemented


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> object:
    """Compute ``aten.topk``. Equal values keep their order."""
    return _ordered(x, dim, k, descending=largest) if x.dim() else NotImplemented


def logcumsumexp(x: Tensor, dim: int) -> object:
    """Compute ``aten.logcumsumexp``. Each prefix of a row is shifted by its own maximum.

    The exporter's form shifts by the maximum of the complete row. In float32 the sum of a prefix is then 0 if all of
    its values are 104 or more below that maximum. Its logarithm is infinite.
    """
    if not x.dim():
        return NotImplemented
    rows = x.movedim(dim, -1)
    places = torch.arange(rows.shape[-1])
    # (..., n, n): row i has the values up to position i.
    beginnings = torch.where(places <= places.unsqueeze(-1), rows.unsqueeze(-2), -math.inf)
    # A maximum of -inf would give -inf - -inf.
    largest = beginnings.amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).min)
    sums = (beginnings - largest).exp().sum(-1).log() + largest.squeeze(-1)
    return sums.movedim(-1, dim)


def _ordered(x: Tensor, dim: int, num: int, *, descending: bool) -> tuple[Tensor, Tensor]:
    """Return the first ``num`` values of an order along ``dim``, and their indices."""
    rows = x.movedim(dim, -1)
    places = torch.arange(rows.shape[-1])
    one, other = rows.unsqueeze(-1), rows.unsqueeze(-2)
    is_before = other > one if descending else other < one
    # Position j of the last dimension comes before position i of the previous dimension.
    is_earlier = (other == one) & (places < places.unsqueeze(-1))
    rank = (is_before | is_earlier).to(torch.float32).sum(-1)
    chosen = rank.unsqueeze(-2) == torch.arange(num, dtype=torch.float32).unsqueeze(-1)
    # Not a product: 0 times an infinite value is NaN.
    values = torch.where(chosen, rows.unsqueeze(-2), 0.0).sum(-1)
    indices = (chosen.to(x.dtype) * places.to(x.dtype)).sum(-1).round().to(torch.int64)
    return values.movedim(-1, dim), indices.movedim(-1, dim)


def scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> object:
    """Compute ``aten.scatter_add`` of an index that is as wide as ``x``; keep the operator otherwise."""
    placed = _placed(x, dim, index, src)
    return NotImplemented if placed is None else x + placed[0]


def scatter(x: Tensor, dim: int, index: Tensor, src: Tensor) -> object:
    """Compute ``aten.scatter`` of an index that is as wide as ``x``; keep the operator otherwise.

    If a position receives several values, torch keeps an arbitrary one. This form computes their mean.
    """
    placed = _placed(x, dim, index, src)
    if placed is None:
        return NotImplemented
    total, num = placed
    return torch.where(num > 0.0, total / num.clamp(min=1.0), x)


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> object:
    """Compute ``aten.index_add`` of floating-point values; keep the operator for others."""
    if not x.is_floating_point() or index.dim() != 1:
        return NotImplemented
    added = source.movedim(dim, -1) @ one_hot(index, x.shape[dim], source.dtype)
    return x + alpha * added.movedim(-1, dim)


def _placed(x: Tensor, dim: int, index: Tensor, src: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the sum and the number of the values for each position of x; None if the index is narrower than x."""
    narrower = [size != x.shape[at] for at, size in enumerate(index.shape) if at != dim % max(1, x.dim())]
    if not x.dim() or any(narrower) or not x.is_floating_point():
        return None
    chosen = one_hot(index.movedim(dim, -1), x.shape[dim], src.dtype)
    values = src.narrow(dim, 0, index.shape[dim]).movedim(dim, -1)
    # Not a product: 0 times an infinite value is NaN.
    total = torch.where(chosen > 0.0, values.unsqueeze(-1), 0.0).sum(-2)
    return total.movedim(-1, dim), chosen.sum(-2).movedim(-1, dim)

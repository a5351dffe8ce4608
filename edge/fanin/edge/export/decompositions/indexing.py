"""What is added to the places that an index names, as a matrix product: a scatter is not in every runtime."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fanin.edge.export.decompositions.selection import one_hot


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> object:
    """``aten.index_put``, whose arguments these are, where values are added along one dimension; others stay."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if not accumulate or len(given) != 1 or given[0][1].dim() != 1 or given[0][1].dtype == torch.bool:
        return NotImplemented
    ((dim, index),) = given
    num = x.shape[dim]
    chosen = one_hot(torch.where(index < 0, index + num, index), num, values.dtype)
    rows = values.expand(*x.shape[:dim], len(index), *x.shape[dim + 1 :]).movedim(dim, -1)
    # Two dimensions: the converter has products of more, and slower ones.
    added = (rows.reshape(-1, len(index)) @ chosen).reshape(*rows.shape[:-1], num)
    return x + added.movedim(-1, dim)

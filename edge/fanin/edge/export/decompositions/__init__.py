"""Backward operators that no inference runtime has, written as operators that all have.

torch decomposes most of its backward operators itself; these it does not. Each form is exact up to the order of
additions, and held to torch's own kernel in float64 (``tests/unit/test_export_decompositions.py``).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload

from fanin.edge.export.decompositions.convolution import convolution_backward
from fanin.edge.export.decompositions.pooling import (
    adaptive_avg_pool2d_backward,
    avg_pool2d_backward,
    max_pool2d_backward,
)

aten = torch.ops.aten


def backward_decompositions() -> dict[OpOverload, Callable[..., object]]:
    """The decomposition table for a train step: torch's core one and ours."""
    table: dict[OpOverload, Callable[..., object]] = dict(core_aten_decompositions())
    table[aten.convolution_backward.default] = convolution_backward
    table[aten.empty_permuted.default] = empty_permuted
    table[aten.avg_pool2d_backward.default] = avg_pool2d_backward
    table[aten._adaptive_avg_pool2d_backward.default] = adaptive_avg_pool2d_backward
    table[aten.max_pool2d_with_indices_backward.default] = max_pool2d_backward
    return table


def empty_permuted(size: Sequence[int], _physical: Sequence[int], *, dtype: torch.dtype, **_: object) -> Tensor:
    """``aten.empty_permuted``: only its shape is ever read, for ``full_like``."""
    return torch.zeros(size, dtype=dtype)

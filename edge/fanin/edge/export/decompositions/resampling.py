"""Gradients of operators that repeat positions of an image: nearest upsampling and padding with the edge.

Along each dimension ``y[i] = x[source[i]]``. The gradient adds all values with the same source: along each dimension a
product with a matrix of zeros and ones, which every runtime has.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten
Indices = npt.NDArray[np.int64]


def table() -> dict[OpOverload, Callable[..., object]]:
    """Return the form of each of these gradients."""
    exact = partial(upsample_backward, shift=0.5)
    return {
        aten.upsample_nearest1d_backward.default: upsample_backward,
        aten.upsample_nearest2d_backward.default: upsample_backward,
        aten._upsample_nearest_exact1d_backward.default: exact,
        aten._upsample_nearest_exact2d_backward.default: exact,
        aten.replication_pad1d_backward.default: replication_pad_backward,
        aten.replication_pad2d_backward.default: replication_pad_backward,
    }


def upsample_backward(
    dy: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    scales_h: float | None = None,
    scales_w: float | None = None,
    *,
    shift: float = 0.0,
) -> Tensor:
    """Compute ``aten.upsample_nearest1d_backward`` and its 2-D and exact variants.

    A 1-D operator has one scale, ``scales``: it is ``scales_h`` here. The exact variants sample at the middle of a
    position (``shift`` 0.5).
    """
    # Zip ends with the dimensions: a signal has no second scale.
    sizes = zip(dy.shape[2:], input_size[2:], (scales_h, scales_w), strict=False)
    sources = [_nearest(num, have, scale, shift) for num, have, scale in sizes]
    return added(dy, sources, input_size[2:])


def replication_pad_backward(dy: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Compute ``aten.replication_pad1d_backward`` and ``aten.replication_pad2d_backward``."""
    num = len(padding) // 2
    # The padding is (left, right, top, bottom): the last dimension comes first.
    before = padding[::2][::-1]
    sizes = x.shape[-num:]
    sources = [
        edge(np.arange(num) - first, have) for num, first, have in zip(dy.shape[-num:], before, sizes, strict=True)
    ]
    return added(dy, sources, sizes)


def edge(places: Indices, size: int) -> Indices:
    """Return the nearest position inside a dimension of this size."""
    return np.clip(places, 0, size - 1)


def _nearest(num: int, have: int, scale: float | None, shift: float) -> Indices:
    """Return the source of each position.

    Computed in torch's own single precision, which decides on which side of an edge a position falls.
    """
    ratio = np.float32(1.0 / scale) if scale else np.float32(have) / np.float32(num)
    exact = np.floor((np.arange(num, dtype=np.float32) + np.float32(shift)) * ratio)
    sources: Indices = np.minimum(exact.astype(np.int64), have - 1)
    return sources


def added(dy: Tensor, sources: Sequence[Indices], sizes: Sequence[int]) -> Tensor:
    """Sum ``dy`` (..., positions of each dimension) over equal sources; (..., *sizes)."""
    ones = [
        torch.from_numpy((source[:, None] == np.arange(have)).astype(np.float32)).to(dy.dtype)
        for source, have in zip(sources, sizes, strict=True)
    ]
    along_last = dy @ ones[-1]
    return along_last if len(ones) == 1 else ones[0].t() @ along_last

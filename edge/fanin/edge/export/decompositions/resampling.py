"""Gradients of operators that repeat places of an image: nearest upsampling and padding with the edge.

Place by place along each axis ``y[i] = x[source[i]]``, so the gradient adds what has the same source: along each
axis the product with a matrix of zeros and ones, which every runtime has.
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
    """These gradients, by operator."""
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
    dy: Tensor, _: Sequence[int], shape: Sequence[int], *scales: float | None, shift: float = 0.0
) -> Tensor:
    """``aten.upsample_nearest2d_backward`` and its like, whose arguments these are."""
    given = scales or [None] * (len(shape) - 2)
    return added(
        dy,
        [_nearest(num, have, scale, shift) for num, have, scale in zip(dy.shape[2:], shape[2:], given, strict=True)],
        shape[2:],
    )


def replication_pad_backward(dy: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """``aten.replication_pad2d_backward`` and its like, whose arguments these are."""
    num = len(padding) // 2
    # (left, right, top, bottom): the last axis comes first.
    before = padding[::2][::-1]
    sizes = x.shape[-num:]
    sources = [
        edge(np.arange(made) - first, have) for made, first, have in zip(dy.shape[-num:], before, sizes, strict=True)
    ]
    return added(dy, sources, sizes)


def edge(places: Indices, size: int) -> Indices:
    """The nearest place that is in an axis of this size."""
    return np.clip(places, 0, size - 1)


def _nearest(num: int, have: int, scale: float | None, shift: float) -> Indices:
    """The source of each place, in torch's own single precision: it decides on which side of an edge a place falls."""
    ratio = np.float32(1.0 / scale) if scale else np.float32(have) / np.float32(num)
    found = np.floor((np.arange(num, dtype=np.float32) + np.float32(shift)) * ratio)
    sources: Indices = np.minimum(found.astype(np.int64), have - 1)
    return sources


def added(dy: Tensor, sources: Sequence[Indices], sizes: Sequence[int]) -> Tensor:
    """``dy`` (..., places of each axis) with what has the same source added up, (..., *sizes)."""
    ones = [
        torch.from_numpy((source[:, None] == np.arange(have)).astype(np.float32)).to(dy.dtype)
        for source, have in zip(sources, sizes, strict=True)
    ]
    along_last = dy @ ones[-1]
    return along_last if len(ones) == 1 else ones[0].t() @ along_last

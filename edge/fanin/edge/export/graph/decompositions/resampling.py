"""Gradients of operators that repeat or mix positions of an image: upsampling, and padding with the edge.

Along each dimension y is a product of x with a matrix, which has a row for each position of y. For repeated positions,
``y[i] = x[source[i]]``, the matrix has zeros and ones. The gradient is the product with the transposed matrix, which
every runtime has.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._ops import OpOverload

from fanin.edge.tensors import Float64s

aten = torch.ops.aten
Indices = npt.NDArray[np.int64]
A: Final = -0.75
"""The parameter of torch's cubic convolution."""


def table() -> dict[OpOverload, Callable[..., object]]:
    """Return the form of each of these gradients."""
    exact = partial(upsample_backward, shift=0.5)
    return {
        aten.upsample_nearest1d_backward.default: upsample_backward,
        aten.upsample_nearest2d_backward.default: upsample_backward,
        aten._upsample_nearest_exact1d_backward.default: exact,
        aten._upsample_nearest_exact2d_backward.default: exact,
        aten.upsample_linear1d_backward.default: linear_backward,
        aten.upsample_bilinear2d_backward.default: linear_backward,
        aten.upsample_bicubic2d_backward.default: cubic_backward,
        aten.replication_pad1d_backward.default: replication_pad_backward,
        aten.replication_pad2d_backward.default: replication_pad_backward,
    }


def single_channel_table() -> dict[OpOverload, Callable[..., object]]:
    """Return the forms of upsampling where the TFLite converter takes the wrong layout: images of one channel."""
    return {
        aten.upsample_nearest2d.default: upsample,
        aten._upsample_nearest_exact2d.default: partial(upsample, shift=0.5),
    }


def single_channel_forward_table() -> dict[OpOverload, Callable[..., object]]:
    """Return the same for the operators that modules call."""
    return {
        aten.upsample_nearest2d.vec: upsample_by_factors,
        aten._upsample_nearest_exact2d.vec: partial(upsample_by_factors, shift=0.5),
    }


def upsample(
    x: Tensor,
    output_size: Sequence[int],
    scales_h: float | None = None,
    scales_w: float | None = None,
    *,
    shift: float = 0.0,
) -> object:
    """Compute ``aten.upsample_nearest2d`` and its exact variant for one channel; keep the operator for several."""
    if x.shape[1] != 1:
        return NotImplemented
    sizes = zip((2, 3), output_size, (scales_h, scales_w), strict=True)
    for dim, num, scale in sizes:
        have = x.shape[dim]
        # In operators, because a graph that is only decomposed takes no constants.
        places = (torch.arange(num, dtype=torch.float32) + shift) * float(_ratio(num, have, scale))
        x = x.index_select(dim, places.floor().clamp(max=have - 1).to(torch.int64))
    return x


def upsample_by_factors(
    x: Tensor, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None, *, shift: float = 0.0
) -> object:
    """Compute ``aten.upsample_nearest2d.vec`` and its exact variant for one channel, as ``upsample``."""
    if scale_factors is None:
        assert output_size is not None, "torch has one of both"
        return upsample(x, output_size, shift=shift)
    sizes = [int(size * scale) for size, scale in zip(x.shape[2:], scale_factors, strict=True)]
    return upsample(x, sizes, *scale_factors, shift=shift)


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


def linear_backward(
    dy: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Tensor:
    """Compute ``aten.upsample_linear1d_backward`` and ``aten.upsample_bilinear2d_backward``."""
    scales = (scales_h, scales_w)
    return _mixed_backward(dy, input_size, _linear, [None if align_corners else scale or 0.0 for scale in scales])


def cubic_backward(
    dy: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Tensor:
    """Compute ``aten.upsample_bicubic2d_backward``."""
    scales = (scales_h, scales_w)
    return _mixed_backward(dy, input_size, _cubic, [None if align_corners else scale or 0.0 for scale in scales])


def replication_pad_backward(dy: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Compute ``aten.replication_pad1d_backward`` and ``aten.replication_pad2d_backward``."""
    num = len(padding) // 2
    # The padding is (left, right, top, bottom): the last dimension is first.
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
    exact = np.floor((np.arange(num, dtype=np.float32) + np.float32(shift)) * _ratio(num, have, scale))
    sources: Indices = np.minimum(exact.astype(np.int64), have - 1)
    return sources


def _ratio(num: int, have: int, scale: float | None) -> np.float32:
    """Return the distance of two neighbours in positions of x."""
    return np.float32(1.0 / scale) if scale else np.float32(have) / np.float32(num)


def added(dy: Tensor, sources: Sequence[Indices], sizes: Sequence[int]) -> Tensor:
    """Sum ``dy`` (..., positions of each dimension) over equal sources; (..., *sizes)."""
    return _product(dy, [source[:, None] == np.arange(have) for source, have in zip(sources, sizes, strict=True)])


def _product(dy: Tensor, matrices: Sequence[npt.NDArray[np.generic]]) -> Tensor:
    """Multiply ``dy`` by the matrix (positions of y, positions of x) of each of its last dimensions."""
    shares = [torch.from_numpy(matrix.astype(np.float64)).to(dy.dtype) for matrix in matrices]
    along_last = dy @ shares[-1]
    return along_last if len(shares) == 1 else shares[0].t() @ along_last


def _mixed_backward(
    dy: Tensor,
    input_size: Sequence[int],
    shares: Callable[[Float64s, int], Float64s],
    scales: Sequence[float | None],
) -> Tensor:
    """Return the gradient of an operator that mixes positions.

    Args:
        dy: (N, C, positions of each dimension).
        input_size: The shape of x.
        shares: Returns the share of each position of x in each place (places, positions).
        scales: The factor between the sizes of each dimension; 0.0 for their quotient, None if corners are aligned.
    """
    matrices = []
    # A signal has no second scale.
    for num, have, scale in zip(dy.shape[2:], input_size[2:], scales, strict=False):
        steps = np.arange(num, dtype=np.float64)
        if scale is None:
            places = steps * ((have - 1) / (num - 1) if num > 1 else 0.0)
        else:
            places = (steps + 0.5) * (1.0 / scale if scale else have / num) - 0.5
        matrices.append(shares(places, have))
    return _product(dy, matrices)


def _linear(places: Float64s, have: int) -> Float64s:
    """Return the shares of the two nearest positions; the first position alone before it."""
    places = np.maximum(places, 0.0)
    first = np.minimum(np.floor(places), have - 1).astype(np.int64)
    rest = (places - first)[:, None]
    return (1.0 - rest) * _is_at(first, have) + rest * _is_at(first + 1, have)


def _cubic(places: Float64s, have: int) -> Float64s:
    """Return the shares of the four nearest positions, by a cubic convolution. Positions outside count as the edge.

    Reference:
        Keys 1981, IEEE Transactions on Acoustics, Speech and Signal Processing 29(6), equation 4 with a = -0.75.
    """
    first = np.floor(places).astype(np.int64)
    total = np.zeros((len(places), have))
    for position in range(-1, 3):
        away = np.abs(places - (first + position))
        near = ((A + 2.0) * away - (A + 3.0)) * away * away + 1.0
        far = ((A * away - 5.0 * A) * away + 8.0 * A) * away - 4.0 * A
        total += np.where(away <= 1.0, near, far)[:, None] * _is_at(first + position, have)
    return total


def _is_at(places: Indices, have: int) -> npt.NDArray[np.bool_]:
    """Return a matrix (places, positions) that is true at the position of each place, or at the edge before it."""
    result: npt.NDArray[np.bool_] = edge(places, have)[:, None] == np.arange(have)
    return result

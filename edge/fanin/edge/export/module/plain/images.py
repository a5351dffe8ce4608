"""Circular padding, patches, 3-D and adaptive pools, response normalization and sampling at a grid."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Sizes = int | Sequence[int]


def circular_pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> object:
    """Compute ``pad`` in the mode ``circular``, as slices."""
    if mode != "circular" or min(pad) < 0:
        return NotImplemented
    for index in range(len(pad) // 2):
        dim, (before, after) = x.dim() - 1 - index, pad[2 * index : 2 * index + 2]
        size = x.shape[dim]
        if max(before, after) > size:
            return NotImplemented
        x = torch.cat([x.narrow(dim, size - before, before), x, x.narrow(dim, 0, after)], dim)
    return x


def patches(x: Tensor, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1) -> object:
    """Compute ``unfold`` of images (N, C, H, W): a convolution with a kernel for each position of a patch."""
    if x.dim() != 4:
        return NotImplemented
    positions = _positions(_pair(kernel_size), x.shape[1], x.dtype)
    return F.conv2d(x, positions, None, _pair(stride), _pair(padding), _pair(dilation), x.shape[1]).flatten(2)


def summed_patches(
    x: Tensor,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> object:
    """Compute ``fold`` of patches (N, C x positions, L): the transposed convolution of ``patches``."""
    if x.dim() != 3:
        return NotImplemented
    size, kernel, gaps, sides, steps = map(_pair, (output_size, kernel_size, dilation, padding, stride))
    # The span of a dimension, up to the last position at which a patch begins.
    spans = [
        length + 2 * side - gap * (num - 1) - 1
        for length, side, gap, num in zip(size, sides, gaps, kernel, strict=True)
    ]
    nums = [span // step + 1 for span, step in zip(spans, steps, strict=True)]
    rest = [span % step for span, step in zip(spans, steps, strict=True)]
    channels = x.shape[1] // (kernel[0] * kernel[1])
    positions = _positions(kernel, channels, x.dtype)
    return F.conv_transpose2d(x.reshape(*x.shape[:2], *nums), positions, None, steps, sides, rest, channels, gaps)


def avg_pool3d(
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> object:
    """Compute ``avg_pool3d`` as a pool of planes and one along the depth, where all windows have the same size."""
    sizes, steps, sides = _triple(kernel_size), _triple(stride or kernel_size), _triple(padding)
    if x.dim() != 5 or ceil_mode or divisor_override or (any(sides) and not count_include_pad):
        return NotImplemented
    planes = F.avg_pool2d(x.flatten(1, 2), sizes[1:], steps[1:], sides[1:])
    columns = planes.reshape(*x.shape[:3], -1)
    pooled = F.avg_pool2d(columns, (sizes[0], 1), (steps[0], 1), (sides[0], 0))
    return pooled.reshape(*pooled.shape[:3], *planes.shape[2:])


def adaptive_avg_pool1d(x: Tensor, output_size: int | Sequence[int]) -> object:
    """Compute ``adaptive_avg_pool1d`` to one value for each channel."""
    return _mean_of_all(x, output_size, (-1,))


def adaptive_avg_pool2d(x: Tensor, output_size: int | Sequence[int | None]) -> object:
    """Compute ``adaptive_avg_pool2d`` to one value for each channel."""
    return _mean_of_all(x, output_size, (-2, -1))


def adaptive_avg_pool3d(x: Tensor, output_size: int | Sequence[int | None]) -> object:
    """Compute ``adaptive_avg_pool3d`` to one value for each channel."""
    return _mean_of_all(x, output_size, (-3, -2, -1))


def _mean_of_all(x: Tensor, output_size: int | Sequence[int | None], dims: tuple[int, ...]) -> object:
    """Return the mean over the last dimensions.

    torch computes it, and may then change the strides of the result in place: no graph format has strides.
    """
    sizes = (output_size,) if isinstance(output_size, int) else output_size
    if any(size != 1 for size in sizes):
        return NotImplemented
    return x.mean(dims, keepdim=True)


def max_pool3d(
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> object:
    """Compute ``max_pool3d`` without indices, as a pool of planes and one along the depth.

    The first of equal values receives the gradient, in the order of depth, row and column, as in torch.
    """
    sizes, steps = _triple(kernel_size), _triple(stride or kernel_size)
    sides, gaps = _triple(padding), _triple(dilation)
    if x.dim() != 5 or return_indices:
        return NotImplemented
    planes = F.max_pool2d(x.flatten(1, 2), sizes[1:], steps[1:], sides[1:], gaps[1:], ceil_mode)
    columns = planes.reshape(*x.shape[:3], -1)
    pooled = F.max_pool2d(columns, (sizes[0], 1), (steps[0], 1), (sides[0], 0), (gaps[0], 1), ceil_mode)
    return pooled.reshape(*pooled.shape[:3], *planes.shape[2:])


def local_response_norm(x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> object:
    """Compute ``local_response_norm`` over ``size`` channels, as a sum of slices."""
    if x.dim() < 3:
        return NotImplemented
    channels = x.shape[1]
    squares = F.pad(x * x, [0, 0] * (x.dim() - 2) + [size // 2, (size - 1) // 2])
    total = torch.stack([squares.narrow(1, first, channels) for first in range(size)]).sum(0)
    return x / (total * (alpha / size) + k) ** beta


def grid_sample(
    x: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> object:
    """Compute ``grid_sample`` of images, bilinear or nearest, with padding by zeros or by the border.

    (N, C, H, W) and (N, P, Q, 2) to (N, C, P, Q). The shares of the rows and of the columns in each point are matrices.
    So it needs memory for N x C x H x P x Q values.
    """
    if x.dim() != 4 or mode not in ("bilinear", "nearest") or padding_mode not in ("zeros", "border"):
        return NotImplemented
    shares = []
    for values, size in zip(grid.flatten(1, 2).unbind(-1), (x.shape[3], x.shape[2]), strict=True):
        places = (values + 1.0) * (0.5 * (size - 1)) if align_corners else (values + 1.0) * (0.5 * size) - 0.5
        if padding_mode == "border":
            # Not clamp: the gradient is 0 at the border itself, too.
            inside = torch.where(places >= size - 1, float(size - 1), places)
            places = torch.where(places <= 0.0, 0.0, inside)
        shares.append(_shares(places, size, nearest=mode == "nearest"))
    along_rows, along_columns = shares
    columns = (x.flatten(1, 2) @ along_rows.transpose(1, 2)).reshape(*x.shape[:3], -1)
    points = (columns * along_columns.transpose(1, 2).unsqueeze(1)).sum(2)
    return points.reshape(*x.shape[:2], *grid.shape[1:3])


def _shares(places: Tensor, size: int, *, nearest: bool) -> Tensor:
    """Return the share of each position of a dimension in each place: (N, points) to (N, points, size)."""
    positions = torch.arange(size, dtype=places.dtype)
    if nearest:
        return (places.round().unsqueeze(-1) == positions).to(places.dtype)
    first = places.floor()
    rest = (places - first).unsqueeze(-1)
    before = (first.unsqueeze(-1) == positions).to(places.dtype)
    after = ((first + 1.0).unsqueeze(-1) == positions).to(places.dtype)
    return before * (1.0 - rest) + after * rest


def _positions(kernel: Sequence[int], channels: int, dtype: torch.dtype) -> Tensor:
    """Return a kernel for each position of a patch and each channel (channels x positions, 1, height, width)."""
    num = kernel[0] * kernel[1]
    return torch.eye(num, dtype=dtype).reshape(num, 1, *kernel).repeat(channels, 1, 1, 1)


def _pair(size: Sizes) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)


def _triple(size: Sizes) -> list[int]:
    return [size] * 3 if isinstance(size, int) else list(size)

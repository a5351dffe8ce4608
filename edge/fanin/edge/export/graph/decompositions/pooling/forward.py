"""Pools that TFLite has no operator for: dilated max pools, and average pools that do not count the padding.

A dilated maximum is taken over the views of the image from each kernel position. A mean without padding is the mean
over the zero-padded window, times a constant that undoes the share of the padding.

The channels of a single image (C, H, W) become a batch of images. With them as channels of one image, the converter
changes their layout, and then drops the permutation of a factor of a matrix product.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import product

import torch
from torch import Tensor

from fanin.edge.export.graph.decompositions.convolution.form import ConvForm
from fanin.edge.export.graph.decompositions.windows import padded, scaled, window

aten = torch.ops.aten


def max_pool2d(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> object:
    """Compute ``aten.max_pool2d`` of one image, or a dilated one; keep the operator otherwise."""
    if x.dim() == 3:
        single: Tensor = aten.max_pool2d.default(
            x.unsqueeze(1), kernel_size, stride, padding, dilation, ceil_mode
        ).squeeze(1)
        return single
    if all(step == 1 for step in dilation) or ceil_mode:
        return NotImplemented
    form = ConvForm(stride=_two(stride or kernel_size), padding=_two(padding), dilation=_two(dilation), groups=1)
    taps = _two(kernel_size)
    wide, sizes = padded(x, form.padding, float("-inf")), form.sizes(x.shape[2:], taps)
    positions = product(*(range(size) for size in taps))
    return reduce(
        torch.maximum, [window(wide, scaled(position, form.dilation), form.stride, sizes) for position in positions]
    )


def max_pool2d_with_indices(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> object:
    """Compute ``aten.max_pool2d_with_indices`` like ``max_pool2d``. The indices are zeros: nothing reads them."""
    if x.dim() == 3:
        parts = aten.max_pool2d_with_indices.default(x.unsqueeze(1), kernel_size, stride, padding, dilation, ceil_mode)
        return tuple(part.squeeze(1) for part in parts)
    highest = max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    if not isinstance(highest, Tensor):
        return NotImplemented
    return highest, torch.zeros_like(highest, dtype=torch.int64)


def avg_pool1d(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """Compute ``aten.avg_pool1d`` as a pool of images of height 1, one for each channel."""
    images = x.reshape(-1, 1, 1, x.shape[-1])
    sizes = [1, *kernel_size], [1, *(stride or kernel_size)], [0, *padding]
    means: Tensor = aten.avg_pool2d.default(images, *sizes, ceil_mode, count_include_pad)
    return means.reshape(*x.shape[:-1], -1)


def avg_pool2d(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> object:
    """Compute ``aten.avg_pool2d`` of one image, or where the mean leaves padding out; keep the operator otherwise."""
    if x.dim() == 3:
        options = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
        single: Tensor = aten.avg_pool2d.default(x.unsqueeze(1), *options).squeeze(1)
        return single
    if count_include_pad or ceil_mode or divisor_override is not None or not any(padding):
        return NotImplemented
    inside = padded(x.new_ones(1, 1, *x.shape[2:]), _two(padding), 0.0)
    means, shares = (
        aten.avg_pool2d.default(image, kernel_size, stride) for image in (padded(x, _two(padding), 0.0), inside)
    )
    mean: Tensor = means * shares.reciprocal()
    return mean


def _two(values: Sequence[int]) -> list[int]:
    """Return one number for each dimension: torch accepts a single one for both."""
    return list(values) * 2 if len(values) == 1 else list(values)

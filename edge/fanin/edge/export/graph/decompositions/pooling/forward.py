"""Pools that TFLite has no operator for: dilated max pools, and average pools that do not count the padding.

A dilated maximum is taken over the views of the image from each kernel position. A mean without padding is the mean
over the zero-padded window, times a constant that undoes the share of the padding.
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
    """Compute a dilated ``aten.max_pool2d``; keep the operator otherwise."""
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
    highest = max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    if not isinstance(highest, Tensor):
        return NotImplemented
    return highest, torch.zeros_like(highest, dtype=torch.int64)


def avg_pool2d(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> object:
    """Compute ``aten.avg_pool2d`` where the mean leaves padding out; keep the operator otherwise."""
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

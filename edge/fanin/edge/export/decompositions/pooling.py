"""The gradients of pooling, without indices and without a scatter."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

import torch
from torch import Tensor

from fanin.edge.export.decompositions.convolution import ConvForm
from fanin.edge.export.decompositions.windows import padded, scaled, window
from fanin.protos.errors import UnsupportedModel

aten = torch.ops.aten


def avg_pool2d_backward(
    dy: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    *rest: *tuple[Sequence[int], bool, bool, int | None],
) -> Tensor:
    """``aten.avg_pool2d_backward``, whose arguments these are: each place spread evenly over its window."""
    padding, ceil_mode, count_include_pad, divisor = rest
    if ceil_mode:
        raise UnsupportedModel(
            "avg_pool2d: got ceil_mode=True in a trained part, expected False; pad the input instead"
        )
    form = ConvForm(stride=stride or kernel, padding=padding, dilation=[1, 1], groups=x.shape[1])
    ones = x.new_ones(x.shape[1], 1, *kernel)
    if divisor is not None or count_include_pad or not any(padding):
        share = dy / (divisor if divisor is not None else prod(kernel))
    else:
        share = dy / replace(form, groups=1).forward(x.new_ones(1, 1, *x.shape[2:]), x.new_ones(1, 1, *kernel))
    return form.backward(share, ones, x.shape[2:])


def adaptive_avg_pool2d_backward(dy: Tensor, x: Tensor) -> Tensor:
    """``aten._adaptive_avg_pool2d_backward`` where all windows are of one size."""
    if any(have % want for have, want in zip(x.shape[2:], dy.shape[2:], strict=True)):
        raise UnsupportedModel(
            f"adaptive_avg_pool2d: got {tuple(x.shape[2:])} to {tuple(dy.shape[2:])} in a trained part, "
            "expected sizes that divide each other; use AvgPool2d"
        )
    sizes = [have // want for have, want in zip(x.shape[2:], dy.shape[2:], strict=True)]
    return avg_pool2d_backward(dy, x, sizes, sizes, [0, 0], False, True, None)


def max_pool2d_backward(
    dy: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    *rest: *tuple[Sequence[int], Sequence[int], bool, Tensor],
) -> Tensor:
    """``aten.max_pool2d_with_indices_backward``, whose arguments these are: dy goes to each window's first maximum.

    Indices and a scatter would do too, but not every runtime has them, and they differ in what they count.
    """
    padding, dilation, ceil_mode, _ = rest
    if ceil_mode:
        raise UnsupportedModel(
            "max_pool2d: got ceil_mode=True in a trained part, expected False; pad the input instead"
        )
    places = list(product(*(range(size) for size in kernel)))
    form = ConvForm(stride=stride or kernel, padding=padding, dilation=dilation, groups=1)
    highest = aten.max_pool2d_with_indices.default(x, kernel, form.stride, padding, dilation)[0]
    wide = padded(x, padding, float("-inf"))
    left, shares = dy, []
    for place in places:
        here = window(wide, scaled(place, dilation), form.stride, dy.shape[2:]) == highest
        shares.append(torch.where(here, left, 0.0))
        left = torch.where(here, 0.0, left)
    # An image for each channel, a channel for each place in the window, and each put back to its place.
    spread = torch.stack(shares, dim=2).reshape(-1, len(places), *dy.shape[2:])
    back = torch.eye(len(places), dtype=dy.dtype).reshape(-1, 1, *kernel)
    return form.backward(spread, back, x.shape[2:]).reshape(x.shape)

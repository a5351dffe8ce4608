"""The gradient of max pooling, without indices and without a scatter."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from fanin.edge.export.decompositions.forms import ConvForm
from fanin.edge.export.decompositions.portable import resized
from fanin.edge.export.decompositions.windows import scaled, window

aten = torch.ops.aten


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
    places = list(product(*(range(size) for size in kernel)))
    form = ConvForm(stride=stride or kernel, padding=padding, dilation=dilation, groups=1)
    highest = aten.max_pool2d_with_indices.default(x, kernel, form.stride, padding, dilation, ceil_mode)[0]
    # What the windows reach: with ceil_mode it is more than the image and its padding, with a stride often less.
    reach = [
        (num - 1) * step + gap * (taps - 1) + 1
        for num, step, gap, taps in zip(dy.shape[2:], form.stride, dilation, kernel, strict=True)
    ]
    wide = x
    for index, (pad, size) in enumerate(zip(padding, reach, strict=True)):
        wide = resized(wide, 2 + index, pad, size - x.shape[2 + index] - pad, float("-inf"))
    left, shares = dy, []
    for place in places:
        here = window(wide, scaled(place, dilation), form.stride, dy.shape[2:]) == highest
        share = left * here.to(dy.dtype)
        shares.append(share)
        left = left - share
    # An image for each channel, a channel for each place in the window, and each put back to its place.
    spread = torch.stack(shares, dim=2).reshape(-1, len(places), *dy.shape[2:])
    back = torch.eye(len(places), dtype=dy.dtype).reshape(-1, 1, *kernel)
    dx = replace(form, padding=[0, 0]).backward(spread, back, reach)
    for index, (pad, size) in enumerate(zip(padding, reach, strict=True)):
        dx = resized(dx, 2 + index, -pad, x.shape[2 + index] + pad - size)
    return dx.reshape(x.shape)

"""The gradient of max pooling, without indices and without a scatter.

The positions of the window are visited in order. The first one that holds the maximum receives dy, as in torch. Indices
and a scatter would be an alternative, but not every runtime has them, and runtimes number the indices differently.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce, wraps
from itertools import product

import torch
from torch import Tensor

from fanin.edge.export.graph.decompositions.convolution.form import ConvForm
from fanin.edge.export.graph.decompositions.convolution.portable import towards_input
from fanin.edge.export.graph.decompositions.windows import resized, scaled, window

aten = torch.ops.aten
Gradient = Callable[..., Tensor]
"""(dy, x, kernel_size, ...) -> dx."""


def of_one_image(gradient: Gradient) -> Gradient:
    """Let the gradient of a pool of images (N, C, H, W) also accept one image (C, H, W)."""

    @wraps(gradient)
    def either(dy: Tensor, x: Tensor, *options: object) -> Tensor:
        if x.dim() == 4:
            return gradient(dy, x, *options)
        return gradient(dy.unsqueeze(0), x.unsqueeze(0), *options).squeeze(0)

    return either


@of_one_image
def max_pool2d_backward(
    dy: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Compute ``aten.max_pool2d_with_indices_backward`` for ONNX runtimes, which pool again to get the maximum."""
    form = ConvForm(stride=stride or kernel_size, padding=padding, dilation=dilation, groups=1)
    highest = aten.max_pool2d_with_indices.default(x, kernel_size, form.stride, padding, dilation, ceil_mode)[0]
    spread = _shares(dy, _views(form, x, dy.shape[2:], kernel_size), highest)
    kernels = torch.eye(math.prod(kernel_size), dtype=dy.dtype).reshape(-1, 1, *kernel_size)
    reach = _reach(form, dy.shape[2:], kernel_size)
    dx = replace(form, padding=[0, 0]).backward(spread, kernels, reach)
    for index, (pad, size) in enumerate(zip(padding, reach, strict=True)):
        dx = resized(dx, 2 + index, -pad, x.shape[2 + index] + pad - size)
    return dx.reshape(x.shape)


@of_one_image
def portable_max_pool2d_backward(
    dy: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Compute ``aten.max_pool2d_with_indices_backward`` for TFLite, without a transposed convolution."""
    form = ConvForm(stride=stride or kernel_size, padding=padding, dilation=dilation, groups=1)
    views = list(_views(form, x, dy.shape[2:], kernel_size))
    spread = _shares(dy, views, reduce(torch.maximum, views))
    # A constant of the graph: torch.eye would be traced as operators.
    eye = torch.tensor([[float(a == b) for b in range(len(views))] for a in range(len(views))])
    kernels = eye.to(dy.dtype).reshape(-1, 1, *kernel_size)
    return towards_input(form, spread, kernels, [len(spread), 1, *x.shape[2:]]).reshape(x.shape)


def _views(form: ConvForm, x: Tensor, num: Sequence[int], kernel_size: Sequence[int]) -> Iterator[Tensor]:
    """Yield the values of x (N, C, *num) that each kernel position reads: minus infinity outside of the image."""
    wide = x
    for index, (pad, size) in enumerate(zip(form.padding, _reach(form, num, kernel_size), strict=True)):
        wide = resized(wide, 2 + index, pad, size - x.shape[2 + index] - pad, float("-inf"))
    for position in product(*(range(size) for size in kernel_size)):
        yield window(wide, scaled(position, form.dilation), form.stride, num)


def _reach(form: ConvForm, num: Sequence[int], kernel_size: Sequence[int]) -> list[int]:
    """Return the extent of the image that ``num`` windows cover, for each spatial dimension.

    With ``ceil_mode`` it exceeds the padded image. With a stride it is often less.
    """
    return [
        (count - 1) * step + gap * (taps - 1) + 1
        for count, step, gap, taps in zip(num, form.stride, form.dilation, kernel_size, strict=True)
    ]


def _shares(dy: Tensor, views: Iterable[Tensor], highest: Tensor) -> Tensor:
    """Return the share of dy that each kernel position receives (N * C, positions, ...).

    Each channel becomes an image with one channel for each position, which one convolution puts back to its place.
    """
    remaining, shares = dy, []
    for view in views:
        share = remaining * (view == highest).to(dy.dtype)
        shares.append(share)
        remaining = remaining - share
    return torch.stack(shares, dim=2).reshape(-1, len(shares), *dy.shape[2:])

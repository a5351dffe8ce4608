"""Convolutions for the oldest TFLite runtimes: without transposed convolution and without scatter.

TFLite's transposed convolution supports no groups and only two paddings. Its grouped convolution is slow. Converters
write a scatter where torch has one. These forms replace all three::

    gradient of the input    dy with zeros between its rows and columns, convolved with the rotated kernel
    gradient of the weight   x as each kernel position sees it, in one matrix product with dy; for a depthwise
                             convolution the convolution of x by dy, which is depthwise again

Tensors have at most five dimensions, the limit of TFLite's padding kernel.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Final

import torch
from torch import Tensor

from fanin.edge.export.graph.decompositions.convolution.form import ConvForm, ConvolutionBackward
from fanin.edge.export.graph.decompositions.windows import padded, resized, scaled, stuffed, window

FEW_CHANNELS: Final = 4
"""Windows with fewer channels are slow to copy: one memory move for each pixel."""


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> object:
    """Compute a transposed ``aten.convolution``; keep the operator otherwise."""
    if not transposed:
        return NotImplemented
    form = ConvForm(stride=stride, padding=padding, dilation=dilation, groups=groups)
    size = [
        (have - 1) * step - 2 * pad + dil * (taps - 1) + more + 1
        for have, step, pad, dil, taps, more in zip(
            x.shape[2:], stride, padding, dilation, weight.shape[2:], output_padding, strict=True
        )
    ]
    y = towards_input(form, x, weight, [len(x), weight.shape[1] * groups, *size])
    return y if bias is None else y + bias.reshape(1, -1, *(1 for _ in size))


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] | int = 1,
    padding: Sequence[int] | int = 0,
    output_padding: Sequence[int] | int = 0,
    groups: int = 1,
    dilation: Sequence[int] | int = 1,
) -> object:
    """Compute ``aten.conv_transpose1d`` and ``aten.conv_transpose2d``, the forms that modules call."""
    num_dims = weight.dim() - 2
    steps, margins, extra, gaps = (_each(value, num_dims) for value in (stride, padding, output_padding, dilation))
    return convolution(x, weight, bias, steps, margins, gaps, True, extra, groups)


def _each(value: Sequence[int] | int, num_dims: int) -> list[int]:
    """Return one number for each spatial dimension: torch accepts a single one for all."""
    values = [value] if isinstance(value, int) else list(value)
    return values * num_dims if len(values) == 1 else values


def towards_input(form: ConvForm, dy: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
    """Compute the gradient of the input of a plain convolution; ``shape`` is the shape of that input."""
    wide, size = dy, shape[2:]
    for index, want in enumerate(size):
        dim, taps = 2 + index, form.dilation[index] * (weight.shape[2 + index] - 1)
        before = taps - form.padding[index]
        wide = stuffed(wide, dim, form.stride[index])
        wide = resized(wide, dim, before, want + taps - before - wide.shape[dim])
    ones = [1] * len(size)
    inner = ConvForm(stride=ones, padding=[0] * len(size), dilation=form.dilation, groups=form.groups)
    return inner.forward(wide, turned(weight, form.groups))


def turned(weight: Tensor, groups: int) -> Tensor:
    """Rotate each kernel by 180 degrees: (O, C/g, ...) -> (C, O/g, ...).

    On flat kernels that is one reversal. The final reshape keeps the converter from treating the result as an image.
    """
    outs, ins = weight.shape[:2]
    flat = weight.reshape(groups, outs // groups, ins, -1).transpose(1, 2)
    flat = flat.reshape(groups * ins, outs // groups, -1)
    return (flat.flip(2) if flat.shape[2] > 1 else flat).reshape(groups * ins, -1, *weight.shape[2:])


def towards_weight(form: ConvForm, x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """Compute the gradient of the weight (O, C/g, ...) of a plain convolution of ``x``."""
    outs, ins, groups = weight.shape[0], weight.shape[1], form.groups
    if groups == x.shape[1] == outs or (groups == 1 and ins < FEW_CHANNELS):
        return _exchanged(form, x, dy, weight)
    wide = padded(x, form.padding, 0.0)
    positions = list(product(*(range(taps) for taps in weight.shape[2:])))
    seen = [window(wide, scaled(position, form.dilation), form.stride, dy.shape[2:]) for position in positions]
    if groups == 1:
        # (O, N * size) times (N * size, positions * C): all kernel positions in one product.
        gradient = _rows(dy).t() @ _rows(torch.cat(seen, dim=1) if len(seen) > 1 else seen[0])
        return gradient.reshape(outs, len(positions), ins).transpose(1, 2).reshape(weight.shape)
    rows = [_rows(view).reshape(-1, groups, ins) for view in seen]
    columns = torch.stack(rows, dim=2).transpose(0, 1).reshape(groups, -1, len(positions) * ins)
    gradient = _rows(dy).reshape(-1, groups, outs // groups).permute(1, 2, 0) @ columns
    return gradient.reshape(outs, len(positions), ins).transpose(1, 2).reshape(weight.shape)


def _exchanged(form: ConvForm, x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """Compute the gradient of the weight as the convolution of x by dy, with stride and dilation exchanged.

    For a depthwise convolution each channel of each sample becomes a separate channel, so the result is depthwise
    again.
    """
    exchanged = replace(form, stride=form.dilation, dilation=form.stride)
    zeros = [0] * len(form.stride)
    if form.groups > 1:
        exchanged = replace(exchanged, groups=x.shape[0] * x.shape[1])
        gradient = exchanged.forward(x.reshape(1, -1, *x.shape[2:]), dy.reshape(-1, 1, *dy.shape[2:]))
        gradient = gradient.reshape(*x.shape[:2], *gradient.shape[2:]).sum(0).unsqueeze(1)
    else:
        gradient = exchanged.forward(x.transpose(0, 1), dy.transpose(0, 1)).transpose(0, 1)
    # If the stride does not divide the input, the last positions belong to no weight.
    return window(gradient, zeros, [1 for _ in zeros], weight.shape[2:])


def _rows(x: Tensor) -> Tensor:
    """Lay an image out as TFLite does: (N, C, ...) -> (N * positions, C)."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def _summed(x: Tensor) -> Tensor:
    """Sum over all but the channels, (N, C, ...) -> (C,), as a matrix product: TFLite's own sums are slow."""
    rows = _rows(x)
    return (x.new_ones(1, rows.shape[0]) @ rows).reshape(-1)


convolution_backward: Final = ConvolutionBackward(
    towards_input=towards_input, towards_weight=towards_weight, towards_bias=_summed
)

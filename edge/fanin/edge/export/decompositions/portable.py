"""Gradients as the oldest of the runtimes can run them: without transposed convolution, without scatter.

TFLite's transposed convolution takes no groups and two paddings only, its grouped convolution is slow, and
converters put a scatter where torch has one. What is left is enough::

    convolution towards its input    dy with zeros between its rows and columns, convolved with the turned kernel
    convolution towards its weight   x seen from each place in the kernel, in one matrix product with dy; for a
                                     depthwise one the convolution of x by dy, which is depthwise again
    average pools                    one constant matrix for rows and one for columns: a pool is separable
    max pools                        each place of the window in turn, and the first that holds the maximum gets dy

Tensors have at most five dimensions, as the padding kernel there takes no more.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import product
from math import prod
from typing import Final

import torch
from torch import Tensor

from fanin.edge.export.decompositions.forms import ConvForm, ConvolutionBackward
from fanin.edge.export.decompositions.windows import padded, scaled, window

FEW_CHANNELS: Final = 4
"""Windows of fewer channels are slow to copy: a memory move for each pixel."""


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *rest: *tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int],
) -> object:
    """``aten.convolution``, whose arguments these are, if it is a transposed one; a plain one stays as it is."""
    stride, padding, dilation, transposed, extra, groups = rest
    if not transposed:
        return NotImplemented
    form = ConvForm(stride=stride, padding=padding, dilation=dilation, groups=groups)
    size = [
        (have - 1) * step - 2 * pad + dil * (taps - 1) + more + 1
        for have, step, pad, dil, taps, more in zip(
            x.shape[2:], stride, padding, dilation, weight.shape[2:], extra, strict=True
        )
    ]
    y = towards_input(form, x, weight, [len(x), weight.shape[1] * groups, *size])
    return y if bias is None else y + bias.reshape(1, -1, *(1 for _ in size))


def towards_input(form: ConvForm, dy: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
    """The gradient of a plain convolution towards its input, of this ``shape``."""
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
    """(O, C/g, ...) -> (C, O/g, ...), each kernel turned by half a turn.

    Laid out flat, that is one reversal; and as this ends in a reshape, nobody takes the weight for an image.
    """
    outs, ins = weight.shape[:2]
    flat = weight.reshape(groups, outs // groups, ins, -1).transpose(1, 2)
    flat = flat.reshape(groups * ins, outs // groups, -1)
    return (flat.flip(2) if flat.shape[2] > 1 else flat).reshape(groups * ins, -1, *weight.shape[2:])


def stuffed(x: Tensor, dim: int, step: int) -> Tensor:
    """``step - 1`` zeros between the values along a dimension."""
    if step == 1 or x.shape[dim] == 1:
        return x
    num = x.shape[dim]
    before, after = prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
    spread = torch.nn.functional.pad(x.reshape(before, num, 1, after), [0, 0, 0, step - 1])
    whole = spread.reshape(*x.shape[:dim], num * step, *x.shape[dim + 1 :])
    return whole.narrow(dim, 0, (num - 1) * step + 1)


def resized(x: Tensor, dim: int, before: int, after: int, value: float = 0.0) -> Tensor:
    """Values added before and after a dimension, or taken away where the number is negative."""
    start, end = max(0, -before), x.shape[dim] - max(0, -after)
    if end - start < x.shape[dim]:
        x = x.narrow(dim, start, end - start)
    sides = [0, 0] * (x.dim() - 1 - dim) + [max(0, before), max(0, after)]
    return torch.nn.functional.pad(x, sides, value=value) if any(sides) else x


def towards_weight(form: ConvForm, x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a plain convolution of ``x`` towards its weight (O, C/g, ...)."""
    outs, ins, groups = weight.shape[0], weight.shape[1], form.groups
    if groups == x.shape[1] == outs or (groups == 1 and ins < FEW_CHANNELS):
        return _exchanged(form, x, dy, weight)
    wide = padded(x, form.padding, 0.0)
    places = list(product(*(range(taps) for taps in weight.shape[2:])))
    seen = [window(wide, scaled(place, form.dilation), form.stride, dy.shape[2:]) for place in places]
    if groups == 1:
        # (O, N * size) times (N * size, places * C): all places in one product.
        found = _rows(dy).t() @ _rows(torch.cat(seen, dim=1) if len(seen) > 1 else seen[0])
        return found.reshape(outs, len(places), ins).transpose(1, 2).reshape(weight.shape)
    rows = [_rows(view).reshape(-1, groups, ins) for view in seen]
    columns = torch.stack(rows, dim=2).transpose(0, 1).reshape(groups, -1, len(places) * ins)
    found = _rows(dy).reshape(-1, groups, outs // groups).permute(1, 2, 0) @ columns
    return found.reshape(outs, len(places), ins).transpose(1, 2).reshape(weight.shape)


def _exchanged(form: ConvForm, x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """The convolution of x by dy, with stride and dilation exchanged.

    In a depthwise one each channel of each sample stands for itself, so that it is depthwise again.
    """
    exchanged = replace(form, stride=form.dilation, dilation=form.stride)
    zeros = [0] * len(form.stride)
    if form.groups > 1:
        exchanged = replace(exchanged, groups=x.shape[0] * x.shape[1])
        found = exchanged.forward(x.reshape(1, -1, *x.shape[2:]), dy.reshape(-1, 1, *dy.shape[2:]))
        found = found.reshape(*x.shape[:2], *found.shape[2:]).sum(0).unsqueeze(1)
    else:
        found = exchanged.forward(x.transpose(0, 1), dy.transpose(0, 1)).transpose(0, 1)
    # Where the stride did not divide the input, the last places belong to no weight.
    return window(found, zeros, [1 for _ in zeros], weight.shape[2:])


def _rows(x: Tensor) -> Tensor:
    """(N, C, ...) -> (N * places, C), as TFLite itself lays images out."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def _summed(x: Tensor) -> Tensor:
    """(N, C, ...) -> (C,), as a matrix product: TFLite's sums over several dimensions are slow."""
    rows = _rows(x)
    return (x.new_ones(1, rows.shape[0]) @ rows).reshape(-1)


convolution_backward: Final = ConvolutionBackward(
    towards_input=towards_input, towards_weight=towards_weight, towards_bias=_summed
)


def threshold_backward(dy: Tensor, x: Tensor, threshold: float) -> Tensor:
    """``aten.threshold_backward``, ReLU's, as a product: selecting is slow."""
    return dy * (x > threshold).to(dy.dtype)


def avg_pool2d_backward(
    dy: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    *rest: *tuple[Sequence[int], bool, bool, int | None],
) -> Tensor:
    """``aten.avg_pool2d_backward``, whose arguments these are: each place spread evenly over its window."""
    padding, _, counts_padding, divisor = rest
    matrices = []
    for have, num, taps, step, pad in zip(x.shape[2:], dy.shape[2:], kernel, stride or kernel, padding, strict=True):
        starts = [index * step - pad for index in range(num)]
        # A last window that ceil_mode adds may lie beyond the padding, too; what lies there is not counted.
        ends = [min(start + taps, have + pad) for start in starts]
        matrices.append(_shares(have, starts, ends, counts_padding, divisor is not None))
    dx = _spread(dy, *matrices)
    return dx if divisor is None else dx / divisor


def adaptive_avg_pool2d_backward(dy: Tensor, x: Tensor) -> Tensor:
    """``aten._adaptive_avg_pool2d_backward``, whose arguments these are."""
    rows, columns = (
        _shares(have, *_windows(have, num), False, False) for have, num in zip(x.shape[-2:], dy.shape[-2:], strict=True)
    )
    return _spread(dy, rows, columns)


def _shares(have: int, starts: Sequence[int], ends: Sequence[int], counts_padding: bool, sums: bool) -> Tensor:
    """What each window takes of each place (windows, have), in float64."""
    rows = []
    for start, end in zip(starts, ends, strict=True):
        inside = range(max(0, start), min(have, end))
        num = 1 if sums else end - start if counts_padding else len(inside)
        rows.append([1.0 / num if index in inside else 0.0 for index in range(have)])
    return torch.tensor(rows, dtype=torch.float64)


def _spread(dy: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    rows, columns = rows.to(dy.dtype), columns.to(dy.dtype)
    return rows.t() @ (dy @ columns)


def adaptive_avg_pool2d(x: Tensor, size: Sequence[int]) -> Tensor:
    """``aten._adaptive_avg_pool2d``, whose arguments these are; torch's own form gathers the windows' places."""
    rows, columns = (
        _shares(have, *_windows(have, num), False, False).to(x.dtype)
        for have, num in zip(x.shape[-2:], size, strict=True)
    )
    return rows @ (x @ columns.t())


def _windows(have: int, num: int) -> tuple[list[int], list[int]]:
    """Where the windows of an adaptive pool start and end."""
    return [index * have // num for index in range(num)], [-(-(index + 1) * have // num) for index in range(num)]


def max_pool2d_backward(
    dy: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    *rest: *tuple[Sequence[int], Sequence[int], bool, Tensor],
) -> Tensor:
    """``aten.max_pool2d_with_indices_backward``, whose arguments these are: dy goes to each window's first maximum."""
    padding, dilation, *_ = rest
    places = list(product(*(range(size) for size in kernel)))
    form = ConvForm(stride=stride or kernel, padding=padding, dilation=dilation, groups=1)
    wide = x
    for index, (have, num) in enumerate(zip(x.shape[2:], dy.shape[2:], strict=True)):
        reach = (num - 1) * form.stride[index] + dilation[index] * (kernel[index] - 1) + 1
        wide = resized(wide, 2 + index, padding[index], reach - have - padding[index], float("-inf"))
    seen = [window(wide, scaled(place, dilation), form.stride, dy.shape[2:]) for place in places]
    highest = reduce(torch.maximum, seen)
    left, shares = dy, []
    for view in seen:
        share = left * (view == highest).to(dy.dtype)
        shares.append(share)
        left = left - share
    # An image for each channel, a channel for each place in the window, and each put back to its place.
    spread = torch.stack(shares, dim=2).reshape(-1, len(places), *dy.shape[2:])
    eye = torch.tensor([[float(a == b) for b in range(len(places))] for a in range(len(places))])
    back = eye.to(dy.dtype).reshape(-1, 1, *kernel)
    return towards_input(form, spread, back, [len(spread), 1, *x.shape[2:]]).reshape(x.shape)

"""Backward operators that no inference runtime has, written as operators that all have.

torch decomposes most of its backward operators itself; these it does not. Each form is exact up to the order of
additions, and held to torch's own kernel in float64 (``tests/unit/test_export_decompositions.py``).

The gradients of a convolution are convolutions again (Dumoulin and Visin 2016, arXiv 1603.07285, section 4)::

    towards its input    the transposed convolution of dy with the same weight
    towards its weight   a convolution of x by dy, with stride and dilation exchanged, and samples as channels

The second is slow where dy is large and there is little to compute, as its kernel is all of dy; so for 1x1
kernels it is one matrix product, and for depthwise ones a sum of products for each place in the kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload

from fanin.protos.errors import UnsupportedModel

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvForm:
    """The constants of a convolution, one number for each spatial dimension."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """The plain convolution."""
        zeros = [0] * len(self.stride)
        found: Tensor = aten.convolution.default(
            x, weight, None, self.stride, self.padding, self.dilation, False, zeros, self.groups
        )
        return found

    def backward(self, dy: Tensor, weight: Tensor, size: Sequence[int]) -> Tensor:
        """The transposed convolution to this spatial ``size``: the gradient towards the input."""
        extra = [
            want - ((have - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1)
            for want, have, stride, padding, dilation, kernel in zip(
                size, dy.shape[2:], self.stride, self.padding, self.dilation, weight.shape[2:], strict=True
            )
        ]
        found: Tensor = aten.convolution.default(
            dy, weight, None, self.stride, self.padding, self.dilation, True, extra, self.groups
        )
        return found


def backward_decompositions() -> dict[OpOverload, Callable[..., object]]:
    """The decomposition table for a train step: torch's core one and ours."""
    table: dict[OpOverload, Callable[..., object]] = dict(core_aten_decompositions())
    table[aten.convolution_backward.default] = convolution_backward
    table[aten.empty_permuted.default] = empty_permuted
    table[aten.avg_pool2d_backward.default] = avg_pool2d_backward
    table[aten._adaptive_avg_pool2d_backward.default] = adaptive_avg_pool2d_backward
    table[aten.max_pool2d_with_indices_backward.default] = max_pool2d_backward
    return table


def empty_permuted(size: Sequence[int], _physical: Sequence[int], *, dtype: torch.dtype, **_: object) -> Tensor:
    """``aten.empty_permuted``: only its shape is ever read, for ``full_like``."""
    return torch.zeros(size, dtype=dtype)


def convolution_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    *rest: *tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int, Sequence[bool]],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``aten.convolution_backward``, whose arguments these are: gradients towards x, weight and bias."""
    stride, padding, dilation, transposed, _, groups, (wants_x, wants_weight, wants_bias) = rest
    form = ConvForm(stride=stride, padding=padding, dilation=dilation, groups=groups)
    dx = dweight = dbias = None
    if wants_x:
        dx = form.forward(dy, weight) if transposed else form.backward(dy, weight, x.shape[2:])
    if wants_weight:
        # A transposed convolution is the backward pass of a plain one, with x in the place of dy.
        dweight = weight_gradient(form, dy, x, weight) if transposed else weight_gradient(form, x, dy, weight)
    if wants_bias:
        dbias = dy.sum([0, *range(2, dy.dim())])
    return dx, dweight, dbias


def weight_gradient(form: ConvForm, x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a plain convolution of ``x`` towards its weight (O, C/groups, ...)."""
    if prod(weight.shape[2:]) == 1 and form.groups == 1 and not any(form.padding):
        return _pointwise(form, x, dy, weight)
    if form.groups == x.shape[1] == dy.shape[1]:
        return _depthwise(form, x, dy, weight)
    return _exchanged(form, x, dy, weight)


def _pointwise(form: ConvForm, x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    seen = _window(x, [0] * len(form.stride), form.stride, dy.shape[2:])
    out_rows = dy.transpose(0, 1).reshape(dy.shape[1], -1)  # (O, N * places)
    in_rows = seen.transpose(0, 1).reshape(x.shape[1], -1)  # (C, N * places)
    return (out_rows @ in_rows.t()).reshape(weight.shape)


def _depthwise(form: ConvForm, x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    padded = _padded(x, form.padding, 0.0)
    others = [0, *range(2, x.dim())]
    sums = [
        (_window(padded, _scaled(place, form.dilation), form.stride, dy.shape[2:]) * dy).sum(others)
        for place in product(*(range(size) for size in weight.shape[2:]))
    ]
    return torch.stack(sums, dim=1).reshape(weight.shape)


def _exchanged(form: ConvForm, x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    num, channels, groups = x.shape[0], x.shape[1], form.groups
    size = x.shape[2:]
    spatial = range(3, 3 + len(size))
    # (N, g * C/g, ...) -> (C/g, g * N, ...): samples become the channels that are summed over.
    swapped = x.reshape(num, groups, channels // groups, *size).permute(2, 1, 0, *spatial)
    exchanged = replace(form, stride=form.dilation, dilation=form.stride)
    found = exchanged.forward(swapped.reshape(channels // groups, groups * num, *size), dy.transpose(0, 1))
    # Where the stride did not divide the input, the last places belong to no weight.
    kept = _window(found, [0] * len(size), [1] * len(size), weight.shape[2:])
    return kept.transpose(0, 1)


def _window(x: Tensor, start: Sequence[int], step: Sequence[int], num: Sequence[int]) -> Tensor:
    """``num`` places of each spatial dimension, from ``start`` on, every ``step``-th."""
    for index, (first, stride, count) in enumerate(zip(start, step, num, strict=True)):
        if (first, stride, count) != (0, 1, x.shape[2 + index]):
            x = aten.slice.Tensor(x, 2 + index, first, first + stride * (count - 1) + 1, stride)
    return x


def _padded(x: Tensor, padding: Sequence[int], value: float) -> Tensor:
    sides = [side for size in reversed(padding) for side in (size, size)]
    return torch.nn.functional.pad(x, sides, value=value) if any(sides) else x


def _scaled(place: Sequence[int], dilation: Sequence[int]) -> list[int]:
    return [index * size for index, size in zip(place, dilation, strict=True)]


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
    window = x.new_ones(x.shape[1], 1, *kernel)
    if divisor is not None or count_include_pad or not any(padding):
        share = dy / (divisor if divisor is not None else prod(kernel))
    else:
        share = dy / replace(form, groups=1).forward(x.new_ones(1, 1, *x.shape[2:]), x.new_ones(1, 1, *kernel))
    return form.backward(share, window, x.shape[2:])


def adaptive_avg_pool2d_backward(dy: Tensor, x: Tensor) -> Tensor:
    """``aten._adaptive_avg_pool2d_backward`` where all windows are of one size."""
    if any(have % want for have, want in zip(x.shape[2:], dy.shape[2:], strict=True)):
        raise UnsupportedModel(
            f"adaptive_avg_pool2d: got {tuple(x.shape[2:])} to {tuple(dy.shape[2:])} in a trained part, "
            "expected sizes that divide each other; use AvgPool2d"
        )
    window = [have // want for have, want in zip(x.shape[2:], dy.shape[2:], strict=True)]
    return avg_pool2d_backward(dy, x, window, window, [0, 0], False, True, None)


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
    padded = _padded(x, padding, float("-inf"))
    left, shares = dy, []
    for place in places:
        here = _window(padded, _scaled(place, dilation), form.stride, dy.shape[2:]) == highest
        shares.append(torch.where(here, left, 0.0))
        left = torch.where(here, 0.0, left)
    # An image for each channel, a channel for each place in the window, and each put back to its place.
    spread = torch.stack(shares, dim=2).reshape(-1, len(places), *dy.shape[2:])
    back = torch.eye(len(places), dtype=dy.dtype).reshape(-1, 1, *kernel)
    return form.backward(spread, back, x.shape[2:]).reshape(x.shape)

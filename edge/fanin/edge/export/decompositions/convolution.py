"""The gradients of a convolution, as ONNX runtimes compute them best.

The gradients of a convolution are convolutions again (Dumoulin and Visin 2016, arXiv 1603.07285, section 4)::

    towards its input    the transposed convolution of dy with the same weight
    towards its weight   a convolution of x by dy, with stride and dilation exchanged, and samples as channels

The second is slow where dy is large and there is little to compute, as its kernel is all of dy; so for 1x1
kernels it is one matrix product, and for depthwise ones a sum of products for each place in the kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from torch import Tensor

from fanin.edge.export.decompositions.windows import padded, scaled, window

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
    seen = window(x, [0] * len(form.stride), form.stride, dy.shape[2:])
    out_rows = dy.transpose(0, 1).reshape(dy.shape[1], -1)  # (O, N * places)
    in_rows = seen.transpose(0, 1).reshape(x.shape[1], -1)  # (C, N * places)
    return (out_rows @ in_rows.t()).reshape(weight.shape)


def _depthwise(form: ConvForm, x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    wide = padded(x, form.padding, 0.0)
    others = [0, *range(2, x.dim())]
    sums = [
        (window(wide, scaled(place, form.dilation), form.stride, dy.shape[2:]) * dy).sum(others)
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
    kept = window(found, [0] * len(size), [1] * len(size), weight.shape[2:])
    return kept.transpose(0, 1)

"""The gradients of a convolution, as ONNX runtimes compute them best.

The gradients of a convolution are convolutions again (Dumoulin and Visin 2016, arXiv 1603.07285, section 4)::

    towards its input    the transposed convolution of dy with the same weight
    towards its weight   a convolution of x by dy, with stride and dilation exchanged, and samples as channels

The second is slow where dy is large and there is little to compute, as its kernel is all of dy. So the form is
chosen by kind and shape; milliseconds of onnxruntime, forward / towards x / towards weight, batch 16:

    1x1                 towards x a convolution with the weight transposed (.24 to .17), else a matrix product
    depthwise, narrow   ``bands``, both ways: 64 x 25 x 5 takes .88 / .63 / 1.63 as convolutions, .32 / .32 / .40 so
    depthwise, wide     convolutions, and a sum of products for each tap of the kernel towards the weight
    any other           convolutions
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Final

import torch
from torch import Tensor

from fanin.edge.export.decompositions.bands import Axis, Bands
from fanin.edge.export.decompositions.windows import padded, scaled, window

aten = torch.ops.aten
MAX_BANDED_WIDTH: Final = 12
"""The widest image whose depthwise convolution is taken as ``bands``: zeros in its matrix grow with the width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvForm:
    """The constants of a convolution, one number for each spatial dimension."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def is_pointwise(self, weight: Sequence[int]) -> bool:
        """Whether a weight of this shape mixes the channels of one place, and nothing else."""
        return prod(weight[2:]) == 1 and self.groups == 1 and not any(self.padding)

    def sizes(self, size: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """The spatial shape that images of ``size`` become."""
        return [
            (have + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
            for have, taps, stride, padding, dilation in zip(
                size, kernel, self.stride, self.padding, self.dilation, strict=True
            )
        ]

    def bands(self, shape: Sequence[int], weight: Sequence[int]) -> Bands | None:
        """The banded form for an input and a weight of these shapes, where it is the better one."""
        depthwise = self.groups == shape[1] == weight[0] and self.groups > 1 and prod(weight[2:]) > 1
        # A signal of one dimension is an image of one column.
        if not depthwise or len(shape) > 4 or (len(shape) == 4 and shape[3] > MAX_BANDED_WIDTH):
            return None
        outs = self.sizes(shape[2:], weight[2:])
        axes = [
            Axis(size=size, out=out, kernel=taps, stride=stride, padding=padding, dilation=dilation)
            for size, out, taps, stride, padding, dilation in zip(
                shape[2:], outs, weight[2:], self.stride, self.padding, self.dilation, strict=True
            )
        ]
        column = Axis(size=1, out=1, kernel=1, stride=1, padding=0, dilation=1)
        found = Bands(height=axes[0], width=axes[1] if len(axes) == 2 else column)
        return found if found.fits else None

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


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *rest: *tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int],
) -> Tensor:
    """``aten.convolution``, whose arguments these are, where another form is better."""
    stride, padding, dilation, transposed, _, groups = rest
    form = ConvForm(stride=stride, padding=padding, dilation=dilation, groups=groups)
    bands = None if transposed else form.bands(x.shape, weight.shape)
    if bands is None:
        kept: Tensor = NotImplemented  # torch's word for: leave the operator as it is
        return kept
    made = bands.forward(_two_dims(x), weight).reshape(x.shape[0], -1, *form.sizes(x.shape[2:], weight.shape[2:]))
    return made if bias is None else made + bias.reshape(-1, *(1 for _ in stride))


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
        dx = form.forward(dy, weight) if transposed else input_gradient(form, dy, weight, x.shape)
    if wants_weight:
        # A transposed convolution is the backward pass of a plain one, with x in the place of dy.
        dweight = weight_gradient(form, dy, x, weight) if transposed else weight_gradient(form, x, dy, weight)
    if wants_bias:
        dbias = dy.sum([0, *range(2, dy.dim())])
    return dx, dweight, dbias


def input_gradient(form: ConvForm, dy: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
    """The gradient of a plain convolution towards its input, of this ``shape``."""
    bands = form.bands(shape, weight.shape)
    if bands is not None:
        return bands.input_gradient(_two_dims(dy), weight).reshape(shape)
    if form.is_pointwise(weight.shape) and all(step == 1 for step in form.stride):
        return replace(form, dilation=form.stride).forward(dy, weight.transpose(0, 1))
    return form.backward(dy, weight, shape[2:])


def weight_gradient(form: ConvForm, x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a plain convolution of ``x`` towards its weight (O, C/groups, ...)."""
    bands = form.bands(x.shape, weight.shape)
    if bands is not None:
        return bands.weight_gradient(_two_dims(x), _two_dims(dy)).reshape(weight.shape)
    if form.is_pointwise(weight.shape):
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


def _two_dims(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.unsqueeze(-1)

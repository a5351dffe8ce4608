"""The starting point of every form of a convolution: its constants, and the operator that returns its gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvForm:
    """The constants of a convolution, one number for each spatial dimension."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def is_pointwise(self, weight: Sequence[int]) -> bool:
        """Return whether a weight of this shape only mixes the channels of each position."""
        return prod(weight[2:]) == 1 and self.groups == 1 and not any(self.padding)

    def keeps_places(self, weight: Sequence[int]) -> bool:
        """Return whether the convolution is pointwise and reads every position."""
        return self.is_pointwise(weight) and all(step == 1 for step in self.stride)

    def sizes(self, size: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """Return the spatial shape of the output for images of the spatial shape ``size``."""
        return [
            (have + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
            for have, taps, stride, padding, dilation in zip(
                size, kernel, self.stride, self.padding, self.dilation, strict=True
            )
        ]

    def places(self, size: Sequence[int], out: Sequence[int], kernel: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the flat input position that each tap reads for each output position (taps, outputs).

        A position in the padding is ``prod(size)``.
        """
        seen, is_inside = np.zeros((1, 1), np.int64), np.ones((1, 1), np.bool_)
        for index, (have, num, taps) in enumerate(zip(size, out, kernel, strict=True)):
            starts = np.arange(num) * self.stride[index] - self.padding[index]
            along = (np.arange(taps) * self.dilation[index])[:, None] + starts
            inside = (along >= 0) & (along < have)
            shape = len(seen) * taps, -1
            seen = (seen[:, None, :, None] * have + along[None, :, None, :]).reshape(shape)
            is_inside = (is_inside[:, None, :, None] & inside[None, :, None, :]).reshape(shape)
        return np.where(is_inside, seen, prod(size))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the plain convolution."""
        zeros = [0] * len(self.stride)
        y: Tensor = aten.convolution.default(
            x, weight, None, self.stride, self.padding, self.dilation, False, zeros, self.groups
        )
        return y

    def backward(self, dy: Tensor, weight: Tensor, size: Sequence[int]) -> Tensor:
        """Compute the gradient of the input with the spatial shape ``size``: the transposed convolution."""
        extra = [
            want - ((have - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1)
            for want, have, stride, padding, dilation, kernel in zip(
                size, dy.shape[2:], self.stride, self.padding, self.dilation, weight.shape[2:], strict=True
            )
        ]
        dx: Tensor = aten.convolution.default(
            dy, weight, None, self.stride, self.padding, self.dilation, True, extra, self.groups
        )
        return dx


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionBackward:
    """``aten.convolution_backward``, composed of three gradients of a plain convolution."""

    towards_input: Callable[[ConvForm, Tensor, Tensor, Sequence[int]], Tensor]
    """(form, dy, weight, shape of the input) -> gradient of the input."""
    towards_weight: Callable[[ConvForm, Tensor, Tensor, Tensor], Tensor]
    """(form, input, dy, weight) -> gradient of the weight."""
    towards_bias: Callable[[Tensor], Tensor]
    """dy -> gradient of the bias."""

    def __call__(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        bias_sizes: Sequence[int] | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
        output_mask: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute the gradients of x, weight and bias that ``output_mask`` selects."""
        needs_x, needs_weight, needs_bias = output_mask
        form = ConvForm(stride=stride, padding=padding, dilation=dilation, groups=groups)
        dx = dweight = None
        if needs_x:
            dx = form.forward(dy, weight) if transposed else self.towards_input(form, dy, weight, x.shape)
        if needs_weight:
            # A transposed convolution is the backward pass of a plain one, with x and dy exchanged.
            dweight = self.towards_weight(form, *((dy, x) if transposed else (x, dy)), weight)
        return dx, dweight, self.towards_bias(dy) if needs_bias else None

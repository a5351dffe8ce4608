"""What every form of a convolution starts from: its constants, what it sees, and the operators' arguments."""

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
        """Whether a weight of this shape mixes the channels of one place, and nothing else."""
        return prod(weight[2:]) == 1 and self.groups == 1 and not any(self.padding)

    def keeps_places(self, weight: Sequence[int]) -> bool:
        """Whether it is pointwise, and leaves no place out."""
        return self.is_pointwise(weight) and all(step == 1 for step in self.stride)

    def sizes(self, size: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """The spatial shape that images of ``size`` become."""
        return [
            (have + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
            for have, taps, stride, padding, dilation in zip(
                size, kernel, self.stride, self.padding, self.dilation, strict=True
            )
        ]

    def places(self, size: Sequence[int], out: Sequence[int], kernel: Sequence[int]) -> npt.NDArray[np.int64]:
        """(taps, places out): the place in that each tap sees from each place out, ``prod(size)`` in the padding."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionBackward:
    """``aten.convolution_backward`` made of the gradients of a plain convolution.

    ``towards_input`` is given the form, dy, the weight and the input's shape, ``towards_weight`` the form, the input,
    dy and the weight, ``towards_bias`` dy.
    """

    towards_input: Callable[[ConvForm, Tensor, Tensor, Sequence[int]], Tensor]
    towards_weight: Callable[[ConvForm, Tensor, Tensor, Tensor], Tensor]
    towards_bias: Callable[[Tensor], Tensor]

    def __call__(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        bias_sizes: Sequence[int] | None,
        *rest: *tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int, Sequence[bool]],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients towards x, weight and bias; the arguments are the operator's."""
        stride, padding, dilation, transposed, _, groups, (wants_x, wants_weight, wants_bias) = rest
        form = ConvForm(stride=stride, padding=padding, dilation=dilation, groups=groups)
        dx = dweight = None
        if wants_x:
            dx = form.forward(dy, weight) if transposed else self.towards_input(form, dy, weight, x.shape)
        if wants_weight:
            # A transposed convolution is the backward pass of a plain one, with x in the place of dy.
            dweight = self.towards_weight(form, *((dy, x) if transposed else (x, dy)), weight)
        return dx, dweight, self.towards_bias(dy) if wants_bias else None

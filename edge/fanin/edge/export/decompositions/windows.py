"""Windows of an image: the pieces from which gradients of convolutions and pools are put together."""

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def window(x: Tensor, start: Sequence[int], step: Sequence[int], num: Sequence[int]) -> Tensor:
    """``num`` places of each spatial dimension, from ``start`` on, every ``step``-th."""
    for index, (first, stride, count) in enumerate(zip(start, step, num, strict=True)):
        if (first, stride, count) != (0, 1, x.shape[2 + index]):
            x = aten.slice.Tensor(x, 2 + index, first, first + stride * (count - 1) + 1, stride)
    return x


def padded(x: Tensor, padding: Sequence[int], value: float) -> Tensor:
    sides = [side for size in reversed(padding) for side in (size, size)]
    return torch.nn.functional.pad(x, sides, value=value) if any(sides) else x


def scaled(place: Sequence[int], dilation: Sequence[int]) -> list[int]:
    return [index * size for index, size in zip(place, dilation, strict=True)]

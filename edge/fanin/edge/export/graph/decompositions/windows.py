"""Slices, paddings and zero insertion from which the gradients of convolutions and pools are built."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten


def window(x: Tensor, start: Sequence[int], step: Sequence[int], num: Sequence[int]) -> Tensor:
    """Return ``num`` positions of each spatial dimension of ``x`` (N, C, ...), every ``step``-th from ``start``."""
    for index, (first, stride, count) in enumerate(zip(start, step, num, strict=True)):
        if (first, stride, count) != (0, 1, x.shape[2 + index]):
            x = aten.slice.Tensor(x, 2 + index, first, first + stride * (count - 1) + 1, stride)
    return x


def padded(x: Tensor, padding: Sequence[int], value: float) -> Tensor:
    """Pad both sides of each spatial dimension of ``x`` (N, C, ...) with ``value``."""
    sides = [side for size in reversed(padding) for side in (size, size)]
    return functional.pad(x, sides, value=value) if any(sides) else x


def scaled(position: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Return the offset of a kernel position in the image: each index times the dilation of its dimension."""
    return [index * size for index, size in zip(position, dilation, strict=True)]


def stuffed(x: Tensor, dim: int, step: int) -> Tensor:
    """Insert ``step - 1`` zeros between the values along a dimension."""
    if step == 1 or x.shape[dim] == 1:
        return x
    num = x.shape[dim]
    before, after = prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
    spread = functional.pad(x.reshape(before, num, 1, after), [0, 0, 0, step - 1])
    stuffed_last = spread.reshape(*x.shape[:dim], num * step, *x.shape[dim + 1 :])
    return stuffed_last.narrow(dim, 0, (num - 1) * step + 1)


def resized(x: Tensor, dim: int, before: int, after: int, value: float = 0.0) -> Tensor:
    """Add ``before`` and ``after`` values at the ends of a dimension; a negative count crops."""
    start, end = max(0, -before), x.shape[dim] - max(0, -after)
    if end - start < x.shape[dim]:
        x = x.narrow(dim, start, end - start)
    sides = [0, 0] * (x.dim() - 1 - dim) + [max(0, before), max(0, after)]
    return functional.pad(x, sides, value=value) if any(sides) else x

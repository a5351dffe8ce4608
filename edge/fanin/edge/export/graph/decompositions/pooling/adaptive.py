"""Adaptive max pooling: one max pool if the sizes divide each other, otherwise each window separately.

Window ``i`` of ``n`` over ``s`` positions begins at ``floor(i s / n)`` and ends before ``ceil((i + 1) s / n)``, along
each dimension. If all windows have one size, they are a max pool. Otherwise the windows overlap, and there are few of
them. Their maximum is taken over the rows of each window and then over its columns. The gradient selects each position
of the windows by a matrix of zeros and ones with one row for each window, which keeps values unchanged. As in torch,
the first maximum of a window receives dy.
"""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten
Form = Callable[..., object]
Windows = list[tuple[int, int]]
"""The first and last (exclusive) position of each window along a dimension."""


def table(max_backward: Callable[..., Tensor]) -> dict[OpOverload, Form]:
    """Return the forms of adaptive max pools for graphs that train.

    Args:
        max_backward: The graph format's form of ``aten.max_pool2d_with_indices_backward``.
    """

    def adaptive_max_pool2d_backward(dy: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        kernel = _even(x.shape[-2:], dy.shape[-2:])
        if kernel is None:
            return _uneven_backward(dy, x)
        dx = max_backward(_batched(dy), _batched(x), kernel, kernel, [0, 0], [1, 1], False, indices)
        return dx.reshape(x.shape)

    return {
        aten.adaptive_max_pool2d.default: adaptive_max_pool2d,
        aten.adaptive_max_pool2d_backward.default: adaptive_max_pool2d_backward,
    }


def adaptive_max_pool1d(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute ``aten.adaptive_max_pool1d``: a signal is an image of one row."""
    highest, indices = adaptive_max_pool2d(x.unsqueeze(-2), [1, *output_size])
    return highest.squeeze(-2), indices.squeeze(-2)


def adaptive_max_pool2d(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute ``aten.adaptive_max_pool2d``. The indices of uneven windows are zeros: nothing reads them."""
    kernel = _even(x.shape[-2:], output_size)
    if kernel is not None:
        pooled: tuple[Tensor, Tensor] = aten.max_pool2d_with_indices.default(x, kernel, kernel)
        return pooled
    for dim, num in ((-2, output_size[0]), (-1, output_size[1])):
        windows = _windows(x.shape[dim], num)
        x = torch.cat([x.narrow(dim, start, end - start).amax(dim, keepdim=True) for start, end in windows], dim)
    return x, torch.zeros_like(x, dtype=torch.int64)


def _uneven_backward(dy: Tensor, x: Tensor) -> Tensor:
    highest, _ = adaptive_max_pool2d(x, dy.shape[-2:])
    rows, columns = (_windows(have, num) for have, num in zip(x.shape[-2:], dy.shape[-2:], strict=True))
    remaining, dx = dy, None
    for row, column in product(range(_longest(rows)), range(_longest(columns))):
        down, across = _selector(rows, row, x), _selector(columns, column, x).t()
        inside = down.sum(1, keepdim=True) @ across.sum(0, keepdim=True)
        share = remaining * (down @ x @ across == highest).to(dy.dtype) * inside
        remaining = remaining - share
        added = down.t() @ share @ across.t()
        dx = added if dx is None else dx + added
    assert dx is not None, "a window has at least one position"
    return dx


def _selector(windows: Windows, offset: int, x: Tensor) -> Tensor:
    """Return the matrix (windows, positions) that selects the value at ``offset`` of each window.

    The row of a window that is shorter than that is zero.
    """
    size = max(end for _, end in windows)
    rows = [[float(start + offset == at and at < end) for at in range(size)] for start, end in windows]
    return torch.tensor(rows, dtype=x.dtype)


def _longest(windows: Windows) -> int:
    return max(end - start for start, end in windows)


def _windows(have: int, num: int) -> Windows:
    return [(index * have // num, -(-(index + 1) * have // num)) for index in range(num)]


def _even(size: Sequence[int], num: Sequence[int]) -> list[int] | None:
    """Return the window size that all windows share; None if their sizes differ."""
    if any(have % want for have, want in zip(size, num, strict=True)):
        return None
    return [have // want for have, want in zip(size, num, strict=True)]


def _batched(x: Tensor) -> Tensor:
    """Return a single image as a batch of one."""
    return x if x.dim() == 4 else x.unsqueeze(0)

"""Adaptive max pooling: windows of one size where the sizes divide each other, else each window by itself.

Window ``i`` of ``n`` over ``s`` places begins at ``floor(i s / n)`` and ends before ``ceil((i + 1) s / n)``, along each
axis. Where that is one size throughout it is a max pool. Where it is not, windows overlap and are few: the maximum is
that of each window's rows and then of its columns, and on the way back each place of a window is seen through a matrix
of zeros and ones, a row a window, which picks a value as it is. As in torch, dy goes to a window's first maximum.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Final

import torch
from torch import Tensor
from torch._ops import OpOverload

from fanin.edge.export.decompositions import pooling, portable

aten = torch.ops.aten
Form = Callable[..., object]
Windows = list[tuple[int, int]]
"""Where each window along an axis begins and ends."""
MAX_BACKWARD: Final[dict[str, Callable[..., Tensor]]] = {
    "onnx": pooling.max_pool2d_backward,
    "tflite": portable.max_pool2d_backward,
}


def table(graph_format: str) -> dict[OpOverload, Form]:
    """The operators and their forms in a graph format."""
    max_backward = MAX_BACKWARD[graph_format]

    def backward(dy: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        kernel = _even(x.shape[-2:], dy.shape[-2:])
        if kernel is None:
            return _uneven_backward(dy, x)
        found = max_backward(_four(dy), _four(x), kernel, kernel, [0, 0], [1, 1], False, indices)
        return found.reshape(x.shape)

    return {
        aten.adaptive_max_pool2d.default: adaptive_max_pool2d,
        aten.adaptive_max_pool2d_backward.default: backward,
    }


def adaptive_max_pool2d(x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``aten.adaptive_max_pool2d``, whose arguments these are; nobody reads the indices of uneven windows."""
    kernel = _even(x.shape[-2:], size)
    if kernel is not None:
        found: tuple[Tensor, Tensor] = aten.max_pool2d_with_indices.default(x, kernel, kernel)
        return found
    for dim, num in ((-2, size[0]), (-1, size[1])):
        windows = _windows(x.shape[dim], num)
        x = torch.cat([x.narrow(dim, start, end - start).amax(dim, keepdim=True) for start, end in windows], dim)
    return x, torch.zeros_like(x, dtype=torch.int64)


def _uneven_backward(dy: Tensor, x: Tensor) -> Tensor:
    highest, _ = adaptive_max_pool2d(x, dy.shape[-2:])
    rows, columns = (_windows(have, num) for have, num in zip(x.shape[-2:], dy.shape[-2:], strict=True))
    left, dx = dy, None
    for row, column in product(range(_longest(rows)), range(_longest(columns))):
        down, across = _picked(rows, row, x), _picked(columns, column, x).t()
        inside = down.sum(1, keepdim=True) @ across.sum(0, keepdim=True)
        share = left * (down @ x @ across == highest).to(dy.dtype) * inside
        left = left - share
        added = down.t() @ share @ across.t()
        dx = added if dx is None else dx + added
    assert dx is not None, "a window has places"
    return dx


def _picked(windows: Windows, place: int, x: Tensor) -> Tensor:
    """A one where that place of each window lies (windows, places of the axis); none in a shorter window."""
    size = max(end for _, end in windows)
    rows = [[float(start + place == at and at < end) for at in range(size)] for start, end in windows]
    return torch.tensor(rows, dtype=x.dtype)


def _longest(windows: Windows) -> int:
    return max(end - start for start, end in windows)


def _windows(have: int, num: int) -> Windows:
    return [(index * have // num, -(-(index + 1) * have // num)) for index in range(num)]


def _even(size: Sequence[int], num: Sequence[int]) -> list[int] | None:
    """The one size of all windows; None if there are several."""
    if any(have % want for have, want in zip(size, num, strict=True)):
        return None
    return [have // want for have, want in zip(size, num, strict=True)]


def _four(x: Tensor) -> Tensor:
    """A single image as a batch of one."""
    return x if x.dim() == 4 else x.unsqueeze(0)

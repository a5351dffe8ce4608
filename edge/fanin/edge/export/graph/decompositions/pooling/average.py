"""Average pools as two constant matrices, one for rows and one for columns: an average pool is separable."""

from collections.abc import Sequence

import torch
from torch import Tensor


def avg_pool2d_backward(
    dy: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Compute ``aten.avg_pool2d_backward``: each gradient is spread evenly over its window."""
    matrices = []
    for have, num, taps, step, pad in zip(
        x.shape[-2:], dy.shape[-2:], kernel_size, stride or kernel_size, padding, strict=True
    ):
        starts = [index * step - pad for index in range(num)]
        # A last window that ceil_mode adds may reach beyond the padding. Positions there do not count.
        ends = [min(start + taps, have + pad) for start in starts]
        matrices.append(_shares(have, starts, ends, count_include_pad, divisor_override is not None))
    dx = _spread(dy, *matrices)
    return dx if divisor_override is None else dx / divisor_override


def adaptive_avg_pool2d(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Compute ``aten._adaptive_avg_pool2d``. torch's own decomposition gathers the positions of each window."""
    rows, columns = (
        _shares(have, *_windows(have, num), False, False).to(x.dtype)
        for have, num in zip(x.shape[-2:], output_size, strict=True)
    )
    return rows @ (x @ columns.t())


def adaptive_avg_pool2d_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Compute ``aten._adaptive_avg_pool2d_backward``."""
    rows, columns = (
        _shares(have, *_windows(have, num), False, False) for have, num in zip(x.shape[-2:], dy.shape[-2:], strict=True)
    )
    return _spread(dy, rows, columns)


def _shares(have: int, starts: Sequence[int], ends: Sequence[int], counts_padding: bool, sums: bool) -> Tensor:
    """Return the weight of each position in each window (windows, have), in float64."""
    rows = []
    for start, end in zip(starts, ends, strict=True):
        inside = range(max(0, start), min(have, end))
        num = 1 if sums else end - start if counts_padding else len(inside)
        rows.append([1.0 / num if index in inside else 0.0 for index in range(have)])
    return torch.tensor(rows, dtype=torch.float64)


def _spread(dy: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    rows, columns = rows.to(dy.dtype), columns.to(dy.dtype)
    return rows.t() @ (dy @ columns)


def _windows(have: int, num: int) -> tuple[list[int], list[int]]:
    """Return where the windows of an adaptive pool start and end."""
    return [index * have // num for index in range(num)], [-(-(index + 1) * have // num) for index in range(num)]

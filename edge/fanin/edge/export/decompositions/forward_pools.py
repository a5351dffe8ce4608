"""Pools that TFLite has no operator for: with gaps between a window's places, or a mean that leaves padding out.

A maximum is that of the image seen from each place of the window. A mean over what lies inside is the mean over all,
padding and its zeros too, times what constant share of a window that leaves out.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import product

import torch
from torch import Tensor

from fanin.edge.export.decompositions.forms import ConvForm
from fanin.edge.export.decompositions.windows import padded, scaled, window

aten = torch.ops.aten


def max_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    *rest: Sequence[int] | bool,
) -> object:
    """``aten.max_pool2d``, whose arguments these are, if it is a dilated one; others stay as they are."""
    dilation, ceil_mode = rest[0] if rest else (1, 1), len(rest) > 1 and rest[1]
    assert not isinstance(dilation, bool), "as the operator's schema has it"
    if all(step == 1 for step in dilation) or ceil_mode:
        return NotImplemented
    form = ConvForm(stride=_two(stride or kernel), padding=_two(padding), dilation=_two(dilation), groups=1)
    taps = _two(kernel)
    wide, sizes = padded(x, form.padding, float("-inf")), form.sizes(x.shape[2:], taps)
    places = product(*(range(size) for size in taps))
    return reduce(torch.maximum, [window(wide, scaled(place, form.dilation), form.stride, sizes) for place in places])


def max_pool2d_with_indices(x: Tensor, *form: object) -> object:
    """``aten.max_pool2d_with_indices``, the same; nobody reads its indices."""
    found = max_pool2d(x, *form)  # type: ignore[arg-type]  # the operator's own arguments, passed on
    if not isinstance(found, Tensor):
        return NotImplemented
    return found, torch.zeros_like(found, dtype=torch.int64)


def avg_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    *rest: bool | int | None,
) -> object:
    """``aten.avg_pool2d``, whose arguments these are, if it leaves padding out; others stay as they are."""
    ceil_mode, counts_padding = rest[:1] == (True,), rest[1:2] != (False,)
    divisor = rest[2] if len(rest) > 2 else None
    if counts_padding or ceil_mode or divisor is not None or not any(padding):
        return NotImplemented
    inside = padded(x.new_ones(1, 1, *x.shape[2:]), _two(padding), 0.0)
    means, shares = (
        aten.avg_pool2d.default(image, kernel, stride) for image in (padded(x, _two(padding), 0.0), inside)
    )
    found: Tensor = means * shares.reciprocal()
    return found


def _two(values: Sequence[int]) -> list[int]:
    """One number for each axis: torch takes one for both."""
    return list(values) * 2 if len(values) == 1 else list(values)

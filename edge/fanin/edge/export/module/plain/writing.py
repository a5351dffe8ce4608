"""Writes at integers and slices (``y[:, 0] = values``), traced as a new tensor that is copied into the old one.

torch's gradient of a write to a view reads and writes memory by strides (``as_strided``), which no graph format has.
The gradient of a copy into a complete tensor is passed to its source.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from fanin.edge.export.refusals import ViewWrite

WRITES: Final = frozenset(
    {
        *("__iadd__", "__isub__", "__imul__", "__itruediv__", "add_", "sub_", "mul_", "div_"),
        *("copy_", "fill_", "zero_", "clamp_", "masked_fill_"),
    }
)
"""Methods that change their tensor."""


def write_at(target: Tensor, key: object, values: object) -> bool:
    """Write values at a key of integers and slices. Return False, and write nothing, if torch's own write is exported.

    That is the case without a gradient, and for other keys.

    Args:
        target: The tensor that is written to.
        key: The key, as in ``target[key] = values``.
        values: A tensor or a number.

    Raises:
        ViewWrite: The target is a view of another tensor, or a slice has a step.
    """
    keys = _full_key(target, key)
    if keys is None or not (_has_gradient(target) or _has_gradient(values)):
        return False
    if target._is_view():
        raise ViewWrite("y[key] = values to a view y")
    if any(isinstance(each, slice) and each.step not in (None, 1) for each in keys):
        raise ViewWrite("y[key] = values at a slice with a step")
    source = values if isinstance(values, Tensor) else torch.full((), values, dtype=target.dtype)  # type: ignore[call-overload]
    target.copy_(_replaced(target, keys, source.to(target.dtype), 0))
    return True


def check_write(func: Callable[..., object], args: Sequence[object]) -> None:
    """Raise ViewWrite for a function that changes a view of a tensor with a gradient, such as ``y[:, 0] += 1.0``."""
    name = getattr(func, "__name__", "")
    if name in WRITES and isinstance(args[0], Tensor) and args[0]._is_view() and any(map(_has_gradient, args)):
        raise ViewWrite(f"{name} to a view, such as y[:, 0]")


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _full_key(target: Tensor, key: object) -> tuple[int | slice, ...] | None:
    """Return one key for each dimension that is not whole at the end; None for keys of another kind."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if sum(each is Ellipsis for each in keys) == 1:
        place = next(index for index, each in enumerate(keys) if each is Ellipsis)
        keys[place : place + 1] = [slice(None)] * (target.dim() - len(keys) + 1)
    accepted = tuple(each for each in keys if type(each) is int or isinstance(each, slice))
    return accepted if len(accepted) == len(keys) <= target.dim() else None


def _replaced(target: Tensor, keys: tuple[int | slice, ...], values: Tensor, dim: int) -> Tensor:
    """Return ``target`` with values at the keys, which begin at a dimension."""
    if not keys:
        # Leading dimensions of 1 are dropped, as in an assignment.
        while values.dim() > target.dim() and values.shape[0] == 1:
            values = values.squeeze(0)
        return values.expand(target.shape)
    key, rest = keys[0], keys[1:]
    if isinstance(key, int):
        part = _replaced(target.select(dim, key), rest, values, dim)
        return torch.select_scatter(target, part, dim, key)
    if key == slice(None):
        return _replaced(target, rest, values, dim + 1)
    start, stop, _ = key.indices(target.shape[dim])
    if stop <= start:
        return target
    part = _replaced(target.narrow(dim, start, stop - start), rest, values, dim + 1)
    return torch.slice_scatter(target, part, dim, start, stop)

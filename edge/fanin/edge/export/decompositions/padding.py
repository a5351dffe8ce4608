"""Padding with what an image has itself, in slices: the TFLite converter's layout pass fails on an index.

Along each axis ``y[i] = x[source[i]]``: where sources follow each other, that is a slice, and y is slices side by side.
The gradient is that of every operator that repeats places (``resampling``).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from fanin.edge.export.decompositions.resampling import Indices, added, edge

aten = torch.ops.aten


def backward_table() -> dict[OpOverload, Callable[..., object]]:
    """The operators as a train step has them."""
    reflected = {getattr(aten, f"reflection_pad{num}d").default: reflection_pad for num in (1, 2)}
    repeated = {getattr(aten, f"replication_pad{num}d").default: replication_pad for num in (1, 2)}
    gradients = {getattr(aten, f"reflection_pad{num}d_backward").default: reflection_pad_backward for num in (1, 2)}
    return {**reflected, **repeated, **gradients}


def forward_table() -> dict[OpOverload, Callable[..., object]]:
    """The operator that modules call."""
    return {aten.pad.default: pad}


def pad(x: Tensor, padding: Sequence[int], mode: str = "constant", value: float | None = None) -> object:
    """``aten.pad``, whose arguments these are, where it is padded with places of its own."""
    if mode == "reflect":
        return reflection_pad(x, padding)
    return replication_pad(x, padding) if mode == "replicate" else NotImplemented


def reflection_pad(x: Tensor, padding: Sequence[int]) -> Tensor:
    """``aten.reflection_pad2d`` and its like, whose arguments these are."""
    return _sliced(x, _sources(x.shape, padding, _mirror))


def reflection_pad_backward(dy: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """``aten.reflection_pad2d_backward`` and its like, whose arguments these are."""
    return added(dy, _sources(x.shape, padding, _mirror), x.shape[-(len(padding) // 2) :])


def replication_pad(x: Tensor, padding: Sequence[int]) -> Tensor:
    """``aten.replication_pad2d`` and its like, whose arguments these are."""
    return _sliced(x, _sources(x.shape, padding, edge))


def _mirror(places: Indices, size: int) -> Indices:
    """Around the first and the last place, which stand once."""
    found: Indices = (size - 1) - np.abs((size - 1) - np.abs(places))
    return found


def _sources(shape: Sequence[int], padding: Sequence[int], source: Callable[[Indices, int], Indices]) -> list[Indices]:
    """The source of each place along each of the last axes; (left, right, top, bottom): the last axis comes first."""
    num = len(padding) // 2
    sides = list(zip(padding[::2], padding[1::2], strict=True))[::-1]
    return [
        source(np.arange(-before, size + after), size)
        for (before, after), size in zip(sides, shape[-num:], strict=True)
    ]


def _sliced(x: Tensor, sources: Sequence[Indices]) -> Tensor:
    for dim, source in enumerate(sources, start=x.dim() - len(sources)):
        runs = np.split(source, np.flatnonzero(np.diff(source) != 1) + 1)
        x = torch.cat([x.narrow(dim, int(run[0]), len(run)) for run in runs], dim)
    return x

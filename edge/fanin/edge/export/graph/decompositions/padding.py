"""Reflection and replication padding as slices: the TFLite converter's layout pass fails on an index.

Along each dimension ``y[i] = x[source[i]]``. A run of consecutive sources is one slice, and y is the concatenation of
these slices. The gradient is that of every operator that repeats positions (``resampling``).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from fanin.edge.export.graph.decompositions.resampling import Indices, added, edge

aten = torch.ops.aten


def backward_table() -> dict[OpOverload, Callable[..., object]]:
    """Return the forms for graphs that train."""
    reflected = {getattr(aten, f"reflection_pad{num}d").default: reflection_pad for num in (1, 2)}
    repeated = {getattr(aten, f"replication_pad{num}d").default: replication_pad for num in (1, 2)}
    gradients = {getattr(aten, f"reflection_pad{num}d_backward").default: reflection_pad_backward for num in (1, 2)}
    return {**reflected, **repeated, **gradients}


def forward_table() -> dict[OpOverload, Callable[..., object]]:
    """Return the form of the one operator that modules call."""
    return {aten.pad.default: pad}


def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> object:
    """Compute ``aten.pad`` where the padding repeats positions of x; keep the operator otherwise."""
    if mode == "reflect":
        return reflection_pad(x, pad)
    return replication_pad(x, pad) if mode == "replicate" else NotImplemented


def reflection_pad(x: Tensor, padding: Sequence[int]) -> Tensor:
    """Compute ``aten.reflection_pad1d`` and ``aten.reflection_pad2d``."""
    return _sliced(x, _sources(x.shape, padding, _mirror))


def reflection_pad_backward(dy: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Compute ``aten.reflection_pad1d_backward`` and ``aten.reflection_pad2d_backward``."""
    return added(dy, _sources(x.shape, padding, _mirror), x.shape[-(len(padding) // 2) :])


def replication_pad(x: Tensor, padding: Sequence[int]) -> Tensor:
    """Compute ``aten.replication_pad1d`` and ``aten.replication_pad2d``."""
    return _sliced(x, _sources(x.shape, padding, edge))


def _mirror(places: Indices, size: int) -> Indices:
    """Reflect positions at the first and the last position, which are not repeated."""
    reflected: Indices = (size - 1) - np.abs((size - 1) - np.abs(places))
    return reflected


def _sources(shape: Sequence[int], padding: Sequence[int], source: Callable[[Indices, int], Indices]) -> list[Indices]:
    """Return the source of each position along each of the padded dimensions.

    ``padding`` is (left, right, top, bottom): the last dimension comes first.
    """
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

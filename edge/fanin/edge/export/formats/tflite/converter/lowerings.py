"""Lowerings of the most frequent operators to StableHLO.

The converter lowers most operators by a function of JAX, which it traces and parses again for each shape. This takes
milliseconds, and a train step has hundreds of these operators. A lowering of this module writes the operations that
JAX would write, so the file has the same bytes. Dtypes and shapes that it does not cover go to the converter's own.

Reference:
    StableHLO, https://openxla.org/stablehlo/spec.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch._ops import OpOverload

if TYPE_CHECKING:
    from litert_converter.mlir import ir

Lowering = Callable[..., object]
"""Returns the value of an operator from its operands, or ``NOT_COVERED``."""
aten = torch.ops.aten
NOT_COVERED: Final = object()
"""The result of a lowering for operands that it does not cover."""


@contextmanager
def direct_lowerings() -> Iterator[None]:
    """Let the converter use the lowerings of this module in the context."""
    from litert_torch.backend.lowerings.registry import global_registry

    registered = global_registry.registered_ops
    before = dict(registered)
    registered |= {operator: partial(_lowered, row, global_registry.lookup(operator)) for operator, row in ROWS.items()}
    try:
        yield
    finally:
        registered.clear()
        registered |= before


def _lowered(direct: Lowering, own: Lowering, context: object, *args: object, **kwargs: object) -> object:
    value = direct(*args, **kwargs)
    return own(context, *args, **kwargs) if value is NOT_COVERED else value


def _clone(x: "ir.Value", *, memory_format: object = None) -> object:
    return x


def _view(x: "ir.Value", shape: Sequence[int]) -> object:
    from litert_converter.mlir.dialects import stablehlo

    if not _is_static(x):
        return NOT_COVERED
    own = list(x.type.shape)
    free = math.prod(own) // max(1, math.prod(size for size in shape if size != -1))
    sizes = [free if size == -1 else size for size in shape]
    return x if sizes == own else stablehlo.reshape(_type(x, sizes), x)


def _permute(x: "ir.Value", dims: Sequence[int]) -> object:
    from litert_converter.mlir.dialects import stablehlo

    order = [dim % len(dims) for dim in dims]
    return x if order == sorted(order) else stablehlo.transpose(x, _integers(order))


def _unsqueeze(x: "ir.Value", dim: int) -> object:
    if not _is_static(x):
        return NOT_COVERED
    shape = list(x.type.shape)
    at = dim % (len(shape) + 1)
    others = [number for number in range(len(shape) + 1) if number != at]
    return _repeated(x, [*shape[:at], 1, *shape[at:]], others)


def _expand(x: "ir.Value", sizes: Sequence[int], *, implicit: bool = False) -> object:
    if not _is_static(x):
        return NOT_COVERED
    own, added = list(x.type.shape), len(sizes) - len(x.type.shape)
    shape = [own[number - added] if size == -1 else size for number, size in enumerate(sizes)]
    return x if shape == own else _repeated(x, shape)


def _slice(x: "ir.Value", dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> object:
    if not _is_static(x):
        return NOT_COVERED
    return _strided(x, dim, slice(start, end, step))


def _select(x: "ir.Value", dim: int, index: int) -> object:
    from litert_converter.mlir.dialects import stablehlo

    if not _is_static(x) or not isinstance(index, int):
        return NOT_COVERED
    shape = list(x.type.shape)
    at = index % shape[dim]
    part = _strided(x, dim, slice(at, at + 1))
    del shape[dim]
    return stablehlo.reshape(_type(x, shape), part)


def _strided(x: "ir.Value", dim: int, part: slice) -> "ir.Value":
    from litert_converter.mlir.dialects import stablehlo

    sizes = list(x.type.shape)
    start, end, step = part.indices(sizes[dim])
    starts, ends, steps = [0] * len(sizes), list(sizes), [1] * len(sizes)
    starts[dim], ends[dim], steps[dim] = start, max(start, end), step
    return stablehlo.slice(x, *(_integers(values) for values in (starts, ends, steps)))


def _pad(x: "ir.Value", padding: Sequence[int], value: float = 0.0) -> object:
    """Return the padded tensor; ``padding`` begins with both sides of the last dimension."""
    from litert_converter.mlir.dialects import stablehlo

    if not _are_floats(x):
        return NOT_COVERED
    inner = [0] * (2 * len(x.type.shape) - len(padding))
    before, after = ([*inner[::2], *reversed(padding[side::2])] for side in (0, 1))
    return stablehlo.pad(x, _constant(value), *(_integers(each) for each in (before, after, [0] * len(before))))


def _mm(x: "ir.Value", y: "ir.Value") -> object:
    from litert_converter.mlir.dialects import stablehlo

    if not _are_floats(x, y):
        return NOT_COVERED
    dims = stablehlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=[],
        rhs_batching_dimensions=[],
        lhs_contracting_dimensions=[1],
        rhs_contracting_dimensions=[0],
    )
    return stablehlo.dot_general(_type(x, [x.type.shape[0], y.type.shape[1]]), x, y, dims)


def _sum(x: "ir.Value", dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: object = None) -> object:
    from litert_converter.mlir import ir
    from litert_converter.mlir.dialects import stablehlo

    if not _are_floats(x) or dtype is not None:
        return NOT_COVERED
    shape = list(x.type.shape)
    summed = sorted({dim % len(shape) for dim in dims} if dims else range(len(shape)))
    others = [dim for dim in range(len(shape)) if dim not in summed]
    total = stablehlo.ReduceOp([_type(x, [shape[dim] for dim in others])], [x], [_constant(0.0)], _integers(summed))
    block = total.regions[0].blocks.append(_type(x, []), _type(x, []))
    with ir.InsertionPoint(block):
        stablehlo.return_([stablehlo.add(*block.arguments)])
    if not keepdim:
        return total.result
    return _repeated(total.result, [1 if dim in summed else size for dim, size in enumerate(shape)], others)


def _relu(x: "ir.Value") -> object:
    from litert_converter.mlir.dialects import stablehlo

    if not _are_floats(x):
        return NOT_COVERED
    return stablehlo.maximum(x, _repeated(_constant(0.0), list(x.type.shape)))


def _binary(name: str, x: "ir.Value", y: "ir.Value") -> object:
    from litert_converter.mlir.dialects import stablehlo

    if _are_floats(x) or _are_floats(y):
        x, y = _number_as_float(x), _number_as_float(y)
    if not _are_floats(x, y):
        return NOT_COVERED
    shape = list(np.broadcast_shapes(tuple(x.type.shape), tuple(y.type.shape)))
    return getattr(stablehlo, name)(_broadcast(x, shape), _broadcast(y, shape))


def _number_as_float(value: "ir.Value") -> "ir.Value":
    """Return an integer of Python's code as a float, and another value unchanged."""
    from litert_converter.mlir import ir
    from litert_converter.mlir.dialects import stablehlo

    if value.type.shape or value.type.element_type != ir.IntegerType.get_signless(32):
        return value
    return stablehlo.convert(ir.RankedTensorType.get([], ir.F32Type.get()), value)


def _broadcast(value: "ir.Value", shape: Sequence[int]) -> "ir.Value":
    """Return a value of this shape. As in JAX, dimensions of size 1 are added first."""
    own, rank = list(value.type.shape), len(shape)
    if 0 < len(own) < rank:
        value = _repeated(value, [1] * (rank - len(own)) + own)
    return value if own == list(shape) else _repeated(value, shape)


def _repeated(value: "ir.Value", shape: Sequence[int], dims: Sequence[int] | None = None) -> "ir.Value":
    """Return a value of this shape; ``dims`` are the value's dimensions in it, by default the last ones."""
    from litert_converter.mlir.dialects import stablehlo

    rank = len(shape)
    own = range(rank - len(value.type.shape), rank) if dims is None else dims
    return stablehlo.broadcast_in_dim(_type(value, shape), value, _integers(own))


def _constant(value: float) -> "ir.Value":
    from litert_converter.mlir import ir
    from litert_torch.backend.lowerings import utils

    return utils.splat(value, ir.F32Type.get())


def _type(value: "ir.Value", shape: Sequence[int]) -> "ir.Type":
    from litert_converter.mlir import ir

    return ir.RankedTensorType.get(list(shape), value.type.element_type)


def _integers(values: Sequence[int]) -> "ir.Attribute":
    from litert_converter.mlir import ir

    return ir.DenseI64ArrayAttr.get(list(values))


def _is_static(value: "ir.Value") -> bool:
    return all(size >= 0 for size in value.type.shape)


def _are_floats(*values: "ir.Value") -> bool:
    from litert_converter.mlir import ir

    return all(isinstance(value.type.element_type, ir.F32Type) and _is_static(value) for value in values)


ROWS: Final[Mapping[OpOverload, Lowering]] = MappingProxyType(
    {
        aten.add.Tensor: partial(_binary, "add"),
        aten.clone.default: _clone,
        aten.constant_pad_nd.default: _pad,
        aten.div.Tensor: partial(_binary, "divide"),
        aten.expand.default: _expand,
        aten.mm.default: _mm,
        aten.mul.Tensor: partial(_binary, "multiply"),
        aten.permute.default: _permute,
        aten.relu.default: _relu,
        aten.select.int: _select,
        aten.slice.Tensor: _slice,
        aten.sub.Tensor: partial(_binary, "subtract"),
        aten.sum.dim_IntList: _sum,
        aten.unsqueeze.default: _unsqueeze,
        aten.view.default: _view,
    }
)
"""The lowerings by operator."""

"""Complex values as pairs of real ones, for a format without complex numbers.

``RealParts`` runs a graph in which each complex value is a pair of its real and imaginary part. A Fourier transform is
a product with a matrix of cosines and one of sines.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Argument, Target
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_any, tree_map

aten = torch.ops.aten


class Pair(NamedTuple):
    """A complex value."""

    real: Tensor
    imaginary: Tensor


Value = Tensor | Pair


class NoRealForm(Exception):
    """An operator of complex values has no form of real ones."""


class RealParts(Interpreter):
    """Runs a graph without complex values. Raises NoRealForm."""

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, object]) -> object:
        """Run one operator: on both parts, or by its own form."""
        if target in FORMS:
            result = FORMS[target](*args, **kwargs)
            if result is not NotImplemented:
                return result
        elif not tree_any(is_pair, args, is_leaf=is_pair):
            result = super().call_function(target, args, kwargs)
            if not tree_any(_is_complex, result):
                return result
        elif target in ON_EACH_PART and not kwargs:
            return Pair(*(target(*tree_map(part, args, is_leaf=is_pair)) for part in (_real, _imaginary)))
        raise NoRealForm(target)


def with_real_numbers(graph_module: GraphModule, examples: Sequence[Tensor]) -> GraphModule:
    """Return a graph without complex values. Raises NoRealForm."""
    values = (node.meta.get("val") for node in graph_module.graph.nodes)
    if not any(map(_is_complex, values)):
        return graph_module

    # The first trace divides composite operators, such as a short-time Fourier transform.
    return _traced(RealParts(_traced(Interpreter(graph_module), examples)), examples)


def _traced(interpreter: Interpreter, examples: Sequence[Tensor]) -> GraphModule:
    def run(*inputs: Tensor) -> object:
        result = interpreter.run(*inputs)
        return (result,) if isinstance(result, Tensor) else tuple(result)

    with preserve_node_meta(), torch.no_grad():
        return make_fx(dispatch_functionalize(run, FunctionalTensorMode(export=True)))(*examples)


def is_pair(value: object) -> bool:
    """Return whether a value is complex."""
    return isinstance(value, Pair)


def _is_complex(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def _real(value: object) -> object:
    return value.real if isinstance(value, Pair) else value


def _imaginary(value: object) -> object:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return value.imaginary if isinstance(value, Pair) else value


def spectrum(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> object:
    """Compute ``aten._fft_r2c`` over one dimension."""
    if len(dim) != 1:
        return NotImplemented
    num = x.shape[dim[0]]
    cosines, sines = _waves(num, num // 2 + 1 if onesided else num, normalization, x.dtype)
    return Pair(_along(x, dim[0], cosines), -_along(x, dim[0], sines))


def transform(x: Pair, dim: Sequence[int], normalization: int, forward: bool) -> object:
    """Compute ``aten._fft_c2c`` over one dimension."""
    if len(dim) != 1:
        return NotImplemented
    num = x.real.shape[dim[0]]
    cosines, sines = _waves(num, num, normalization, x.real.dtype)
    sines = sines if forward else -sines
    return Pair(
        _along(x.real, dim[0], cosines) + _along(x.imaginary, dim[0], sines),
        _along(x.imaginary, dim[0], cosines) - _along(x.real, dim[0], sines),
    )


def _waves(num: int, num_frequencies: int, normalization: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the cosines and the sines of a transform."""
    # In float64: the angles of a long transform lose digits in float32.
    angles = np.outer(np.arange(num), np.arange(num_frequencies)) % num * (2 * math.pi / num)
    scale = (1.0, num**-0.5, 1.0 / num)[normalization]
    for wave in (np.cos(angles), np.sin(angles)):
        yield torch.tensor((scale * wave).tolist(), dtype=dtype)


def _along(x: Tensor, dim: int, matrix: Tensor) -> Tensor:
    return (x.movedim(dim, -1) @ matrix).movedim(-1, dim)


def choice(condition: Tensor, a: Value, b: Value) -> object:
    """Compute ``aten.where``."""
    if not isinstance(a, Pair) and not isinstance(b, Pair):
        return torch.where(condition, a, b)
    (real, imaginary), (other_real, other_imaginary) = _pair(a), _pair(b)
    return Pair(torch.where(condition, real, other_real), torch.where(condition, imaginary, other_imaginary))


def constant(operator: OpOverload) -> Callable[..., object]:
    """Return the form of an operator that fills a tensor with a number."""

    def form(*args: object, dtype: torch.dtype | None = None, **kwargs: object) -> object:
        *size, number = args
        if not (dtype.is_complex if dtype else isinstance(number, complex)):
            return operator(*args, dtype=dtype, **kwargs)
        kwargs["dtype"] = dtype.to_real() if dtype else torch.get_default_dtype()
        assert isinstance(number, int | float | complex), number
        return Pair(operator(*size, number.real, **kwargs), operator(*size, number.imag, **kwargs))

    return form


def _pair(x: Value) -> Pair:
    return x if isinstance(x, Pair) else Pair(x, torch.zeros_like(x))


def product(a: Value, b: Value) -> object:
    """Compute ``aten.mul``."""
    if not isinstance(a, Pair):
        a, b = b, a
    if not isinstance(a, Pair):
        return b * a
    if not isinstance(b, Pair):
        return Pair(a.real * b, a.imaginary * b)
    return Pair(a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real)


def quotient(a: Value, b: Value) -> object:
    """Compute ``aten.div`` by a real value."""
    if isinstance(b, Pair):
        return NotImplemented
    return Pair(a.real / b, a.imaginary / b) if isinstance(a, Pair) else a / b


def magnitude(x: Value) -> Tensor:
    """Compute ``aten.abs``."""
    value: Tensor = (x.real.square() + x.imaginary.square()).sqrt() if isinstance(x, Pair) else aten.abs.default(x)
    return value


def conjugate(x: Value) -> Value:
    """Compute a conjugate."""
    return Pair(x.real, -x.imaginary) if isinstance(x, Pair) else x


FORMS: Final[Mapping[object, Callable[..., object]]] = MappingProxyType(
    {
        aten._fft_r2c.default: spectrum,
        aten._fft_c2c.default: transform,
        aten.where.self: choice,
        aten.full.default: constant(aten.full.default),
        aten.scalar_tensor.default: constant(aten.scalar_tensor.default),
        aten.mul.Tensor: product,
        aten.div.Tensor: quotient,
        aten.abs.default: magnitude,
        aten._conj.default: conjugate,
        aten._conj_physical.default: conjugate,
        aten.view_as_real.default: lambda x: torch.stack(x, -1),
        aten.view_as_complex.default: lambda x: Pair(x[..., 0], x[..., 1]),
        aten.polar.default: lambda size, angle: Pair(size * angle.cos(), size * angle.sin()),
    }
)
"""The form of each operator that computes with complex values."""
ON_EACH_PART: Final = frozenset[OpOverload](
    {
        *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.t.default),
        *(aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default),
        *(aten.slice.Tensor, aten.select.int, aten.clone.default, aten.cat.default, aten.neg.default),
        *(aten.alias.default, aten.detach.default),
        *(aten.slice_scatter.default, aten.copy.default),
    }
)
"""The operators of complex values that move or negate elements."""

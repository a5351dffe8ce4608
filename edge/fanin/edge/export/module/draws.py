"""The random numbers that a module draws in training, taken from given tensors instead of torch's generator.

``Draws`` handles torch's random operators below autograd. So it covers dropout of any form, stochastic depth, the noise
of a VAE and ``torch.distributions``, in layers and in functions.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fanin.edge.export.refusals import RandomDraw
from fanin.edge.runtimes.randomness import RandomKind, RandomPort, draw, random_port

Source = Callable[[RandomKind, tuple[int, ...]], Tensor]
"""Returns the float32 values of a draw of this kind and shape."""
aten = torch.ops.aten


DRAW_LESS: Final = (
    "lower the batch size, or draw one value for a channel (nn.Dropout2d) instead of one for each element"
)


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """While active, each random operator takes its values from ``source``.

    Raises:
        RandomDraw: A random operator has no form over uniform or normal values.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._source = source

    def __torch_dispatch__(
        self,
        func: OpOverload,
        _: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Compute a random operator from given values, and call any other one."""
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **named)
        if func in FORMS:
            return FORMS[func](self._source, *args, **named)
        name = f"{func._schema.name}.{func._overloadname}".removesuffix(".default")
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            raise RandomDraw(f"{func.overloadpacket}, expected dropout, or uniform or normal values of a fixed shape")
        # A recurrent layer counts as random, because it may draw the dropout between its layers. So decompose it. A
        # trace that does not decompose such operators returns NotImplemented.
        with self:
            result = func.decompose(*args, **named)
        return func(*args, **named) if result is NotImplemented else result


def recorded(ports: list[RandomPort], limit_bytes: int | None = None) -> Draws:
    """Return a mode that appends a port for each draw to ``ports``.

    Args:
        ports: The draws so far.
        limit_bytes: Most bytes of all draws; a further draw gives zeros. None: no limit.
    """

    def source(kind: RandomKind, shape: tuple[int, ...]) -> Tensor:
        ports.append(random_port(kind, len(ports), shape))
        if limit_bytes is not None and sum(port.size_bytes for port in ports) > limit_bytes:
            return torch.zeros(shape)
        return values_of(ports[-1:], 0, 0)[0]

    return Draws(source)


def fixed_draws(ports: Sequence[RandomPort], values: Sequence[Tensor]) -> Draws:
    """Return a mode whose draws are these values, one for each port, in their order."""
    waiting = list(zip(ports, values, strict=True))

    def source(kind: RandomKind, shape: tuple[int, ...]) -> Tensor:
        port, value = waiting.pop(0) if waiting else (None, torch.zeros(()))
        if port is None or (port.kind, port.shape) != (kind, shape):
            wanted = "no further draw" if port is None else f"{port.kind} values {port.shape}"
            raise RandomDraw(f"{kind} values {shape}, expected {wanted} as in an earlier pass")
        return value

    return Draws(source)


def constant() -> Draws:
    """Return a mode whose draws are constants, to test whether a layer has a form in a graph format."""
    return Draws(lambda _, shape: torch.full(shape, 0.25))


def refused(chance: float | None = 0.5, drawn: list[float] | None = None) -> Draws:
    """Return a mode that refuses draws: evaluation and inference must not depend on chance.

    A single uniform value is accepted: transformers draws one for each layer that training may skip, in evaluation,
    too, and does not use it there.

    Args:
        chance: That value. None refuses it, too.
        drawn: Receives it for each draw.
    """

    def source(kind: RandomKind, shape: tuple[int, ...]) -> Tensor:
        if kind == "uniform" and not shape and chance is not None:
            if drawn is not None:
                drawn.append(chance)
            return torch.full((), chance)
        raise RandomDraw(f"{kind} values {shape} in evaluation mode, expected none")

    return Draws(source)


def values_of(ports: Sequence[RandomPort], key: int, step: int) -> list[Tensor]:
    """Return the values of all draws of a step, as a device draws them."""
    return [torch.from_numpy(draw(port, key, step)) for port in ports]


def ended(ports: Sequence[RandomPort], limit: int) -> Draws | None:
    """Return a mode that raises RandomDraw at the largest draw; None if all draws take at most ``limit`` bytes.

    The traceback of the error then has the module and the line of that draw.

    Args:
        ports: All draws of a step.
        limit: Most bytes that a device may draw.
    """
    size_bytes = sum(port.size_bytes for port in ports)
    if size_bytes <= limit:
        return None
    largest = max(ports, key=lambda port: port.size_bytes)
    waiting = list(ports)

    def source(kind: RandomKind, shape: tuple[int, ...]) -> Tensor:
        if waiting.pop(0) is largest:
            raise RandomDraw(
                f"{kind} values {shape}, the largest draw of {size_bytes} bytes of random numbers in a step, expected "
                f"at most {limit} bytes",
                DRAW_LESS,
            )
        return torch.zeros(shape)

    return Draws(source)


def _below(source: Source, chance: object, shape: Sequence[int]) -> Tensor:
    """Return where a uniform value is below ``chance``, a number or a tensor (B, ...)."""
    # A chance is rounded to float32 once, so torch in float64 and a graph in float32 draw the same mask.
    limit = chance.to(torch.float32) if isinstance(chance, Tensor) else float(np.float32(cast("float", chance)))
    return source("uniform", tuple(shape)) < limit


def _bernoulli(source: Source, chance: Tensor, **_: object) -> Tensor:
    return _below(source, chance, chance.shape).to(chance.dtype)


def _bernoulli_p(source: Source, like: Tensor, chance: float = 0.5, **_: object) -> Tensor:
    return _below(source, chance, like.shape).to(like.dtype)


def _bernoulli_into(source: Source, target: Tensor, chance: object = 0.5, **_: object) -> Tensor:
    return target.copy_(_below(source, chance, target.shape).to(target.dtype))


def _dropout(source: Source, x: Tensor, chance: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    mask = _below(source, 1.0 - chance, x.shape) if train else torch.ones_like(x, dtype=torch.bool)
    return (x * mask / (1.0 - chance) if train else x), mask


def _new(kind: RandomKind) -> Callable[..., Tensor]:
    def form(source: Source, shape: Sequence[int], dtype: torch.dtype | None = None, **_: object) -> Tensor:
        return source(kind, tuple(shape)).to(dtype or torch.get_default_dtype())

    return form


def _like(kind: RandomKind) -> Callable[..., Tensor]:
    def form(source: Source, like: Tensor, dtype: torch.dtype | None = None, **_: object) -> Tensor:
        return source(kind, tuple(like.shape)).to(dtype or like.dtype)

    return form


def _uniform_into(source: Source, target: Tensor, low: float = 0.0, high: float = 1.0, **_: object) -> Tensor:
    return target.copy_(source("uniform", tuple(target.shape)) * (high - low) + low)


def _normal_into(source: Source, target: Tensor, mean: float = 0.0, std: float = 1.0, **_: object) -> Tensor:
    return target.copy_(source("normal", tuple(target.shape)) * std + mean)


def _normal(source: Source, mean: Tensor | float, std: Tensor | float = 1.0, **_: object) -> Tensor:
    parts = [part for part in (mean, std) if isinstance(part, Tensor)]
    shape = torch.broadcast_shapes(*(part.shape for part in parts))  # type: ignore[no-untyped-call]
    return source("normal", tuple(shape)).to(parts[0].dtype) * std + mean


def _exponential_into(source: Source, target: Tensor, rate: float = 1.0, **_: object) -> Tensor:
    # 1 - u is in (0, 1], so the logarithm is finite.
    return target.copy_(-torch.log(1.0 - source("uniform", tuple(target.shape))) / rate)


def _attention(_: Source, *args: object, **named: object) -> object:
    # Tagged as random, because it may drop weights. In training, torch replaces a call with dropout by its parts.
    if named.get("dropout_p", args[4] if len(args) > 4 else 0.0):
        raise RandomDraw("the dropout of an attention in evaluation mode, expected none")
    return aten.scaled_dot_product_attention.default(*args, **named)


FORMS: Final[Mapping[OpOverload, Callable[..., object]]] = MappingProxyType(
    {
        aten.bernoulli.default: _bernoulli,
        aten.bernoulli.p: _bernoulli_p,
        aten.bernoulli_.float: _bernoulli_into,
        aten.bernoulli_.Tensor: _bernoulli_into,
        aten.native_dropout.default: _dropout,
        aten.rand.default: _new("uniform"),
        aten.rand_like.default: _like("uniform"),
        aten.uniform_.default: _uniform_into,
        aten.randn.default: _new("normal"),
        aten.randn_like.default: _like("normal"),
        aten.normal_.default: _normal_into,
        aten.normal.Tensor_float: _normal,
        aten.normal.float_Tensor: _normal,
        aten.normal.Tensor_Tensor: _normal,
        aten.exponential_.default: _exponential_into,
        aten.scaled_dot_product_attention.default: _attention,
    }
)
"""Random operators over uniform or normal values. Each argument after ``source`` is the operator's own."""

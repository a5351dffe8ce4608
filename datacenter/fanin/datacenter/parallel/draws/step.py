"""The draws of one rank: the values that a module gets are its slice of the draw of the complete model.

A pass computes some examples of the global batch. ``begin`` names them, and ``select`` those of a microbatch. Modules
that draw run with ``LocalDraws``, and no other module changes. The key of a draw is a hash of the step's key, the
module's first name and the number of the draw in this pass. A rank's slice follows from two shapes: the complete one,
as ``recording`` found it, and that of the operator on this rank.

A draw that the recording does not know is an error, and so is any other use of torch's generators in a step: with other
numbers, ranks that must be equal would diverge.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Final, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fanin.datacenter.parallel.draws.operators import LocalDraws
from fanin.datacenter.parallel.draws.recording import DRAW_BY_TORCH, other_draws
from fanin.datacenter.parallel.draws.sites import DrawShape, ModelDraws
from fanin.datacenter.parallel.draws.words import draw_rows
from fanin.edge.export.refusals import RandomDraw
from fanin.edge.runtimes.randomness import RandomKind
from fanin.protos.errors import UnsupportedModel

DOMAIN: Final = "fanin.draws.v1"
P = ParamSpec("P")
T = TypeVar("T")


def step_key(seed: int, step: int) -> int:
    """Return the key of the draws of a job's step, 64 bits."""
    return _hash(f"{DOMAIN}:{seed}:step:{step}")


def evaluation_key(seed: int, first: int) -> int:
    """Return the key of the draws in an evaluation of the held-out samples from number ``first`` on."""
    return _hash(f"{DOMAIN}:{seed}:evaluation:{first}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that ``torch.compile`` calls instead of compiling it."""
    return cast("Callable[P, T]", torch.compiler.disable(function))  # type: ignore[no-untyped-call]  # torch's


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward pass: its examples, and its draws so far.

    Attributes:
        key: the key of the step.
        examples: the numbers of the examples in the global batch.
        training: whether the model is in training mode.
        counts: number of the next draw, by the first name of the module.
    """

    key: int
    examples: range
    training: bool
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class RankDraws:
    """The draws of a model on one rank.

    Args:
        model: the draws of the complete model.
        shard: (this rank's number in tp, the number of its ranks).
    """

    def __init__(self, model: ModelDraws, shard: tuple[int, int] = (0, 1)) -> None:
        self._model = model
        self._shard = shard
        self._first: Pass | None = None
        self._pass: Pass | None = None
        self._names: list[str] = []
        self._drawing: set[nn.Module] = set()
        self._checks_others = True

    def wrap(self, part: nn.Module) -> None:
        """Make the modules of a part that draw take their values from here. Names and parameters do not change."""
        own = dict(part.named_modules(remove_duplicate=False))
        for name, site in self._model.modules():
            for module in {own[alias] for alias in site.names if alias in own} - self._drawing:
                # Replaced on the instance, so that hooks of the module stay outside. It cannot be compiled.
                module.forward = not_compiled(self.of(name, module.forward))
                self._drawing.add(module)

    @property
    def may_skip(self) -> bool:
        """Whether a step may skip a layer of the model."""
        return any(site.may_skip for _, site in self._model.modules())

    def draws_in(self, module: nn.Module) -> bool:
        """Return whether a module, or a part of it, draws."""
        return not self._drawing.isdisjoint(module.modules())

    def begin(self, key: int, examples: range, *, training: bool) -> None:
        """Begin a pass over these examples. In an evaluation that draws nothing, no module changes."""
        active = bool(self._model.sites) and (training or self._model.in_evaluation)
        self._first = self._pass = Pass(key=key, examples=examples, training=training) if active else None

    def select(self, index: int) -> None:
        """Begin the pass of a pipeline's microbatch ``index``. ``begin`` has named the examples of the first one."""
        if self._first is not None:
            examples = self._first.examples
            shift = index * len(examples)
            moved = range(examples.start + shift, examples.stop + shift)
            self._pass = replace(self._first, examples=moved, counts=defaultdict(int))

    def recomputed(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that opens a context with the draws of this moment, to repeat what follows."""
        now = self._pass and replace(self._pass, counts=defaultdict(int, self._pass.counts))
        return lambda: self._during(now)

    @contextmanager
    def _during(self, repeated: Pass | None) -> Iterator[None]:
        interrupted, self._pass = self._pass, repeated
        try:
            yield
        finally:
            self._pass = interrupted

    @contextmanager
    def only(self, device: torch.device) -> Iterator[None]:
        """Raise UnsupportedModel if this context draws from torch's generators, or a first one from other ones."""
        states = _generator_states(device)
        sources = list[str]()
        with other_draws(sources) if self._checks_others else nullcontext():
            yield
        self._checks_others = False
        if any(not torch.equal(*pair) for pair in zip(states, _generator_states(device), strict=True)):
            sources = ["torch", *sources]
        if sources:
            unknown = f"; its draws could not be found before: {self._model.fault}" if self._model.fault else ""
            raise UnsupportedModel(
                f"model: draws random numbers by {' and '.join(sources)} that are unknown before the first step, "
                f"expected the same draws in each pass{unknown}; {DRAW_BY_TORCH}",
                code="FN-1297",
            )

    def of(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Return the forward of the module with this first name, or the loss, so that it takes its values from here."""
        site = self._model.sites.get(name)
        if site is None:
            return function
        mode = LocalDraws(self._draw)

        def drawing(*args: P.args, **kwargs: P.kwargs) -> T:
            if self._pass is None:
                return function(*args, **kwargs)
            is_outermost = not self._names
            self._names.append(name)
            try:
                # A fused attention draws inside of its kernel.
                plain = sdpa_kernel(SDPBackend.MATH) if site.attention else nullcontext()
                with plain, mode if is_outermost else nullcontext():
                    return function(*args, **kwargs)
            except RandomDraw as exc:
                raise UnsupportedModel(
                    f"model: {name} draws random numbers by {exc}; {exc.advice}", code="FN-1297"
                ) from exc
            finally:
                self._names.pop()

        return drawing

    def _draw(self, kind: RandomKind, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return this rank's values of the next draw of the innermost module."""
        name, current = self._names[-1], self._pass
        assert current is not None, "modules draw from here in a pass only"
        site, number = self._model.sites[name], current.counts[name]
        known = site.train if current.training else site.evaluate
        # A number of the step may have skipped the draws that follow it. The kind and the number of dimensions do not
        # depend on the mesh, so each mesh resumes at the same draw.
        last = len(known) if any(draw.dim is None for draw in known[:number]) else number + 1
        fits = (each for each in range(number, last) if known[each : each + 1] and known[each].is_like(kind, shape))
        number = next(fits, len(known))
        if number == len(known):
            raise RandomDraw(f"{kind} values {list(shape)}, expected the draws of the pass before the first step")
        current.counts[name] = number + 1
        draw = known[number]
        examples = current.examples if draw.dim is not None else range(1)
        rows = draw_rows(kind, _hash(f"{DOMAIN}:{current.key}:{name}:{number}"), examples, draw.num_values, device)
        return self._own(rows, draw, shape)

    def _own(self, rows: Tensor, draw: DrawShape, shape: tuple[int, ...]) -> Tensor:
        """Return this rank's slice of a draw in the shape of its operator.

        Args:
            rows: the values of each example, (examples, values).
            draw: the complete shape.
            shape: the shape on this rank.
        """
        dim, num = draw.dim, len(rows)
        values, own = rows.reshape(num, *draw.shape), (1, *shape)
        if dim is not None:
            # The examples get a dimension of their own, which is never split.
            values, own = values.movedim(0, dim), (*shape[:dim], num, shape[dim] // num, *shape[dim + 1 :])
        slices = [self._slice(*sizes) for sizes in zip(values.shape, own, strict=True)]
        values = values[tuple(each or slice(None) for each in slices)]
        result = values[0] if dim is None else values.flatten(dim, dim + 1)
        if tuple(result.shape) != shape:
            raise RandomDraw(
                f"values {list(shape)}, expected {list(draw.of(num))} for {num} examples, or an equal share of one "
                f"dimension for each of the {self._shard[1]} ranks of tp"
            )
        return result

    def _slice(self, size: int, own: int) -> slice | None:
        """Return this rank's share of a dimension, or None if the ranks of tp have no equal shares of this size."""
        if own == size:
            return slice(None)
        rank, num_ranks = self._shard
        num_shares = size // own if own and size % own == 0 else 0
        if not num_shares or num_ranks % num_shares:
            return None
        start = rank * num_shares // num_ranks * own
        return slice(start, start + own)


def _generator_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states

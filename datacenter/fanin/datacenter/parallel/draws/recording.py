"""Finds the draws of a model before it is spread over ranks.

A copy of the complete module runs forward on a few examples of the job, with torch's fake tensors: they have shapes
and no values. Each random operator adds its shape to the module that called it. The passes with 2 and with 3 examples
show which dimension has the examples. A module may skip a layer by one number of the step (LayerDrop): the passes
with the largest and with the smallest number find the draws of a layer that is skipped by either. A module that needs
values, such as one that branches on them, runs on the CPU with its own values instead. If it has none, its draws stay
unknown, which is an error only if it draws (``step``).
"""

import copy
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.draws.operators import LocalDraws
from fanin.datacenter.parallel.draws.sites import LOSS, DrawShape, ModelDraws, Site
from fanin.datacenter.parallel.objective import Objective
from fanin.edge.export.refusals import RandomDraw
from fanin.edge.runtimes.randomness import RandomKind
from fanin.protos.errors import UnsupportedModel

NUM_EXAMPLES: Final = (2, 3)
EXTREMES: Final = (1.0 - 2.0**-24, 2.0**-24)
"""The values of the draws of a pass: the largest uniform value, and the smallest one above 0."""
FUSED: Final = nn.functional.scaled_dot_product_attention
DRAW_BY_TORCH: Final = (
    "draw by torch: nn.Dropout, torch.rand, randn, rand_like or bernoulli, without a generator of your own"
)

Drawn = dict[str, list[tuple[RandomKind, tuple[int, ...]]]]
"""The kind and shape of each draw of a pass, by the first name of its module."""


def find_draws(module: nn.Module, objective: Objective, batch: Batch) -> ModelDraws:
    """Return the draws of a complete model and its loss. Modules, values and generators are not changed.

    Args:
        module: the model, with or without values.
        objective: its loss.
        batch: some examples of the job, at least one.

    Raises:
        UnsupportedModel: the model draws by an operator, a generator or in a shape that no mesh can repeat.
    """
    has_values = not any(value.is_meta for value in module.parameters())
    faults = []
    for fake in (True, False) if has_values else (True,):
        try:
            return _attempt(module, objective, batch, fake=fake)
        except _PassFailed as exc:
            faults.append(f"its pass {'without' if fake else 'with'} values fails ({exc})")
    return ModelDraws(fault=" and ".join(faults))


class _PassFailed(RuntimeError):
    """The code of the user raised an error. The training reports it if it happens there, too."""


def _attempt(module: nn.Module, objective: Objective, batch: Batch, *, fake: bool) -> ModelDraws:
    try:
        return _found(_Recorder(module, objective, batch, fake=fake))
    except UnsupportedModel:
        raise
    except RandomDraw as exc:
        raise UnsupportedModel(f"model: draws random numbers by {exc}; {exc.advice}", code="FN-1297") from exc
    except Exception as exc:  # the code of the module may raise anything
        raise _PassFailed(f"{type(exc).__name__}: {' '.join(str(exc).split())}") from exc


def _found(recorder: "_Recorder") -> ModelDraws:
    few = recorder.drawn(NUM_EXAMPLES[0], training=True)
    if not few:
        return ModelDraws()
    more = recorder.drawn(NUM_EXAMPLES[1], training=True)
    few_evaluated, more_evaluated = (recorder.drawn(num, training=False) for num in NUM_EXAMPLES)
    names = defaultdict[nn.Module, list[str]](list)
    for name, module in recorder.module.named_modules(remove_duplicate=False):
        names[module].append(name)
    return ModelDraws(
        sites={
            name: Site(
                names=() if name == LOSS else tuple(names[recorder.module.get_submodule(name)]),
                train=_shapes(name, few.get(name, []), more.get(name, [])),
                evaluate=_shapes(name, few_evaluated.get(name, []), more_evaluated.get(name, [])),
                attention=name in recorder.attention,
            )
            for name in sorted({*few, *few_evaluated})
        }
    )


def _shapes(
    name: str, few: Sequence[tuple[RandomKind, tuple[int, ...]]], more: Sequence[tuple[RandomKind, tuple[int, ...]]]
) -> tuple[DrawShape, ...]:
    """Return the draws of a module from those of two passes. Raises UnsupportedModel."""
    what = f"model: {name or 'its forward'} draws"
    if [(kind, len(shape)) for kind, shape in few] != [(kind, len(shape)) for kind, shape in more]:
        raise UnsupportedModel(
            f"{what} {few} for 2 examples and {more} for 3, expected the same draws for each example; {DRAW_BY_TORCH}",
            code="FN-1297",
        )
    shapes = []
    for (kind, shape), (_, larger) in zip(few, more, strict=True):
        dims = [dim for dim, (size, other) in enumerate(zip(shape, larger, strict=True)) if size != other]
        if len(dims) > 1 or any(3 * shape[dim] != 2 * larger[dim] for dim in dims):
            raise UnsupportedModel(
                f"{what} {list(shape)} {kind} values for 2 examples and {list(larger)} for 3, expected one dimension "
                "of the examples: the draws of an example must not depend on the others of its batch",
                code="FN-1297",
            )
        one = tuple(size // 2 if dim in dims else size for dim, size in enumerate(shape))
        shapes.append(DrawShape(kind=kind, shape=one, dim=dims[0] if dims else None))
    return tuple(shapes)


class _Recorder:
    """Runs a copy of a module on examples, and records its draws.

    Attributes:
        module: the copy. It shares the parameters and buffers of the module.
        attention: the modules that drop weights of an attention.
    """

    def __init__(self, module: nn.Module, objective: Objective, batch: Batch, *, fake: bool) -> None:
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self.module = copy.deepcopy(module, {id(value): value for _, value in tensors})
        self.attention = set[str]()
        self._mode: AbstractContextManager[object] = (
            FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
        )
        with self._mode:
            # A pass may change buffers, and must not change those of the job.
            self._values = {
                name: torch.empty_like(value, device="cpu") if fake else value.detach().clone()
                for name, value in tensors
            }
        self._objective = objective
        self._batch = batch
        self._scopes = [""]

    def drawn(self, num: int, *, training: bool) -> Drawn:
        """Return the draws of a pass over ``num`` examples, of which none is skipped. Raises UnsupportedModel."""
        high = self._pass(num, EXTREMES[0], training=training)
        if all(math.prod(shape) > 1 for draws in high.values() for _, shape in draws):
            return high
        low = self._pass(num, EXTREMES[1], training=training)
        return {name: max(high.get(name, []), low.get(name, []), key=len) for name in {**high, **low}}

    def _pass(self, num: int, uniform: float, *, training: bool) -> Drawn:
        drawn: Drawn = defaultdict(list)

        def values(kind: RandomKind, shape: tuple[int, ...], device: torch.device) -> Tensor:
            drawn[self._scopes[-1]].append((kind, shape))
            value = uniform if kind == "uniform" else 1.0
            # The code may branch on a scalar. A fake tensor keeps the value of one that is created in this way.
            return torch.full(shape, value, device=device) if shape else torch.tensor(value, device=device)

        self.module.train(training)
        with ExitStack() as stack:
            for context in (torch.no_grad(), torch.random.fork_rng(devices=[]), _no_other_draws(), self._followed()):
                stack.enter_context(context)
            stack.enter_context(self._mode)
            # Attention by plain operators. A fused kernel draws inside of it.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(_Attention(self._note_attention))
            stack.enter_context(LocalDraws(values))
            index = torch.arange(num) % len(self._batch.inputs)
            inputs, targets = self._batch.inputs[index], self._batch.targets[index]
            extra = {name: value[index] for name, value in self._batch.extra.items()}
            outputs = functional_call(self.module, self._values, (inputs,), extra)
            self._scopes.append(LOSS)
            self._objective.loss_sum(outputs, targets)
        return dict(drawn)

    def _note_attention(self) -> None:
        self.attention.add(self._scopes[-1])

    @contextmanager
    def _followed(self) -> Iterator[None]:
        """Keep the name of the innermost module that runs."""
        handles, self._scopes = [], [""]
        try:
            for name, module in self.module.named_modules():
                handles.append(module.register_forward_pre_hook(_calling(self._scopes.append, name)))
                handles.append(module.register_forward_hook(_calling(self._scopes.pop), always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()


def _calling(function: Callable[..., object], *arguments: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        function(*arguments)

    return hook


class _Attention(TorchFunctionMode):
    """Notes each call of an attention that drops weights."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call the function."""
        named = dict(kwargs or {})
        chance = named.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        if func is nn.functional.multi_head_attention_forward or (func is FUSED and chance):
            self._note()
        return func(*args, **named)


@contextmanager
def _no_other_draws() -> Iterator[None]:
    """Raise UnsupportedModel if Python or numpy draws in this context."""
    sources = list[str]()
    with other_draws(sources):
        yield
    if sources:
        raise UnsupportedModel(
            f"model: draws random numbers by {' and '.join(sources)} in its forward or its loss, expected none: each "
            f"rank would draw other ones; {DRAW_BY_TORCH}",
            code="FN-1297",
        )


@contextmanager
def other_draws(sources: list[str]) -> Iterator[None]:
    """Append the global generators of Python and numpy that draw in this context to ``sources``."""
    python, numpy = random.getstate(), _numpy_state()
    yield
    if random.getstate() != python:
        sources.append("Python's random")
    if _numpy_state() != numpy:
        sources.append("numpy.random")


def _numpy_state() -> str:
    state: Mapping[str, object] = np.random.get_state(legacy=False)
    return repr(state)

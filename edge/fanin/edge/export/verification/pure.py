"""The check that module and loss are a function of their batch, sample by sample, as a graph is.

Any other value that a forward uses during the trace becomes a constant of the graph: a draw of Python's ``random`` or
of numpy, a counter of calls or a clock. Torch's own draws are inputs of the graph (``module.draws``). A device pads the
last batch of its data, so a sample's output and loss must not depend on the other samples.

A graph has no state but parameters, so it would keep the value of its trace for every step. The state of Python is that
which the App's own code names: attributes of its modules and of its loss, and variables outside their functions. It
must change in each pass: a cache that the first pass fills is no hindrance.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fanin.edge.export.refusals import NOT_THE_APPS, NOWHERE, Place, Untraceable

Probe = Callable[[], object]
LIBRARIES: Final = frozenset({"torch", "torchvision", "torchaudio", "transformers", "timm", "peft"})
"""Packages whose modules may have caches and counters: none changes their results."""
OF_MODULES: Final = frozenset(vars(nn.Module()))
MAX_PARTS: Final = 64
"""Largest number of parts of a list, tuple or dict that is compared."""
MAX_DEPTH: Final = 3
NO_STATE: Final = (
    "a graph has no state but parameters: change the learning rate by [training] warmup_steps or [[schedule]] of the "
    "Run, make another value that changes an input of the module, and count for logs outside the forward and the loss"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A state of the App: its name in messages, the module that owns it, and whether it is a generator."""

    text: str
    place: Place = NOWHERE
    is_generator: bool = False


def check_state(what: str, module: nn.Module, loss: object, call: Callable[[], object]) -> None:
    """Check that a pass changes no state, and that it uses only its inputs, the parameters and torch's draws.

    Args:
        what: Prefix of the message.
        module: The module that the pass calls.
        loss: The loss that the pass calls.
        call: A pass of the module and the loss, after another one. It repeats torch's draws.

    Raises:
        Untraceable: The pass changes an attribute or a generator, or a second pass has another result. The message has
            the place of the first change or difference.
    """
    before = _by_owner(module, loss)

    def unchanged() -> object:
        output = call()
        changed = [owned for owned, states in _by_owner(module, loss).items() if before.get(owned, states) != states]
        if changed:
            raise _refusal(what, module, changed[0], (call, lambda: _by_owner(module, loss).get(changed[0])))
        return output

    check_repeats(what, module, unchanged)


def _refusal(what: str, module: nn.Module, owned: Owned, watched: tuple[Probe, Probe]) -> Untraceable:
    """Return the error for a state that a pass changes.

    Args:
        what: Prefix of the message.
        module: The module that the pass calls.
        owned: The state.
        watched: The pass, and a function that returns the state.
    """
    from fanin.edge.export.diagnosis.watched import changing_line, events_of, first_change

    call, probe = watched
    inside = first_change(events_of(module, call, probe))
    place = replace(inside if inside.kind else owned.place, line=changing_line(call, probe))
    where = "its forward or its loss" if place == NOWHERE else str(place) if place.kind else f"its loss {place}"
    if owned.is_generator:
        cause, advice = f"draws from {owned.text}, and the graph would keep the first values", DRAW_WITH_TORCH
    else:
        cause, advice = f"changes {owned.text}, and the graph would keep the first value", NO_STATE
    return Untraceable(f"{what} cannot be exported: {where} {cause} for every step", advice, place, code="FN-0779")


def _by_owner(module: nn.Module, loss: object) -> dict[Owned, list[str]]:
    """Return the states by their names in messages. Variables of two functions may have one name."""
    states: dict[Owned, list[str]] = {}
    for owned, state in _states(module, loss):
        states.setdefault(owned, []).append(state)
    return states


def _states(module: nn.Module, loss: object) -> Iterator[tuple[Owned, str]]:
    """Yield each state that the App's code names, and a text that differs if it changes."""
    yield Owned(text="Python's random", is_generator=True), repr(random.getstate())
    yield Owned(text="numpy.random", is_generator=True), _state_of_numpy(np.random)
    seen: set[int] = set()
    for name, layer in module.named_modules():
        if not _is_library(type(layer)):
            yield from _of_object(layer, Place(module=name, kind=type(layer).__name__), seen)
    parts = [*loss.modules()] if isinstance(loss, nn.Module) else [loss]
    for part in parts:
        yield from _of_object(getattr(part, "func", part), NOWHERE, seen)


def _of_object(owner: object, place: Place, seen: set[int]) -> Iterator[tuple[Owned, str]]:
    """Yield the attributes of an object and of its class, and the variables that its functions name."""
    if isinstance(owner, MethodType):
        yield from _of_object(owner.__self__, place, seen)
        return
    kind = type(owner)
    if isinstance(owner, FunctionType):
        yield from _of_function(owner, place, seen)
    elif id(owner) not in seen and not _is_library(kind) and kind.__module__ != "builtins":
        seen.add(id(owner))
        bases = [vars(base) for base in reversed(kind.__mro__) if not _is_library(base)]
        attributes = [*bases, getattr(owner, "__dict__", {})]
        for value in (value for each in attributes for value in each.values() if isinstance(value, FunctionType)):
            yield from _of_function(value, place, seen)
        # An attribute of the object hides that of its class.
        for name, value in {name: value for each in attributes for name, value in each.items()}.items():
            if name not in OF_MODULES and not name.startswith("__") and (state := _state(value)):
                yield _owned(f"its attribute {name}", place, value), state


def _of_function(function: FunctionType, place: Place, seen: set[int]) -> Iterator[tuple[Owned, str]]:
    """Yield the variables outside a function that it names, and those of the App's functions that it names."""
    if id(function) in seen or _is_library(function):
        return
    seen.add(id(function))
    code, variables = function.__code__, function.__globals__
    named = {name: variables[name] for name in code.co_names if name in variables}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            named[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    for name, value in vars(function).items():
        if state := _state(value):
            yield _owned(f"the attribute {name} of {function.__name__}", place, value), state
    for name, value in named.items():
        if isinstance(value, FunctionType):
            if not value.__code__.co_filename.startswith(NOT_THE_APPS):
                yield from _of_function(value, place, seen)
        elif state := _state(value):
            yield _owned(f"the variable {name}", place, value), state


def _owned(text: str, place: Place, value: object) -> Owned:
    is_generator = isinstance(value, random.Random | np.random.Generator | np.random.RandomState)
    return Owned(text=text, place=place, is_generator=is_generator)


def _state(value: object, depth: int = 0) -> str:
    """Return a text that differs if a value changes; "" for a value of another kind."""
    match value:
        case int() | float() | complex() | np.generic():
            return repr(value)
        case random.Random():
            return repr(value.getstate())
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case np.random.RandomState():
            return _state_of_numpy(value)
        case np.ndarray() if not value.dtype.hasobject:
            digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return f"{value.dtype} {value.shape} {digest}"
    if depth == MAX_DEPTH or not isinstance(value, tuple | list | dict) or len(value) > MAX_PARTS:
        return ""
    parts = value if isinstance(value, Mapping) else dict(enumerate(value))
    states = {str(key): _state(part, depth + 1) for key, part in parts.items()}
    return repr(states) if any(states.values()) else ""


def _state_of_numpy(generator: np.random.RandomState | ModuleType) -> str:
    name, keys, *rest = generator.get_state(legacy=True)
    return repr((name, np.asarray(keys).tobytes(), *rest))


def _is_library(owner: type | FunctionType) -> bool:
    return str(owner.__module__).partition(".")[0] in LIBRARIES


TOLERANCE: Final = 1e-3
"""Largest difference of two equal results, relative to their largest value: above other orders of additions."""
DRAW_WITH_TORCH: Final = (
    "draw with torch (nn.Dropout, torch.rand or torch.randn in training): each device then draws new numbers in each "
    "step; keep counters, clocks and files out of the forward and the loss"
)
ONE_BY_ONE: Final = (
    "compute it from that sample alone: the last batch of a device is padded, so a result over pairs of samples or "
    "over the whole batch would count samples that do not exist. Compare samples in loss=BatchLoss(function)"
)
OF_BATCH: Final = (
    "the last batch of a device is padded, so this loss would count samples that do not exist: write "
    "loss=BatchLoss(function) for a function of (output, y, mask) that leaves samples with mask 0 out "
    "(docs/howto/batch-losses.md), or compute the loss of a sample from that sample alone"
)


def check_repeats(what: str, module: nn.Module, call: Callable[[], object]) -> None:
    """Check that a second pass has the same result.

    Args:
        what: Prefix of the message.
        module: The module that the pass calls.
        call: A pass of the module and the loss. It repeats torch's draws.

    Raises:
        Untraceable: The second pass has another result. The message has the place of the first call whose results
            differ.
    """
    if are_close(call(), call()):
        return
    from fanin.edge.export.diagnosis.watched import events_of, first_difference

    place = first_difference(events_of(module, call), events_of(module, call), _are_close)
    where = "its forward or its loss" if place == NOWHERE else str(place) if place.kind else f"its loss {place}"
    raise Untraceable(
        f"{what} cannot be exported: {where} returns two results for one batch, and the graph would keep the first "
        "values for every step",
        DRAW_WITH_TORCH,
        place,
        code="FN-0779",
    )


def check_samples(
    what: str, module: nn.Module, call: Callable[[slice], object], num: int, advice: str = ONE_BY_ONE
) -> None:
    """Check that a sample's result does not depend on the other samples.

    Args:
        what: The name of the result, as the prefix of the message.
        module: The module that the call runs.
        call: Returns tensors (n, ...) for some rows of a batch, from these rows alone.
        num: Samples of the batch.
        advice: The remedy.

    Raises:
        Untraceable: The first half of the batch alone has other results. The message has the place of the first call
            whose results differ.
    """
    half, total = slice((num + 1) // 2), slice(num)

    def close_rows(of_all: list[object], of_half: list[object]) -> bool:
        if len(of_all) != len(of_half):
            return False
        return _are_close([_first_rows(*pair, (num, half.stop)) for pair in zip(of_all, of_half, strict=True)], of_half)

    if not close_rows(_leaves(call(total)), _leaves(call(half))):
        from fanin.edge.export.diagnosis.watched import events_of, first_difference

        of_all, of_half = (events_of(module, partial(call, rows)) for rows in (total, half))
        place = first_difference(of_all, of_half, close_rows)
        where = "" if place == NOWHERE else f", first in {place}" if place.kind else f", first {place}"
        raise Untraceable(f"{what} depends on the other samples of its batch{where}", advice, place, code="FN-0780")


def _first_rows(of_all: object, of_half: object, nums: tuple[int, int]) -> object:
    """Return the values of a tensor for the first samples, if one dimension has all samples, or several for each.

    Args:
        of_all: The tensor of all samples.
        of_half: That of the first samples alone.
        nums: The number of all samples, and of the first ones.
    """
    if not isinstance(of_all, Tensor) or not isinstance(of_half, Tensor) or of_all.dim() != of_half.dim():
        return of_all
    pairs = zip(of_all.shape, of_half.shape, strict=True)
    dims = [dim for dim, (size, half) in enumerate(pairs) if size != half]
    if len(dims) != 1 or of_all.shape[dims[0]] * nums[1] != of_half.shape[dims[0]] * nums[0]:
        return of_all
    return of_all.narrow(dims[0], 0, of_half.shape[dims[0]])


def _leaves(output: object) -> list[object]:
    """Return the parts of a result. Tensors are copied, because another pass may write to them."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(output)]


def are_close(one: object, two: object) -> bool:
    """Return whether two results have close values."""
    return _are_close(_leaves(one), _leaves(two))


def _are_close(one: list[object], two: list[object]) -> bool:
    return len(one) == len(two) and all(map(_is_close, one, two))


def _is_close(one: object, two: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return True
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, two)
    limit = TOLERANCE * float(torch.nan_to_num(one).abs().max())
    return torch.allclose(one, two, rtol=0.0, atol=limit, equal_nan=True)

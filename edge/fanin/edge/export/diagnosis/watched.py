"""The events of one pass, with the module and the App's line of each, to find the place of an error.

An event is a call of a torch function, or the begin or end of a module's forward. A pass is only watched after a check
has failed: an event has copies of its tensors.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from fanin.edge.export.refusals import NOT_THE_APPS, NOWHERE, Place, running_line

if TYPE_CHECKING:
    from _typeshed import TraceFunction

Probe = Callable[[], object]
"""Returns some state that the pass may change."""


KINDS: Final = {"NaN": torch.isnan, "infinity": torch.isinf}
"""Values that are not finite. NaN often follows from an earlier infinity, so the first place of each is reported."""

KEEP_FINITE: Final = (
    "keep the arguments of divisions, logarithms and roots away from 0 (x.clamp(min=1e-6)), and those of exponentials "
    "below 88"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a pass.

    Attributes:
        place: The module that runs, and the line of a call or of its begin. ``NOWHERE`` outside the module.
        layer: That module.
        function: The torch function; None for the begin or end of a forward.
        form: The structure of its arguments.
        received: Its arguments.
        returned: Its results.
        inputs: The arguments by position with which a forward begins; None for another event.
        before: The value of the probe before the call.
        after: The value of the probe after the call.
    """

    place: Place
    layer: nn.Module | None
    before: object
    after: object
    function: Callable[..., object] | None = None
    form: TreeSpec | None = None
    received: list[object] = field(default_factory=list)
    returned: list[object] = field(default_factory=list)
    inputs: tuple[object, ...] | None = None


class _Watch(TorchFunctionMode):
    """Keeps the events of a pass."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.running: list[tuple[Place, nn.Module | None]] = [(NOWHERE, None)]
        self._probe = probe

    def mark(self, inputs: tuple[object, ...] | None = None) -> None:
        """Keep the begin of a forward, which has inputs, or the end of one or of the pass."""
        state, (place, layer) = self._probe(), self.running[-1]
        if inputs is not None:
            place = replace(place, line=running_line())
            with torch._C.DisableTorchFunction():  # a copy is no event
                inputs = tuple(leaves_of(list(inputs)))
        self.events.append(Event(place=place, layer=layer, before=state, after=state, inputs=inputs))

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a torch function, and keep the event."""
        before, (place, layer) = self._probe(), self.running[-1]
        received, form = tree_flatten((tuple(args), dict(kwargs or {})))
        # Copied before the call: a function that works in place changes them.
        received = leaves_of(received)
        output = func(*args, **(kwargs or {}))
        self.events.append(
            Event(
                place=replace(place, line=running_line()),
                layer=layer,
                function=func,
                form=form,
                received=received,
                returned=leaves_of(output),
                before=before,
                after=self._probe(),
            )
        )
        return output


def events_of(module: nn.Module, call: Callable[[], object], probe: Probe = lambda: None) -> list[Event]:
    """Return the events of a call.

    Args:
        module: The module that the call runs.
        call: A call that raises nothing.
        probe: The state to compare before and after each event.
    """
    watch = _Watch(probe)
    with _hooked(module, watch):
        watch.mark()
        with watch:
            call()
        watch.mark()
    return watch.events


def first_difference(
    events: Sequence[Event], others: Sequence[Event], are_close: Callable[[list[object], list[object]], bool]
) -> Place:
    """Return the place of the first event of a pass that another pass has not; ``NOWHERE`` if there is none.

    An event that makes a difference, from equal arguments, is preferred to one that moves values: another layout, such
    as time before samples, may only look like a difference.
    """
    differences: list[Place] = []
    for event, other in zip(events, others, strict=False):
        is_same = event.function == other.function and are_close(event.received, other.received)
        if is_same and are_close(event.returned, other.returned):
            continue
        if is_same and not _moves(other):
            return event.place
        differences.append(event.place)
    return differences[0] if differences else NOWHERE


def _moves(event: Event) -> bool:
    """Return whether a call returns the values of an argument in another layout."""
    received, returned = (
        [leaf.flatten().sort().values for leaf in leaves if isinstance(leaf, Tensor)]
        for leaves in (event.received, event.returned)
    )
    return any(torch.equal(before, after) for before in received for after in returned)


def first_change(events: Sequence[Event]) -> Place:
    """Return the module in which the value of the probe first changes; ``NOWHERE`` if it changes in none."""
    for event, following in pairwise(events):
        if event.before != event.after:
            return replace(event.place, line="")
        if event.after != following.before:
            return replace(following.place, line="")
    return NOWHERE


def changing_line(call: Callable[[], object], probe: Probe) -> str:
    """Return ``file:line`` of the App's code during which the value of the probe first changes; "" if unknown.

    Args:
        call: A call that raises nothing.
        probe: The state to compare before each line of the App's functions.
    """
    state, running = probe(), [""]
    changed: list[str] = []

    def compare() -> None:
        if not changed and probe() != state:
            changed.append(running[-1])

    def step(frame: FrameType, event: str, _: object) -> "TraceFunction":
        compare()
        if event == "return":
            running.pop()
        elif event == "line":
            running[-1] = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return step

    def begin(frame: FrameType, event: str, _: object) -> "TraceFunction | None":
        if frame.f_code.co_filename.startswith(NOT_THE_APPS):
            return None
        compare()
        running.append("")
        return step

    previous = sys.gettrace()
    sys.settrace(begin)
    try:
        call()
    finally:
        sys.settrace(previous)
    return changed[0] if changed else ""


def place_of_change(module: nn.Module, name: str, call: Callable[[], object]) -> Place:
    """Return the place in a pass that changes a parameter or a buffer, or else the module that owns it."""

    def version() -> object:
        tensor = {**dict(module.named_parameters()), **dict(module.named_buffers())}.get(name)
        return id(tensor), None if tensor is None else tensor._version

    owner = name.rpartition(".")[0]
    place = first_change(events_of(module, call, version))
    if not place.kind:
        return Place(module=owner, kind=type(module.get_submodule(owner)).__name__)
    return replace(place, line=changing_line(call, version))


def first_not_finite(module: nn.Module, call: Callable[[], object]) -> str:
    """Return which module returns NaN first in a call, and which infinity, with the App's lines; "" if none does.

    Args:
        module: The module that the call runs.
        call: A call that raises nothing.
    """
    places: dict[str, str] = {}
    with torch.no_grad():
        events = events_of(module, call)
    for event in events:
        floats = [value for value in event.returned if isinstance(value, Tensor) and value.is_floating_point()]
        for kind, is_of in KINDS.items():
            if kind not in places and any(bool(is_of(value).any()) for value in floats):
                place = event.place if event.place.kind else Place(kind=type(module).__name__, line=event.place.line)
                places[kind] = f"{place} returns {kind}"
    return ", then ".join(places.values())


def leaves_of(output: object) -> list[object]:
    """Return the parts of a value. Tensors are copied, except for parameters, which no forward may change."""
    return [
        leaf.detach().clone() if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) else leaf
        for leaf in tree_leaves(output)
    ]


@contextmanager
def _hooked(module: nn.Module, watch: _Watch) -> Iterator[None]:
    """Within the context, the forward of each module begins and ends an event."""
    hooks = []
    for name, layer in module.named_modules():

        def enter(layer: nn.Module, inputs: tuple[object, ...], name: str = name) -> None:
            watch.mark()
            place = Place(module=name, kind=type(layer).__name__.removeprefix("QuantAware"))
            watch.running.append((place, layer))
            watch.mark(inputs)

        def leave(layer: nn.Module, inputs: object, output: object) -> None:
            watch.mark()
            watch.running.pop()

        hooks += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

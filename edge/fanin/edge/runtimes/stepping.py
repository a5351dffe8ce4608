"""The train step over any engine: state goes from one buffer to the next and back, and nothing is copied on the way.

A step reads its state from one slab and writes the next one into another; the two take turns, so a graph is bound to
each pair once and never to one buffer as input and output. A state that is handed out lies in a slab: as long as
anybody holds it that slab is not written to, and a step that finds none free makes a new one. So states are values, as
they look, and a training loop that keeps only the last of them works in two slabs for ever.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from fanin.edge.bundles.manifest import Manifest
from fanin.edge.runtimes.base import Batch, StepSettings, TrainState
from fanin.edge.runtimes.graphs import (
    BATCH_PORTS,
    PROXIMAL_WEIGHT,
    SCALAR_PORTS,
    STEP,
    Array,
    BatchPorts,
    BindGraph,
    Feed,
    Layout,
    RunGraph,
    next_port,
    optimizer_table,
    signature_of,
    state_port,
)
from fanin.edge.tensors import Float32s

KINDS: Final = ("anchor", "control")
MAX_SLABS: Final = 4
"""Slabs that a step remembers; more are held by a caller that keeps states, and end with them."""


class _Slab:
    """One state's memory: parameters and optimizer state, as vectors and as a graph's ports."""

    def __init__(self, parameters: Layout, states: Layout) -> None:
        num = parameters.num_values
        self._memory = np.zeros(num + states.num_values, np.float32)
        self.ports = parameters.views(self._memory[:num]) | states.views(self._memory[num:])
        self._writable = (self._memory[:num], self._memory[num:])
        self.parameters, self.optimizer = self._memory[:num], self._memory[num:]
        self.parameters.flags.writeable = self.optimizer.flags.writeable = False
        self._free_counts = self._counts()

    def _counts(self) -> tuple[int, ...]:
        # A view of a view holds the memory itself: all three tell whether somebody looks.
        return tuple(sys.getrefcount(array) for array in (self._memory, self.parameters, self.optimizer))

    @property
    def is_free(self) -> bool:
        """Whether nobody else holds it, or a piece of it."""
        return self._counts() == self._free_counts

    def fill(self, state: TrainState) -> None:
        """Copy a state in."""
        for mine, theirs in zip(self._writable, (state.parameters, state.optimizer), strict=True):
            np.copyto(mine, theirs)

    def holds(self, state: TrainState) -> bool:
        """Whether the state was handed out from here."""
        return state.parameters is self.parameters and state.optimizer is self.optimizer


class GraphTrainStep:
    """A ``TrainStep`` over a graph."""

    def __init__(self, manifest: Manifest, bind: BindGraph) -> None:
        names = [spec.name for spec in manifest.table.specs]
        states = optimizer_table(manifest)
        state_names = [spec.name for spec in states.specs]
        required = [*names, *state_names, *BATCH_PORTS, "learning_rate"]
        optional = [STEP, PROXIMAL_WEIGHT, *(state_port(kind, name) for kind in KINDS for name in names)]
        outputs = [*(next_port(name) for name in (*names, *state_names)), "loss"]
        found = signature_of(manifest, "train", (required, optional), outputs)
        self._parameters = Layout(manifest.table, names)
        self._states = Layout(states, state_names)
        self._batch = BatchPorts(manifest, found)
        self._bind = bind
        given = {port.name: port for port in found.inputs}
        self._fixed = {name: np.zeros(given[name].shape, given[name].dtype) for name in BATCH_PORTS}
        self._scalars: dict[str, Float32s] = {name: np.zeros((), np.float32) for name in SCALAR_PORTS if name in given}
        self._extras: dict[str, Float32s] = {}
        self._feed: dict[str, Array] = {**self._fixed, **self._scalars}
        for kind in KINDS:
            ports = [state_port(kind, name) for name in names]
            if any(port in given for port in ports):
                self._extras[kind] = np.zeros(manifest.table.num_values, np.float32)
                layout = Layout(manifest.table, [port if port in given else "" for port in ports])
                self._feed |= layout.views(self._extras[kind])
        self._loss = np.zeros((), np.float32)
        self._slabs: list[_Slab] = []
        self._bound: dict[tuple[int, int], Callable[[], None]] = {}

    def begin(self, parameters: Float32s) -> TrainState:
        """No step taken, all of the optimizer's state zero."""
        return TrainState(parameters=parameters, optimizer=np.zeros(self._states.num_values, np.float32))

    def __call__(self, state: TrainState, batch: Batch, settings: StepSettings) -> tuple[TrainState, float]:
        self._parameters.check("parameters", state.parameters)
        self._states.check("optimizer state", state.optimizer)
        for name, array in self._batch.feed(batch).items():
            np.copyto(self._fixed[name], array)
        self._set(state, settings)
        source = next((slab for slab in self._slabs if slab.holds(state)), None)
        if source is None:
            source = self._free_slab(None)
            source.fill(state)
        target = self._free_slab(source)
        self._runner(source, target)()
        following = TrainState(parameters=target.parameters, optimizer=target.optimizer, num_steps=state.num_steps + 1)
        return following, float(self._loss)

    def _set(self, state: TrainState, settings: StepSettings) -> None:
        values = {
            "learning_rate": settings.learning_rate,
            STEP: state.num_steps + 1,
            PROXIMAL_WEIGHT: settings.proximal_weight,
        }
        for name, scalar in self._scalars.items():
            scalar[()] = values[name]
        for kind, mine in self._extras.items():
            given = settings.anchor if kind == "anchor" else settings.control
            if given is None:
                # What was not given pulls nowhere.
                given = state.parameters if kind == "anchor" else np.zeros_like(mine)
            self._parameters.check(kind, given)
            np.copyto(mine, given)

    def _free_slab(self, other: _Slab | None) -> _Slab:
        """A slab that nobody holds and that is not ``other``."""
        for slab in self._slabs:
            if slab is not other and slab.is_free:
                return slab
        made = _Slab(self._parameters, self._states)
        if len(self._slabs) >= MAX_SLABS:
            # Those that callers hold on to are theirs now; what was bound to them goes.
            self._slabs = [] if other is None else [other]
            self._bound.clear()
        self._slabs.append(made)
        return made

    def _runner(self, source: _Slab, target: _Slab) -> Callable[[], None]:
        key = (id(source), id(target))
        if key not in self._bound:
            outputs = {next_port(name): array for name, array in target.ports.items()} | {"loss": self._loss}
            self._bound[key] = self._bind(source.ports | self._feed, outputs)
        return self._bound[key]


def bind_by_copy(run: RunGraph) -> BindGraph:
    """Binding for an engine that has none of its own: its outputs are copied to where they belong."""

    def bind(inputs: Feed, outputs: Feed) -> Callable[[], None]:
        names: Sequence[str] = list(outputs)

        def call() -> None:
            for name, found in zip(names, run(names, inputs), strict=True):
                np.copyto(outputs[name], found)

        return call

    return bind

"""The train step over any engine, without copies of the state between steps.

A step reads its state from one buffer, called a slab, and writes the next state into another one. A training loop that
keeps only the latest state alternates between two slabs. The graph is bound once to each pair of slabs, and never to
one slab as both input and output.

A ``TrainState`` is a view of a slab. A step never writes to a slab while a caller holds a state in it; it uses a free
slab or allocates a new one. So callers can treat states as values.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from fanin.edge.bundles.manifest import Manifest
from fanin.edge.runtimes.base import PERSONAL, SHARED, PaddedBatch, StepSettings, TrainState
from fanin.edge.runtimes.engine import BindGraph, Feed, RunGraph
from fanin.edge.runtimes.graphs import (
    CONTROL,
    PROXIMAL_WEIGHT,
    SCALAR_PORTS,
    SETTING_PREFIX,
    STEP,
    BatchPorts,
    FlatPorts,
    batch_ports,
    checked_settings,
    next_port,
    optimizer_table,
    parameter_port,
    setting_values,
    signature_of,
    state_port,
)
from fanin.edge.runtimes.randomness import draw, random_ports
from fanin.edge.tensors import Array, Float32s
from fanin.protos.errors import InvalidBundle

KINDS: Final = ("anchor", CONTROL)
MAX_SLABS: Final = 4
"""Slabs that a step remembers. Beyond that number it forgets the slabs whose states the caller keeps; they are freed
together with these states."""


class _Slab:
    """Memory of one state: parameters and optimizer state, as flat vectors and as tensors by port."""

    def __init__(self, parameters: FlatPorts, states: FlatPorts) -> None:
        num = parameters.num_values
        self._memory = np.zeros(num + states.num_values, np.float32)
        self.ports = parameters.views(self._memory[:num]) | states.views(self._memory[num:])
        self._writable = (self._memory[:num], self._memory[num:])
        self.parameters, self.optimizer = self._memory[:num], self._memory[num:]
        self.parameters.flags.writeable = self.optimizer.flags.writeable = False
        self._free_counts = self._counts()

    def _counts(self) -> tuple[int, ...]:
        # A view of a view references the base array, so all three counts are needed to detect a reader.
        return tuple(sys.getrefcount(array) for array in (self._memory, self.parameters, self.optimizer))

    @property
    def is_free(self) -> bool:
        """Whether no caller holds this slab or a view of it."""
        return self._counts() == self._free_counts

    def fill(self, state: TrainState) -> None:
        """Copy a state into this slab."""
        for target, source in zip(self._writable, (state.parameters, state.optimizer), strict=True):
            np.copyto(target, source)

    def holds(self, state: TrainState) -> bool:
        """Whether the state is a view of this slab."""
        return state.parameters is self.parameters and state.optimizer is self.optimizer


class GraphTrainStep:
    """A ``TrainStep`` over a graph."""

    def __init__(self, manifest: Manifest, bind: BindGraph) -> None:
        parameters = [spec.name for spec in manifest.model_table.specs]
        names = [parameter_port(name) for name in parameters]
        local = () if manifest.local is None else manifest.local.table.specs
        # The ports that a step of a group leaves as they are.
        self._fixed_by_group = {
            "": (),
            SHARED: tuple(parameter_port(spec.name) for spec in local),
            PERSONAL: tuple(parameter_port(spec.name) for spec in manifest.table.specs),
        }
        states = optimizer_table(manifest)
        state_names = [spec.name for spec in states.specs]
        required = [*names, *state_names, *batch_ports(manifest), "learning_rate"]
        optional = [STEP, PROXIMAL_WEIGHT, *(state_port(kind, name) for kind in KINDS for name in parameters)]
        self._random_ports = random_ports(manifest.signatures["train"].inputs)
        optional += [port.name for port in self._random_ports]
        self._manifest = manifest
        # One mapping serves all steps of a training, so its values are computed once.
        self._changes: Mapping[str, float] = {}
        self._settings = setting_values(checked_settings(manifest, self._changes))
        optional += self._settings
        outputs = [*(next_port(name) for name in (*names, *state_names)), "loss"]
        signature = signature_of(manifest, "train", (required, optional), outputs)
        self._parameters = FlatPorts(manifest.model_table, names)
        self._states = FlatPorts(states, state_names)
        self._batch = BatchPorts(manifest, signature)
        self._bind = bind
        inputs = {port.name: port for port in signature.inputs}
        for name in manifest.optimizer:
            if not inputs.keys() & setting_values({name: 0.0}).keys():
                raise InvalidBundle(
                    f"bundle: optimizer: got the setting {name!r}, expected an input {SETTING_PREFIX + name!r} of the "
                    "train graph",
                    code="FN-0417",
                )
        self._fixed = {name: np.zeros(inputs[name].shape, inputs[name].dtype) for name in batch_ports(manifest)}
        scalars = (*SCALAR_PORTS, *self._settings)
        self._scalars: dict[str, Float32s] = {name: np.zeros((), np.float32) for name in scalars if name in inputs}
        self._extras: dict[str, Float32s] = {}
        self._random = {port.name: np.zeros(port.shape, np.float32) for port in self._random_ports}
        self._feed: dict[str, Array] = {**self._fixed, **self._scalars, **self._random}
        for kind in KINDS:
            ports = [state_port(kind, name) for name in parameters]
            if any(port in inputs for port in ports):
                self._extras[kind] = np.zeros(manifest.model_table.num_values, np.float32)
                flat_ports = FlatPorts(manifest.model_table, [port if port in inputs else "" for port in ports])
                self._feed |= flat_ports.views(self._extras[kind])
        self._loss = np.zeros((), np.float32)
        self._slabs: list[_Slab] = []
        self._bound: dict[tuple[int, int], Callable[[], None]] = {}

    def begin(self, parameters: Float32s) -> TrainState:
        """Return the state before the first step; the optimizer's state is zero."""
        return TrainState(parameters=parameters, optimizer=np.zeros(self._states.num_values, np.float32))

    def __call__(self, state: TrainState, batch: PaddedBatch, settings: StepSettings) -> tuple[TrainState, float]:
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
        for name in self._fixed_by_group[settings.group]:
            np.copyto(target.ports[name], source.ports[name])
        next_state = TrainState(parameters=target.parameters, optimizer=target.optimizer, num_steps=state.num_steps + 1)
        return next_state, float(self._loss)

    def _set(self, state: TrainState, settings: StepSettings) -> None:
        if settings.optimizer is not self._changes:
            self._settings = setting_values(checked_settings(self._manifest, settings.optimizer))
            self._changes = settings.optimizer
        values = self._settings | {
            "learning_rate": settings.learning_rate,
            STEP: state.num_steps + 1,
            PROXIMAL_WEIGHT: settings.proximal_weight,
        }
        for name, scalar in self._scalars.items():
            scalar[()] = values[name]
        for port in self._random_ports:
            np.copyto(self._random[port.name], draw(port, settings.random_key, state.num_steps))
        for kind, target in self._extras.items():
            values_of_kind = settings.anchor if kind == "anchor" else settings.control
            if values_of_kind is None:
                # These defaults have no effect on the step.
                values_of_kind = state.parameters if kind == "anchor" else np.zeros_like(target)
            self._parameters.check(kind, values_of_kind)
            np.copyto(target, values_of_kind)

    def _free_slab(self, other: _Slab | None) -> _Slab:
        """Return a slab that is free and is not ``other``."""
        for slab in self._slabs:
            if slab is not other and slab.is_free:
                return slab
        new = _Slab(self._parameters, self._states)
        if len(self._slabs) >= MAX_SLABS:
            # Callers keep the other slabs alive. Their bindings are dropped, because they hold the arrays.
            self._slabs = [] if other is None else [other]
            self._bound.clear()
        self._slabs.append(new)
        return new

    def _runner(self, source: _Slab, target: _Slab) -> Callable[[], None]:
        key = (id(source), id(target))
        if key not in self._bound:
            outputs = {next_port(name): array for name, array in target.ports.items()} | {"loss": self._loss}
            self._bound[key] = self._bind(source.ports | self._feed, outputs)
        return self._bound[key]


def bind_by_copy(run: RunGraph) -> BindGraph:
    """Return a ``BindGraph`` for an engine without binding: it copies each output to its array."""

    def bind(inputs: Feed, outputs: Feed) -> Callable[[], None]:
        names: Sequence[str] = list(outputs)

        def call() -> None:
            for name, array in zip(names, run(names, inputs), strict=True):
                np.copyto(outputs[name], array)

        return call

    return bind

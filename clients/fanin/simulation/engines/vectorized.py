"""The engine ``vmap``: the clients of a Round train together, one vectorized train step at a time.

Each client has the batches, counts and errors that it would have alone. Only the rounding of its train steps differs
from the exported graph's. Validation runs in the exported graphs.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.local_data import LocalData
from fanin.clients.device.training.passes import control_of
from fanin.clients.device.training.trainer import (
    difference,
    finite,
    planned_work,
    training_batches,
    training_counts,
)
from fanin.clients.device.training.work import PlannedWork, steps_to_do
from fanin.clients.device.updates import Change
from fanin.edge.metrics.metric import NO_METRICS, Metric
from fanin.edge.runtimes.base import PaddedBatch
from fanin.edge.runtimes.randomness import random_key
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import Diverged
from fanin.protos.plans.schedule import rate_of_step
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.devices.work import ALL_WORK, BoundWork
from fanin.simulation.workers import KEPT_CLIENTS, PendingTraining

if TYPE_CHECKING:
    from fanin.edge.export.vectorized.step import VectorStep


class VectorTrainings:
    """The trainings of clients in torch. Those that have begun together run together. See Trainings."""

    def __init__(
        self,
        step: "VectorStep",
        graphs: BundleGraphs,
        clients: Partition,
        validation_fraction: float,
        metrics: Mapping[str, Metric] = NO_METRICS,
    ) -> None:
        def data(client: int) -> LocalData:
            return LocalData(graphs, clients.store(client, validation_fraction), metrics)

        self._step = step
        self._work = ALL_WORK
        self._data = lru_cache(maxsize=KEPT_CLIENTS)(data)
        self._numbers = count()
        # A client that left the Round does not wait for its training. The entry ends with the client's reference.
        self._trainings: weakref.WeakValueDictionary[int, _Begun] = weakref.WeakValueDictionary()

    def limited(self, work: BoundWork) -> "VectorTrainings":
        """Set how many of its steps each client does, and return these trainings."""
        self._work = work
        return self

    def begin(self, client: int, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0) -> PendingTraining:
        """Note the training. The first one that is collected runs all that have begun on the same Version."""
        training = _Begun(client=client, model=model, assignment=assignment)
        self._trainings[next(self._numbers)] = training
        return lambda: self._collected(training)

    def _collected(self, training: "_Begun") -> Change:
        if training.outcome is None:
            first = self._prepared(training)
            others = (
                each for _, each in sorted(self._trainings.items()) if each is not training and each.runs_with(training)
            )
            group = [first, *self._all_prepared(others)]
            for start in range(0, len(group), self._step.max_clients):
                self._run(group[start : start + self._step.max_clients])
        outcome = training.outcome
        assert outcome is not None, "a training is in the group that runs with it"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _all_prepared(self, group: Iterable["_Begun"]) -> Iterator["_Prepared"]:
        """Yield the clients that can train. One that fails here fails again when its own training is collected."""
        for training in group:
            with suppress(Exception):
                yield self._prepared(training)

    def _prepared(self, training: "_Begun") -> "_Prepared":
        data = self._data(training.client)
        model, examples = training.model, data.examples(training.model.bundle)
        planned = planned_work(examples, model, training.assignment)
        num_steps = steps_to_do(self._work.of(training.client), training.assignment, planned)
        counts = data.before_training(model, examples, training.assignment, lambda: True)
        return _Prepared(
            begun=training,
            examples=examples,
            counts=counts,
            ranges=data.ranges(model, examples, training.assignment, lambda: True),
            control=control_of(model),
            batches=training_batches(examples, model, training.assignment),
            num_batches=num_steps,
            planned=planned,
            random_key=random_key(training.assignment.training.seed, examples.partition, training.assignment.round),
        )

    def _run(self, group: Sequence["_Prepared"]) -> None:
        """Train some clients, and give each its outcome."""
        from fanin.edge.export.vectorized.step import VectorSettings

        model, training = group[0].begun.model, group[0].begun.assignment.training
        state = self._step.begin(model.parameters, len(group))
        # Clients with more batches first, so the clients that still train are always the first ones.
        active = sorted(group, key=lambda each: -each.num_batches)
        while active:
            finished_clients = [each for each in active if each.num_steps == each.num_batches]
            if finished_clients:
                active = active[: len(active) - len(finished_clients)]
                end_state = state.after(len(active))
                for each, parameters in zip(finished_clients, self._step.parameters(end_state), strict=True):
                    each.finish(parameters)
                state = state.first(len(active))
                continue
            batches = [next(each.batches) for each in active]
            settings = VectorSettings(
                learning_rates=[each.rate for each in active],
                proximal_weight=training.proximal_weight,
                anchor=model.parameters,
                controls=[each.control for each in active],
                random_keys=[each.random_key for each in active],
                optimizer=training.optimizer,
            )
            state, losses = self._step(state, batches, settings)
            for each, batch, loss in zip(active, batches, losses, strict=True):
                each.note(float(loss), batch)


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class _Begun:
    """A training that has begun, and its outcome once it has run."""

    client: int
    model: OpenedModel
    assignment: m.Assignment
    outcome: Change | Exception | None = None

    def runs_with(self, other: "_Begun") -> bool:
        """Return whether both can train together: from one Version, with the same settings."""
        return (
            self.outcome is None
            and self.model.bundle.sha256 == other.model.bundle.sha256
            and self.assignment.training == other.assignment.training
            and np.array_equal(self.model.parameters, other.model.parameters)
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Prepared:
    """A client that trains."""

    begun: _Begun
    examples: MemoryStore
    counts: dict[str, int]
    ranges: m.RangeCounts
    control: Float32s | None
    batches: Iterator[PaddedBatch]
    num_batches: int
    planned: PlannedWork
    random_key: int
    num_steps: int = 0
    loss_sum: float = 0.0

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        assignment = self.begun.assignment
        return rate_of_step(assignment.training, self.num_steps, self.planned.num_steps, assignment.round)

    def note(self, loss: float, batch: PaddedBatch) -> None:
        """Count a step. A loss that is not finite is the client's outcome; its further steps change nothing."""
        self.num_steps += 1
        try:
            self.loss_sum += finite(loss, self.num_steps, self.begun.assignment.training) * float(batch.mask.sum())
        except Diverged as exc:
            self.begun.outcome = self.begun.outcome or exc

    def finish(self, parameters: Float32s) -> None:
        """Make the Change the outcome, unless the training has failed."""
        model = self.begun.model
        counts = self.counts | training_counts(self.loss_sum, self.num_steps, self.planned, self.examples, model)
        values = difference(parameters, model.parameters)
        change = Change(
            values=values,
            counts=counts,
            num_steps=self.num_steps,
            planned_steps=self.planned.num_steps,
            ranges=self.ranges,
        )
        self.begun.outcome = self.begun.outcome or change

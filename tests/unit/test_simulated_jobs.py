"""The jobs of a simulation's workers, and the garbage collector while it runs."""

import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
from support.models import bundle_of, samples

from fanin.clients.data.examples import Examples
from fanin.clients.device.contract import example_assignment
from fanin.clients.device.models import OpenedModel
from fanin.edge.bundles.bundle import Bundle
from fanin.protos import messages as m
from fanin.simulation.backends.backend import HeldValue, Placed
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.host import NUM_NEW, rare_collections
from fanin.simulation.workers import GraphJob, GraphSubject, GraphTrainings, PlacedBundle, read_assignment

T = TypeVar("T")
J = TypeVar("J")
R = TypeVar("R")


class Jobs:
    """A Backend that keeps the jobs, and runs none."""

    def __init__(self) -> None:
        self.jobs: list[GraphJob] = []

    def place(self, value: T) -> Placed[T]:
        return HeldValue(value=value)

    def submit(self, task: Callable[[J], R], job: J, due_s: float = 0.0) -> Callable[[], R]:
        assert isinstance(job, GraphJob)
        self.jobs.append(job)
        raise AssertionError("kept")

    def close(self) -> None:
        pass


def trainings_of(backend: Jobs, bundle: Bundle) -> GraphTrainings:
    x, y = samples(12, seed=4)
    clients = Partition(examples=Examples(inputs={"x": x}, y=y), indices=tuple(np.split(np.arange(12), 3)))
    placed = PlacedBundle(signed=bundle.signed, chunks={})
    return GraphTrainings(backend, GraphSubject.of(placed, clients, 0.3, {}))


def test_the_clients_of_a_round_receive_the_same_bytes_of_an_assignment() -> None:
    backend, bundle = Jobs(), bundle_of("mlp")
    trainings = trainings_of(backend, bundle)
    model = OpenedModel(bundle=bundle, parameters=bundle.initial_parameters())
    first = example_assignment(bundle)
    same = replace(first, assignment_id="0" * 32, deadline_s=7.0)
    other = replace(first, training=m.Training(epochs=3, learning_rate=0.5, seed=2))
    for client, assignment in enumerate((first, same, other)):
        with pytest.raises(AssertionError, match="kept"):
            trainings.begin(client, model, assignment)
    jobs = backend.jobs
    assert jobs[0].assignment is jobs[1].assignment
    assert read_assignment(jobs[0].assignment) == first
    assert read_assignment(jobs[2].assignment) == other


FROZEN = """
import gc
from fanin.simulation.host import rare_collections
with rare_collections():
    print(gc.get_freeze_count() > 0)
print(gc.get_freeze_count())
"""


def test_objects_are_frozen_for_the_time_of_a_simulation() -> None:
    completed = subprocess.run([sys.executable, "-c", FROZEN], capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["True", "0"]


def test_the_garbage_collector_has_its_settings_again_after_a_simulation() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), rare_collections():
        assert gc.get_threshold() == (max(before[0], NUM_NEW), *before[1:])
        raise KeyError
    assert gc.get_threshold() == before
    gc.set_threshold(0)
    try:
        with rare_collections():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_the_objects_that_a_caller_has_frozen_stay_frozen() -> None:
    # Frozen objects may end, but no others are added.
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    with rare_collections():
        assert 0 < gc.get_freeze_count() <= num_frozen
    assert 0 < gc.get_freeze_count() <= num_frozen

"""The contract of simulation backends that need no cluster. ``test_ray.py`` tests Ray by the same contract."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from support.backends import check_backend, clock_of, interrupted, is_writable, ones, process_of

from fanin.simulation.backends.backend import ThisProcess
from fanin.simulation.backends.processes import STARTED, WorkerProcesses


def test_this_process_is_a_backend() -> None:
    assert check_backend(ThisProcess()) == {os.getpid()}


@pytest.mark.heavy
def test_worker_processes_are_a_backend() -> None:
    backend = WorkerProcesses(2)
    try:
        assert os.getpid() not in check_backend(backend)
    finally:
        backend.close()


def test_the_files_of_a_placed_value_are_removed_with_it(monkeypatch: object, tmp_path: Path) -> None:
    backend = WorkerProcesses(1)
    try:
        placed = backend.place(np.ones(3))
        (folder,) = {path.parent for path in [placed.path]}  # type: ignore[attr-defined]  # a MappedValue
        assert len(list(folder.iterdir())) == 2
        assert placed.get().tolist() == [1.0, 1.0, 1.0]
        del placed
        gc.collect()
        assert list(folder.iterdir()) == []
    finally:
        backend.close()
    assert not folder.exists()


@pytest.mark.heavy
def test_a_large_result_is_writable_and_its_file_is_removed() -> None:
    backend = WorkerProcesses(1)
    try:
        folder = backend.place(0).path.parent  # type: ignore[attr-defined]  # a MappedValue
        for num_values in (3, 100_000):
            values = backend.submit(ones, num_values)()
            values += 1.0
            assert values.sum() == 2 * num_values
        forgotten = [backend.submit(ones, 100_000) for _ in range(4)]
        del forgotten
        # The worker has ended the tasks before this one. Those that had not started never start.
        assert backend.submit(ones, 3)().sum() == 3.0
        assert list(folder.iterdir()) == []
    finally:
        backend.close()


@pytest.mark.heavy
def test_the_task_that_is_due_first_runs_first() -> None:
    backend = WorkerProcesses(1)
    try:
        # The first tasks start at once, because the worker has no others.
        first = [backend.submit(clock_of, 0.2, float(number)) for number in range(STARTED)]
        later, sooner = (backend.submit(clock_of, 0.0, due_s) for due_s in (9.0, 8.0))
        # The result of a task that is due later can be collected before.
        started = [each() for each in (*first, sooner, later)]
        assert started == sorted(started)
    finally:
        backend.close()


@pytest.mark.heavy
def test_the_number_of_workers_is_the_requested_one_and_placed_values_are_read_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    backend = WorkerProcesses(2)
    try:
        workers = [each() for each in [backend.submit(process_of, number) for number in range(6)]]
        assert len({process for process, _ in workers}) == 2
        assert {threads for _, threads in workers} == {"1"}
        pending = [backend.submit(is_writable, backend.place(np.ones(3))) for _ in range(4)]
        # A value stays until the tasks that read it have ended.
        gc.collect()
        assert not any(each() for each in pending)
    finally:
        backend.close()


@pytest.mark.heavy
def test_ctrl_c_does_not_reach_a_worker() -> None:
    # A terminal sends it to all processes of a command. This process ends the simulation.
    backend = WorkerProcesses(1)
    try:
        assert backend.submit(interrupted, 7)() == 7
    finally:
        backend.close()

"""The contract of every simulation backend, and tasks for it."""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fanin.protos.errors import InvalidInput
from fanin.simulation.backends.backend import Backend, Placed


@dataclass(frozen=True)
class Job:
    """A number, and a value that is placed once for all jobs."""

    number: int
    shared: Placed[Mapping[str, object]]


def scaled(job: Job) -> tuple[np.ndarray, str, int]:
    """Return the placed array times the number, the placed text, and the process id."""
    value = job.shared.get()
    array = value["array"]
    assert isinstance(array, np.ndarray)
    return array * job.number, str(value["text"]), os.getpid()


def failing(job: Job) -> None:
    """Raise an error, as a failing task."""
    raise InvalidInput(f"job {job.number}: no such thing")


def equal_placements(job: tuple[Placed[object], Placed[object]]) -> tuple[bool, bool]:
    """Return whether two placements are equal in the task's process, and whether their hashes are equal."""
    one, other = job
    return one == other, hash(one) == hash(other)


def check_backend(backend: Backend) -> set[int]:
    """Check that a backend keeps its Protocol. Return the ids of the processes that ran the tasks."""
    array = np.arange(5000, dtype=np.float32)
    placed = backend.place({"array": array, "text": "one"})
    newer = backend.place({"array": array, "text": "two"})
    pending = [backend.submit(scaled, Job(number, placed)) for number in range(6)]
    results = [each() for each in reversed(pending)][::-1]
    for number, (values, text, _) in enumerate(results):
        np.testing.assert_array_equal(values, array * number)
        assert text == "one"
    # The newer placement does not replace the older one.
    assert backend.submit(scaled, Job(1, newer))()[1] == "two"
    assert backend.submit(equal_placements, (placed, placed))() == (True, True)
    assert not backend.submit(equal_placements, (placed, newer))()[0]
    try:
        backend.submit(failing, Job(7, placed))()
    except InvalidInput as exc:
        assert str(exc) == "job 7: no such thing"
    else:
        raise AssertionError("the error of a task is lost")
    # A failing task does not end other tasks.
    assert backend.submit(scaled, Job(1, placed))()[1] == "one"
    return {pid for _, _, pid in results}


def process_of(_: object) -> tuple[int, str | None]:
    """Wait for a while. Return the process id and the number of threads."""
    time.sleep(0.5)
    return os.getpid(), os.environ.get("OMP_NUM_THREADS")


def is_writable(placed: Placed[np.ndarray]) -> bool:
    """Return whether a task can change a placed array."""
    return placed.get().flags.writeable


def ones(num_values: int) -> np.ndarray:
    """Return an array (num_values,)."""
    return np.ones(num_values, np.float32)


def clock_of(seconds: float) -> float:
    """Wait. Return the time of the start on a clock that all processes share."""
    started_s = time.monotonic()
    time.sleep(seconds)
    return started_s


def interrupted(number: int) -> int:
    """Receive Ctrl-C. Return the number."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)
    return number

"""What every backend of a simulation does, and tasks for it."""

import os
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
    """The placed array times the number, the placed text, and the process."""
    value = job.shared.get()
    array = value["array"]
    assert isinstance(array, np.ndarray)
    return array * job.number, str(value["text"]), os.getpid()


def failing(job: Job) -> None:
    """A task that raises."""
    raise InvalidInput(f"job {job.number}: no such thing")


def equal_placements(job: tuple[Placed[object], Placed[object]]) -> tuple[bool, bool]:
    """Whether two placements are equal where the task runs, and have one hash."""
    one, other = job
    return one == other, hash(one) == hash(other)


def check_backend(backend: Backend) -> set[int]:
    """Hold a backend to its Protocol; the processes that ran the tasks."""
    array = np.arange(5000, dtype=np.float32)
    placed = backend.place({"array": array, "text": "one"})
    again = backend.place({"array": array, "text": "two"})
    pending = [backend.submit(scaled, Job(number, placed)) for number in range(6)]
    results = [each() for each in reversed(pending)][::-1]
    for number, (values, text, _) in enumerate(results):
        np.testing.assert_array_equal(values, array * number)
        assert text == "one"
    # The newer placement does not take the place of the older one.
    assert backend.submit(scaled, Job(1, again))()[1] == "two"
    assert backend.submit(equal_placements, (placed, placed))() == (True, True)
    assert not backend.submit(equal_placements, (placed, again))()[0]
    try:
        backend.submit(failing, Job(7, placed))()
    except InvalidInput as exc:
        assert str(exc) == "job 7: no such thing"
    else:
        raise AssertionError("the error of a task is lost")
    # A task that fails ends no other one.
    assert backend.submit(scaled, Job(1, placed))()[1] == "one"
    return {pid for _, _, pid in results}


def process_of(_: object) -> tuple[int, str | None]:
    """The process of a task that takes a while, and its number of threads."""
    time.sleep(0.5)
    return os.getpid(), os.environ.get("OMP_NUM_THREADS")


def is_writable(placed: Placed[np.ndarray]) -> bool:
    """Whether a task could change a placed array."""
    return placed.get().flags.writeable

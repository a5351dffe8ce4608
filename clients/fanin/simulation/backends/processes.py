"""Worker processes of loky: the clients of a Round train side by side on this machine.

loky starts processes without running the caller's script again, and notices those that die. A placed value is a pair
of files. The large buffers of its arrays are mapped into memory, so all workers share them::

    NUMBER.pickle     the value without its buffers, and where each buffer begins
    NUMBER.buffers    the buffers, each at a multiple of 64 bytes

A result travels through a pipe, which holds 64 KiB. A worker with a larger one would wait until this process reads it,
and this process plays the coordinator meanwhile. So the buffers of a large result are a file, too.

Reference:
    loky, https://loky.readthedocs.io. Buffers outside of the pickle: PEP 574.
"""

import heapq
import itertools
import os
import pickle
import signal
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import numpy as np

from fanin.protos.errors import RuntimeMissing
from fanin.simulation.backends.backend import Placed

T = TypeVar("T")
J = TypeVar("J")
R = TypeVar("R")
ALIGNED: Final = 64
"""Bytes of a cache line, and the alignment of the widest vector instructions."""
STARTED: Final = 3
"""Tasks for each worker that have started: one that runs, and others that it finds without waiting for this process."""
PIPED_BYTES: Final = 16 << 10
"""Bytes of the arrays of a result that travels through the pipe as a whole."""


@dataclass(frozen=True, kw_only=True)
class MappedValue(Generic[T]):
    """A value in files. See Placed."""

    path: Path

    def get(self) -> T:
        """Read the value; its arrays stay in the file. See Placed."""
        content, bounds = pickle.loads(self.path.with_suffix(".pickle").read_bytes())
        buffers = self.path.with_suffix(".buffers")
        mapped = np.memmap(buffers, np.uint8, "r") if bounds else np.empty(0, np.uint8)
        value: T = pickle.loads(content, buffers=[mapped[start:end] for start, end in bounds])
        return value


class WorkerProcesses:
    """Worker processes on this machine. See Backend.

    Args:
        num_processes: Number of processes.

    Raises:
        RuntimeMissing: loky is not installed.
    """

    def __init__(self, num_processes: int) -> None:
        try:
            from loky import ProcessPoolExecutor
        except ModuleNotFoundError as exc:
            raise RuntimeMissing(
                f"simulate: got processes={num_processes}, but loky is not installed here; "
                "pip install 'fanin[simulation]'",
                code="FN-1104",
            ) from exc
        self._folder = tempfile.TemporaryDirectory(prefix="fanin-workers-")
        self._numbers = itertools.count()
        # Processes that each use all cores would wait for each other.
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        # A worker never ends on its own: a worker that is idle for long waits for another Round.
        self._executor: ProcessPoolExecutor = ProcessPoolExecutor(
            num_processes, timeout=None, initializer=_ignore_ctrl_c, env=threads
        )
        self._num_started = STARTED * num_processes
        self._started: list[Future[_Result]] = []
        self._waiting: list[tuple[float, int, _Pending]] = []

    def place(self, value: T) -> Placed[T]:
        """Write the value to files. See Backend."""
        # loky needs it, too. It also pickles the definitions of a script or a notebook.
        import cloudpickle

        path = self._next_path()
        buffers: list[pickle.PickleBuffer] = []
        content = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        bounds = _write(path.with_suffix(".buffers"), buffers)
        path.with_suffix(".pickle").write_bytes(pickle.dumps((content, bounds)))
        placed: MappedValue[T] = MappedValue(path=path)
        # Jobs refer to it until they are done, and a worker that has opened the files does not need their names.
        weakref.finalize(placed, _remove, path)
        return placed

    def submit(self, task: Callable[[J], R], job: J, due_s: float = 0.0) -> Callable[[], R]:
        """Start a task in a worker. See Backend."""
        path = self._next_path().with_suffix(".result")

        def start() -> Future[_Result]:
            future: Future[_Result] = self._executor.submit(_Sending(task=task, path=path), job)
            return future

        pending = _Pending(start=start)
        heapq.heappush(self._waiting, (due_s, next(self._numbers), pending))
        self._start_tasks()

        def result() -> R:
            self._start_tasks()
            outcome = pending.started().result()
            value: R = pickle.loads(outcome.content, buffers=outcome.memory(path))
            return value

        weakref.finalize(result, _discard, pending, path)
        return result

    def close(self) -> None:
        """End the processes, and remove the files. See Backend."""
        self._executor.shutdown(kill_workers=True)
        self._folder.cleanup()

    def _start_tasks(self) -> None:
        """Start the tasks that are needed first: few, because a task that comes later may be needed sooner."""
        self._started = [future for future in self._started if not future.done()]
        while self._waiting and len(self._started) < self._num_started:
            _, _, pending = heapq.heappop(self._waiting)
            if pending.is_wanted and pending.future is None:
                self._started.append(pending.started())

    def _next_path(self) -> Path:
        return Path(self._folder.name) / str(next(self._numbers))


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A task that starts when a worker is free, or when its result is needed. It keeps the placed values of its job.

    Attributes:
        start: Starts the task.
        future: Its result, once it has started.
        is_wanted: Whether the caller still has the function that returns the result.
    """

    start: Callable[[], "Future[_Result]"]
    future: "Future[_Result] | None" = None
    is_wanted: bool = True

    def started(self) -> "Future[_Result]":
        """Start the task unless it has started."""
        if self.future is None:
            self.future = self.start()
        return self.future


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """The result of a task: its pickle, and its buffers, or their bounds in a file."""

    content: bytes
    buffers: Sequence[bytearray | tuple[int, int]]

    def memory(self, path: Path) -> list[bytearray | memoryview]:
        """Return the buffers, writable. Their file is removed."""
        ends = [each[1] for each in self.buffers if isinstance(each, tuple)]
        memory = memoryview(bytearray(max(ends, default=0)))
        if ends:
            # A buffered file: a single call of the operating system reads at most 2 GiB.
            with path.open("rb") as file:
                file.readinto(memory)
            path.unlink()
        return [memory[slice(*each)] if isinstance(each, tuple) else each for each in self.buffers]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sending(Generic[J, R]):
    """A task that writes the buffers of a large result to a file."""

    task: Callable[[J], R]
    path: Path

    def __call__(self, job: J) -> _Result:
        import cloudpickle

        buffers: list[pickle.PickleBuffer] = []
        content = cloudpickle.dumps(self.task(job), protocol=5, buffer_callback=buffers.append)
        if sum(buffer.raw().nbytes for buffer in buffers) > PIPED_BYTES:
            return _Result(content=content, buffers=_write(self.path, buffers))
        return _Result(content=content, buffers=[bytearray(buffer.raw()) for buffer in buffers])


def _ignore_ctrl_c() -> None:
    """Ignore SIGINT in a worker. A terminal sends Ctrl-C to all processes of a command, and the first one handles it.

    A worker would return KeyboardInterrupt as the result of its task, and it would end the event loop at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _write(path: Path, buffers: Sequence[pickle.PickleBuffer]) -> list[tuple[int, int]]:
    """Write buffers to a file. Return where each begins and ends."""
    bounds = []
    with path.open("wb") as file:
        for buffer in buffers:
            file.write(b"\0" * (-file.tell() % ALIGNED))
            start = file.tell()
            file.write(buffer.raw())
            bounds.append((start, file.tell()))
    return bounds


def _remove(path: Path) -> None:
    for suffix in (".pickle", ".buffers"):
        path.with_suffix(suffix).unlink(missing_ok=True)


def _discard(pending: _Pending, path: Path) -> None:
    """Remove the result of a task, also if the task ends later. A task that has not started never starts."""
    pending.is_wanted = False
    if pending.future is not None:
        pending.future.add_done_callback(lambda _: path.unlink(missing_ok=True))

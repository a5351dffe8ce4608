"""Worker processes of loky: the clients of a Round train side by side on this machine.

loky starts processes without running the caller's script again, and notices those that die. A placed value is a pair
of files. The large buffers of its arrays are mapped into memory, so all workers share them::

    NUMBER.pickle     the value without its buffers, and where each buffer begins
    NUMBER.buffers    the buffers, each at a multiple of 64 bytes

Reference:
    loky, https://loky.readthedocs.io. Buffers outside of the pickle: PEP 574.
"""

import itertools
import os
import pickle
import tempfile
import weakref
from collections.abc import Callable
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
                "pip install 'fanin[simulation]'"
            ) from exc
        self._folder = tempfile.TemporaryDirectory(prefix="fanin-workers-")
        self._numbers = itertools.count()
        # Processes that each use all cores would wait for each other.
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        # A worker never ends on its own: a worker that is idle for long waits for another Round.
        self._executor: ProcessPoolExecutor = ProcessPoolExecutor(num_processes, timeout=None, env=threads)

    def place(self, value: T) -> Placed[T]:
        """Write the value to files. See Backend."""
        # loky needs it, too. It also pickles the definitions of a script or a notebook.
        import cloudpickle

        path = Path(self._folder.name) / str(next(self._numbers))
        buffers: list[pickle.PickleBuffer] = []
        content = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        bounds = []
        with path.with_suffix(".buffers").open("wb") as file:
            for buffer in buffers:
                file.write(b"\0" * (-file.tell() % ALIGNED))
                start = file.tell()
                file.write(buffer.raw())
                bounds.append((start, file.tell()))
        path.with_suffix(".pickle").write_bytes(pickle.dumps((content, bounds)))
        placed: MappedValue[T] = MappedValue(path=path)
        # Jobs refer to it until they are done, and a worker that has opened the files does not need their names.
        weakref.finalize(placed, _remove, path)
        return placed

    def submit(self, task: Callable[[J], R], job: J) -> Callable[[], R]:
        """Start a task in a worker. See Backend."""
        future: Future[R] = self._executor.submit(task, job)

        def result() -> R:
            assert job is not None, "a job keeps its placed values until its result is here"
            return future.result()

        return result

    def close(self) -> None:
        """End the processes, and remove the files. See Backend."""
        self._executor.shutdown(kill_workers=True)
        self._folder.cleanup()


def _remove(path: Path) -> None:
    for suffix in (".pickle", ".buffers"):
        path.with_suffix(suffix).unlink(missing_ok=True)

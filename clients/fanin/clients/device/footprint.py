"""The memory of a device's process: the release of pages that only the start needed. Linux only.

To start, to connect and to open graphs, libraries load more pages of their files than they need afterwards: symbol
tables, constructors, registries, a TLS handshake. The system drops such pages when memory runs short. A phone ends
large processes instead. ``give_back`` drops the pages at once. If a page is needed again, a page fault of about a
microsecond loads several pages from the page cache. A device that calls it before and after training uses a quarter
less memory.

Use it only in a process that runs a device and nothing else (``fanin join``). Inside an app, the app decides.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.statistics import answers_queries
from fanin.clients.device.training.tuner import own_ranges
from fanin.clients.device.updates import Change, Trainer, progress_of, row_sizes
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.tensors import Float32s
from fanin.protos.messages import Assignment, TrainingProgress

SMAPS: Final = Path("/proc/self/smaps")
"""proc(5): a line ``start-end permissions offset device inode path`` for each mapping, then ``Key: number kB``."""
NUM_FIELDS: Final = 6
MADV_DONTNEED: Final = 4
"""madvise(2); the same number on every architecture."""
M_ARENA_MAX: Final = -8
"""mallopt(3), of glibc."""
PAUSE_S: Final = 60.0
"""Seconds between two trainings that free memory. It takes 7 ms; a Round on a fast link takes some tens of ms."""


class SparingTrainer:
    """A Trainer that frees the memory of connecting before training, and the memory of training afterwards.

    So the two never add up, and a waiting device needs little memory.
    """

    def __init__(
        self,
        trainer: Trainer,
        spare: Callable[[], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._spare = give_back if spare is None else spare
        self._now = now
        self._due_s = now()

    @property
    def runtime(self) -> str:
        """The library and its version."""
        return self._trainer.runtime

    @property
    def graph_format(self) -> str:
        """The format of the graphs that the trainer runs."""
        return self._trainer.graph_format

    @property
    def answers_queries(self) -> bool:
        """See AnswersQueries."""
        return answers_queries(self._trainer)

    def row_sizes(self, bundle: Bundle) -> Collection[int]:
        """See SizingTrainer."""
        return row_sizes(self._trainer, bundle)

    def progress_of(self, assignment_id: str) -> TrainingProgress:
        """See ReportsSteps."""
        return progress_of(self._trainer, assignment_id)

    def own_ranges(self, model: OpenedModel, should_continue: ShouldContinue) -> Float32s | None:
        """See MeasuresRanges."""
        return own_ranges(self._trainer, model, should_continue)

    def train(self, model: OpenedModel, assignment: Assignment, should_continue: ShouldContinue) -> Change:
        """See Trainer."""
        if self._now() < self._due_s:
            return self._trainer.train(model, assignment, should_continue)
        self._spare()
        try:
            return self._trainer.train(model, assignment, should_continue)
        finally:
            self._spare()
            self._due_s = self._now() + PAUSE_S


def share_one_heap() -> None:
    """Let all threads allocate from one heap. gRPC has half a dozen idle threads that would each have their own.

    Call it before the threads start.
    """
    libc = _libc()
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)


def give_back() -> None:
    """Drop unchanged pages of mapped files from memory, and free memory at the heap's end.

    Call it while no other thread loads a library: a half-mapped library looks unchanged.
    """
    libc = _libc()
    if libc is None:
        return
    try:
        # Line by line: the complete file needs a megabyte.
        with SMAPS.open(encoding="utf-8") as lines:
            for start, end in unchanged(lines):
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)
    except OSError:
        # The system hides the mappings of a process; the pages stay in memory.
        pass
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def unchanged(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the mappings in ``smaps`` whose pages equal their file.

    These are private, read-only mappings of files without a changed page, in memory or swapped out. Changed pages
    matter: the loader makes relocated pages read-only after it has written them, and they would be lost.
    """
    place: tuple[int, int] | None = None
    is_changed = True
    for line in lines:
        first, *rest = line.split(maxsplit=NUM_FIELDS - 1)
        if not first.endswith(":"):
            permissions, path = rest[0], rest[-1] if len(rest) == NUM_FIELDS - 1 else ""
            start, _, end = first.partition("-")
            is_files = path.startswith("/") and permissions.endswith("p") and "w" not in permissions
            place, is_changed = ((int(start, 16), int(end, 16)) if is_files else None), True
        elif first == "Anonymous:":
            is_changed = rest[0] != "0"
        elif first == "Swap:" and place is not None and not is_changed and rest[0] == "0":
            yield place


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None

"""What a device's process takes in memory: what only starting needed goes back to the system. For Linux; elsewhere
nothing happens.

Libraries read more of their files into memory to start, to connect and to open graphs than they need to work: symbol
tables, constructors, registries, a handshake. The system would drop these pages when it runs short; a phone's ends
processes then, and the large ones first. ``give_back`` drops them at once: what is needed again comes from the page
cache, a fault of a microsecond for some pages. A device that has connected and trained once, and did this before and
after, takes a quarter less.

It is for a process that is a device and nothing else (``fanin join``); in somebody's app the app decides.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Trainer, TrainingOutcome
from fanin.protos.messages import Assignment

SMAPS: Final = Path("/proc/self/smaps")
"""proc(5): a line ``start-end permissions offset device inode path`` for each mapping, then ``Key: number kB``."""
NUM_FIELDS: Final = 6
MADV_DONTNEED: Final = 4
"""madvise(2), the same number on every machine."""
M_ARENA_MAX: Final = -8
"""mallopt(3), of glibc."""
PAUSE_S: Final = 60.0
"""Between trainings that give back: it takes 7 ms, and on a fast line a Round takes some tens."""


class SparingTrainer:
    """A Trainer that gives back what connecting took before it begins, and what training took when it has ended.

    The two then never add up, and a device that waits for its next Round is small.
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
        """The format of the graphs that it needs."""
        return self._trainer.graph_format

    def train(self, model: OpenedModel, assignment: Assignment, bytes_downloaded: int) -> TrainingOutcome:
        """What the other Trainer does."""
        if self._now() < self._due_s:
            return self._trainer.train(model, assignment, bytes_downloaded)
        self._spare()
        try:
            return self._trainer.train(model, assignment, bytes_downloaded)
        finally:
            self._spare()
            self._due_s = self._now() + PAUSE_S


def share_one_heap() -> None:
    """Let all threads allocate from one heap: gRPC has half a dozen that wait, and each would begin its own.

    To be called before they start.
    """
    libc = _libc()
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)


def give_back() -> None:
    """Drop from this process's memory what its files still hold, and free memory at the heap's end.

    To be called while no other thread loads a library: half mapped it looks unchanged.
    """
    libc = _libc()
    if libc is None:
        return
    try:
        # Line by line: all of it at once is a megabyte.
        with SMAPS.open() as lines:
            for start, end in unchanged(lines):
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)
    except OSError:
        # A system that does not show a process its own mappings: the pages stay, as they would without us.
        pass
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def unchanged(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """(start, end) of the mappings in ``smaps`` that hold what a file holds, and nothing else.

    These are the private mappings of files that nobody may write to and of which no page was ever changed, be the
    change in memory or swapped out. The second matters: what the loader has relocated is made read-only after it was
    written, and would be lost.
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

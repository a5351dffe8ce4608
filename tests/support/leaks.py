"""What a coordinator holds, counted before and after: open files, tasks and files of its spool."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.hosted import Hosted

SETTLE_S = 20.0


@dataclass(frozen=True)
class Held:
    """What a coordinator holds, in whose process its clients are too."""

    num_files: int
    num_tasks: int
    spool: frozenset[str]


def held(host: Hosted) -> Held:
    """At this moment."""
    num_files = len(list(Path("/proc/self/fd").iterdir()))
    # Not a snapshot: SQLite keeps a file of it open as long as another connection of this process holds a lock.
    spool = frozenset(path.name for path in (host.state / "spool").iterdir())
    return Held(num_files=num_files, num_tasks=host.num_tasks(), spool=spool)


@contextmanager
def nothing_leaks(host: Hosted, *, left: tuple[str, ...] = ()) -> Iterator[None]:
    """Soon after, the coordinator holds what it held before; until the Round ends ``left`` may be in its spool."""
    before = held(host)
    yield
    until = time.monotonic() + SETTLE_S
    while not _is_as(before, after := held(host), left):
        assert time.monotonic() < until, (before, after)
        time.sleep(0.05)


def _is_as(before: Held, after: Held, left: tuple[str, ...]) -> bool:
    # Fewer is no leak: what an earlier test left may have gone meanwhile.
    few = after.num_files <= before.num_files and after.num_tasks <= before.num_tasks
    return few and after.spool - before.spool <= set(left)

"""Resources of a coordinator, counted before and after: open files, tasks and files in its spool."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.hosted import Hosted

SETTLE_S = 20.0


@dataclass(frozen=True)
class Resources:
    """Resources of a coordinator and of the clients in its process."""

    num_files: int
    num_tasks: int
    spool: frozenset[str]


def resources_of(host: Hosted) -> Resources:
    """Return the resources at this moment."""
    num_files = len(list(Path("/proc/self/fd").iterdir()))
    # ``snapshot`` does not work here: SQLite keeps its file open while another connection of this process holds a lock.
    spool = frozenset(path.name for path in (host.state / "spool").iterdir())
    return Resources(num_files=num_files, num_tasks=host.num_tasks(), spool=spool)


@contextmanager
def nothing_leaks(host: Hosted, *, remaining: tuple[str, ...] = ()) -> Iterator[None]:
    """Check that soon after the block, the coordinator holds the same resources as before.

    The ``remaining`` files may be in its spool until the Round ends.
    """
    before = resources_of(host)
    yield
    until = time.monotonic() + SETTLE_S
    while not _is_released(before, after := resources_of(host), remaining):
        assert time.monotonic() < until, (before, after)
        time.sleep(0.05)


def _is_released(before: Resources, after: Resources, remaining: tuple[str, ...]) -> bool:
    # Fewer resources are no leak: those of an earlier test may have been released meanwhile.
    are_few = after.num_files <= before.num_files and after.num_tasks <= before.num_tasks
    return are_few and after.spool - before.spool <= set(remaining)

"""Files that survive: how the coordinator writes to disk, and what a full disk looks like.

With ``durability = host`` a file's bytes and its name are synced before anybody is told that it exists, so it
survives a power cut; with ``process`` it survives a crash of the process only.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

from fanin.protos.errors import StorageFull

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Disk(Protocol):
    """What makes files durable; a test's own forgets what was not synced."""

    def sync_file(self, fd: int) -> None:
        """Make the bytes of an open file durable."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        ...


class Durability(Enum):
    """What an acknowledged Update survives; each is the Disk that sees to it."""

    PROCESS = "process"
    HOST = "host"

    def sync_file(self, fd: int) -> None:
        """Make the bytes of an open file durable."""
        if self is Durability.HOST:
            os.fsync(fd)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        if self is Durability.HOST:
            fd = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def make_folder(folder: Path, disk: Disk) -> None:
    """A folder whose own name is durable, also if a process that died before that had made it."""
    folder.mkdir(parents=True, exist_ok=True)
    disk.sync_folder(folder.parent)


@contextmanager
def full_disk_as_our_error(what: str) -> Iterator[None]:
    """Turn "no space left" of any kind into StorageFull; other OSErrors pass."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise StorageFull(f"{what}: no space left on the coordinator's disk ({exc}); free some and retry") from exc
        raise

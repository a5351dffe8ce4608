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
from typing import Final

from fanin.protos.errors import StorageFull

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Durability(Enum):
    """What an acknowledged Update survives."""

    PROCESS = "process"
    HOST = "host"


@contextmanager
def full_disk_as_our_error(what: str) -> Iterator[None]:
    """Turn "no space left" of any kind into StorageFull; other OSErrors pass."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise StorageFull(f"{what}: no space left on the coordinator's disk ({exc}); free some and retry") from exc
        raise


def sync_file(fd: int, durability: Durability) -> None:
    """Make the bytes of an open file durable."""
    if durability is Durability.HOST:
        os.fsync(fd)


def sync_folder(folder: Path, durability: Durability) -> None:
    """Make the names in a folder durable."""
    if durability is Durability.HOST:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

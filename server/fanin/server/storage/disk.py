"""Files that survive: how the coordinator writes to disk, and what a full disk looks like.

With ``durability = host`` a file's bytes and its name are synced before anybody is told that it exists, so it
survives a power cut; with ``process`` it survives a crash of the process only.
"""

import errno
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

from fanin.edge.files import replace_file, sync_folder
from fanin.protos.errors import StorageFull

LOG = logging.getLogger("fanin.server.storage.disk")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_MAX_NAMES: Final = 5


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
            sync_folder(folder)


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


def write_file(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace a file durably; it has the old bytes or the new ones. Raises StorageFull."""
    with full_disk_as_our_error(str(path)):
        replace_file(path, data, mode=mode)


class OwnEntries:
    """The coordinator's entries of a folder: files, or folders, whose whole name matches a pattern.

    All other entries are foreign (``.DS_Store``, ``.nfs0001``, ``lost+found``). They are left alone and logged once for
    each folder. A foreign entry is never a reason to fail.
    """

    def __init__(self, name: str, *, are_folders: bool = False) -> None:
        self._name = re.compile(name, re.ASCII)
        self._are_folders = are_folders
        self._logged: set[Path] = set()

    def of(self, folder: Path) -> tuple[Path, ...]:
        """The own entries of a folder, in no order."""
        own: list[str] = []
        foreign: list[str] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                has_type = entry.is_dir if self._are_folders else entry.is_file
                is_own = self._name.fullmatch(entry.name) and has_type(follow_symlinks=False)
                (own if is_own else foreign).append(entry.name)
        if foreign and folder not in self._logged:
            self._logged.add(folder)
            more = f" and {len(foreign) - _MAX_NAMES} more" if len(foreign) > _MAX_NAMES else ""
            names = ", ".join(map(repr, sorted(foreign)[:_MAX_NAMES]))
            LOG.warning("%s: left alone what a coordinator does not write: %s%s", folder, names, more)
        return tuple(folder / name for name in own)

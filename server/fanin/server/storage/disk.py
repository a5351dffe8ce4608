"""Durable files, and errors of a full disk.

With ``durability = host`` the bytes and the name of a file are synced before the file is announced, so it survives a
power cut. With ``process`` it survives only a crash of the process.
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
    """The operations that make files durable. A test replaces them by a disk that loses unsynced writes."""

    def sync_file(self, fd: int) -> None:
        """Make the bytes of an open file durable."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        ...


class Durability(Enum):
    """The event that an acknowledged Update survives: a crash of the process, or of the host. Each is a ``Disk``."""

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
    """Create a folder and make its name durable, even if a process that died had created it."""
    folder.mkdir(parents=True, exist_ok=True)
    disk.sync_folder(folder.parent)


@contextmanager
def full_disk_as_our_error(what: str) -> Iterator[None]:
    """Raise StorageFull in place of any "no space left" error. Other OSErrors pass."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise StorageFull(f"{what}: no space left on the coordinator's disk ({exc}); free some and retry") from exc
        raise


def write_file(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace a file durably. After a crash it has either the old or the new bytes. Raises StorageFull."""
    with full_disk_as_our_error(str(path)):
        replace_file(path, data, mode=mode)


class OwnEntries:
    """The coordinator's own entries of a folder: files, or folders, whose full name matches a pattern.

    All other entries are foreign (``.DS_Store``, ``.nfs0001``, ``lost+found``). They are left alone and logged once for
    each folder. A foreign entry is never a reason to fail.
    """

    def __init__(self, name: str, *, are_folders: bool = False) -> None:
        self._name = re.compile(name, re.ASCII)
        self._are_folders = are_folders
        self._logged: set[Path] = set()

    def of(self, folder: Path) -> tuple[Path, ...]:
        """Return the own entries of a folder, in no particular order."""
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

"""Durable files, and errors of a disk that cannot be written.

With ``durability = host`` the bytes and the name of a file are synced before the file is announced, so it survives a
power cut. With ``process`` it survives only a crash of the process.
"""

import errno
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

from fanin.edge.files import FULL, replace_file, storage_error, sync_folder

LOG = logging.getLogger("fanin.server.storage.disk")
_WAITING: Final = FULL | {errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE}
"""Errors after which nothing is written until somebody corrects the cause. The write is then repeated."""
_PAGE: Final = bytes(4096)
_MAX_NAMES: Final = 5
_MAX_SYNCS: Final = 8


class Disk(Protocol):
    """The operations that make files durable. A test replaces them by a disk that loses unsynced writes."""

    def sync_file(self, fd: int) -> None:
        """Make the bytes of an open file durable."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        ...

    def sync_all(self, entries: Sequence[int | Path]) -> None:
        """Make the bytes of open files, and the names in folders, durable, in any order."""
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

    def sync_all(self, entries: Sequence[int | Path]) -> None:
        """Make the bytes of open files, and the names in folders, durable. The file system joins concurrent syncs."""
        if self is Durability.HOST and entries:
            with ThreadPoolExecutor(min(len(entries), _MAX_SYNCS), thread_name_prefix="sync") as threads:
                for _ in threads.map(
                    lambda each: os.fsync(each) if isinstance(each, int) else sync_folder(each), entries
                ):
                    pass


def make_folder(folder: Path, disk: Disk) -> None:
    """Create a folder and make its name durable, even if a process that died had created it."""
    folder.mkdir(parents=True, exist_ok=True)
    disk.sync_folder(folder.parent)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise StorageFull or StorageUnavailable in place of an error that its cause explains. Other OSErrors pass."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _WAITING:
            raise storage_error(what, exc) from exc
        raise


def failed_write(path: Path) -> OSError | None:
    """Return the error of a write to a file and of one to a new file of its size next to it; None if both succeed.

    Only the kernel is asked about the file itself. If it is a database, its locks would end with the first descriptor
    of this process that is closed (https://www.sqlite.org/howtocorrupt.html, section 2.2).
    """
    try:
        size = path.stat().st_size if path.exists() else 0
        if size and not os.access(path, os.W_OK):
            is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
            return OSError(errno.EROFS if is_read_only else errno.EACCES, "")
        with tempfile.TemporaryFile(dir=path.parent) as file:
            # At a limit on file sizes the first write is short, and the second one fails.
            num_bytes = os.pwrite(file.fileno(), _PAGE, size)
            os.pwrite(file.fileno(), _PAGE[num_bytes:], size + num_bytes)
            os.fsync(file.fileno())
    except OSError as exc:
        return exc
    return None


def write_file(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace a file durably. After a crash it has either the old or the new bytes.

    Raises StorageFull, StorageUnavailable.
    """
    with disk_errors(str(path)):
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

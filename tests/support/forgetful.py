"""A disk that loses power: only synced bytes and names remain.

A file has the bytes of its last ``sync_file``, or none without one. A folder has the names of its last ``sync_folder``.
A name that was added since then is missing, a replaced one has its earlier file, and a removed one exists again. The
database is trusted: SQLite syncs its commits.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

DATABASE: Final = "fanin.db*"


@dataclass
class ForgetfulDisk:
    """The Disk of a coordinator's folder. All its initial content is durable. ``on_sync`` is called for every sync."""

    root: Path
    on_sync: Callable[[str], None]
    # Bytes by inode. Names by folder: the inode of each name, None for a folder.
    _bytes: dict[int, bytes] = field(default_factory=dict)
    _names: dict[Path, dict[str, int | None]] = field(default_factory=dict)
    # These descriptors stay open, so that no other file gets their inode.
    _descriptors: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for folder, _, files in os.walk(self.root):
            for name in files:
                fd = os.open(Path(folder) / name, os.O_RDONLY)
                self._record_bytes(fd)
                os.close(fd)
            self._record_names(Path(folder))

    def sync_file(self, fd: int) -> None:
        """Record the bytes of the file."""
        self.on_sync("before sync")
        self._record_bytes(fd)
        self.on_sync("after sync")

    def sync_folder(self, folder: Path) -> None:
        """Record the names in the folder."""
        self.on_sync("before sync")
        self._record_names(folder)
        self.on_sync("after sync")

    def sync_all(self, entries: Sequence[int | Path]) -> None:
        """Record the files and folders one after another, so that a test can lose power between any two."""
        for each in entries:
            if isinstance(each, int):
                self.sync_file(each)
            else:
                self.sync_folder(each)

    def lose_power(self, after: Path) -> None:
        """Write the state after a power loss to the new folder ``after``."""
        self._restore(self.root, after)
        for path in self.root.glob(DATABASE):
            shutil.copy(path, after / path.name)

    def close(self) -> None:
        """Close all files."""
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()

    def _record_bytes(self, fd: int) -> None:
        # A new descriptor is needed, because a file that was opened for appending is not readable through its own.
        descriptor = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        self._descriptors.append(descriptor)
        self._bytes[os.fstat(descriptor).st_ino] = os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def _record_names(self, folder: Path) -> None:
        inodes = {path.name: None if path.is_dir() else path.stat().st_ino for path in folder.iterdir()}
        self._names[folder] = inodes

    def _restore(self, folder: Path, after: Path) -> None:
        after.mkdir()
        for name, inode in self._names.get(folder, {}).items():
            if inode is None:
                self._restore(folder / name, after / name)
            else:
                (after / name).write_bytes(self._bytes.get(inode, b""))

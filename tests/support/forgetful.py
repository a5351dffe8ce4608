"""A disk that loses its power: what is left is what was synced, and nothing else.

A file has the bytes that it had at its last ``sync_file``, none without one. A folder has the names that it had at its
last ``sync_folder``: one that was added or put in place since is missing, one that was removed since is there again.
The database is trusted: SQLite syncs what it has committed.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

DATABASE: Final = "fanin.db*"


@dataclass
class ForgetfulDisk:
    """The Disk of a coordinator's folder; all that is there at first is durable. ``told`` hears of every sync."""

    root: Path
    told: Callable[[str], None]
    # By inode; by folder what each name stood for, None for a folder.
    _bytes: dict[int, bytes] = field(default_factory=dict)
    _names: dict[Path, dict[str, int | None]] = field(default_factory=dict)
    # Open, so that no other file is given their inode.
    _held: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for folder, _, files in os.walk(self.root):
            for name in files:
                fd = os.open(Path(folder) / name, os.O_RDONLY)
                self._keep_bytes(fd)
                os.close(fd)
            self._keep_names(Path(folder))

    def sync_file(self, fd: int) -> None:
        """Remember its bytes."""
        self.told("before sync")
        self._keep_bytes(fd)
        self.told("after sync")

    def sync_folder(self, folder: Path) -> None:
        """Remember its names."""
        self.told("before sync")
        self._keep_names(folder)
        self.told("after sync")

    def lose_power(self, after: Path) -> None:
        """What is left, as a new folder."""
        self._restore(self.root, after)
        for path in self.root.glob(DATABASE):
            shutil.copy(path, after / path.name)

    def close(self) -> None:
        """Let go of all files."""
        for fd in self._held:
            os.close(fd)
        self._held.clear()

    def _keep_bytes(self, fd: int) -> None:
        # By a descriptor of its own: a file that was opened for appending only is not readable by the other.
        held = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        self._held.append(held)
        self._bytes[os.fstat(held).st_ino] = os.pread(held, os.fstat(held).st_size, 0)

    def _keep_names(self, folder: Path) -> None:
        found = {path.name: None if path.is_dir() else path.stat().st_ino for path in folder.iterdir()}
        self._names[folder] = found

    def _restore(self, folder: Path, after: Path) -> None:
        after.mkdir()
        for name, inode in self._names.get(folder, {}).items():
            if inode is None:
                self._restore(folder / name, after / name)
            else:
                (after / name).write_bytes(self._bytes.get(inode, b""))

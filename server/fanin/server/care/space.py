"""The disk of a coordinator: free bytes, and the bytes of its files by part. Only this module measures them."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

PARTS: Final = MappingProxyType(
    {
        "database": ("fanin.db", "fanin.db-wal", "fanin.db-shm"),
        "blobs": ("blobs",),
        "updates": ("updates",),
        "spool": ("spool",),
    }
)
"""The files and folders of each part. All others are "other"."""
OTHER: Final = "other"
READ_S: Final = 60.0
"""Seconds between two reads of the sizes: a folder may have millions of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """The space of a disk in bytes, and that of the parts of a folder.

    Attributes:
        free_bytes: Bytes that this process may still write.
        size_bytes: The size of the disk.
        used_bytes: Bytes by part.
    """

    free_bytes: int = 0
    size_bytes: int = 0
    used_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


class FolderSpace:
    """Reads the space of a coordinator's folder. Call it on a thread: it blocks."""

    def __init__(self, folder: Path, steady: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._steady = steady
        self._used: Mapping[str, int] = {}
        self._read_s: float | None = None

    def read(self) -> DiskSpace:
        """Return the space now; the sizes of files are at most ``READ_S`` old."""
        space = os.statvfs(self._folder)
        now_s = self._steady()
        if self._read_s is None or now_s - self._read_s >= READ_S:
            self._used, self._read_s = self._sizes(), now_s
        return DiskSpace(
            free_bytes=space.f_bavail * space.f_frsize,
            size_bytes=space.f_blocks * space.f_frsize,
            used_bytes=self._used,
        )

    def _sizes(self) -> Mapping[str, int]:
        parts = {name: part for part, names in PARTS.items() for name in names}
        sizes = dict.fromkeys((*PARTS, OTHER), 0)
        for entry in os.scandir(self._folder):
            sizes[parts.get(entry.name, OTHER)] += _size_bytes(entry)
        return sizes


def _size_bytes(entry: os.DirEntry[str]) -> int:
    """Return the bytes of a file, or of all files in a folder. Files that are removed meanwhile count as empty."""
    try:
        if entry.is_dir(follow_symlinks=False):
            with os.scandir(entry.path) as entries:
                return sum(_size_bytes(each) for each in entries)
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0

"""Files and folders that a process syncs to the disk, as the interpreter's profiler reports calls of ``os.fsync``."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DRAFT = ".new"


@dataclass(frozen=True)
class Sync:
    """A call of ``os.fsync``: a file with its bytes at that moment, or a folder with its names."""

    path: Path
    content: bytes | tuple[str, ...]


@contextmanager
def synced(root: Path) -> Iterator[list[Sync]]:
    """Yield a list that grows with each file and folder below ``root`` that this thread syncs.

    The profiler does not report the argument of a call. The synced file is the only draft or folder that is open.
    """
    syncs: list[Sync] = []

    def note(_: object, event: str, function: object) -> None:
        if event != "c_call" or function is not os.fsync:
            return
        links = {link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
        paths = {link.readlink() for link in links if link.exists()}
        (path,) = (path for path in paths if path.is_relative_to(root) and (path.is_dir() or path.suffix == DRAFT))
        syncs.append(
            Sync(path, tuple(sorted(each.name for each in path.iterdir())) if path.is_dir() else path.read_bytes())
        )

    sys.setprofile(note)
    try:
        yield syncs
    finally:
        sys.setprofile(None)


def durable_files(syncs: list[Sync]) -> list[Path]:
    """Return the files whose bytes were synced as a draft, and then their names after a rename or a link.

    Each sync must belong to such a file, whose bytes are those of the draft.
    """
    files = []
    for draft, folder in zip(syncs[::2], syncs[1::2], strict=True):
        (name,) = (name for name in folder.content if isinstance(name, str) and _is_draft_of(draft.path.name, name))
        assert folder.path == draft.path.parent
        assert (folder.path / name).read_bytes() == draft.content
        files.append(folder.path / name)
    return files


def _is_draft_of(draft: str, name: str) -> bool:
    return draft != name and draft.startswith(f"{name}.") and draft.endswith(DRAFT)

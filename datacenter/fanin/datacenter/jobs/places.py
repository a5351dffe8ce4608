"""Where a job is to write, tried before a process of it starts: when it has trained it is too late to be told."""

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from fanin.protos.errors import Conflict, InvalidInput

LOCK_FILE: Final = "lock"
LOCK_POLL_S: Final = 0.2


def check_folder(folder: Path, what: str, *, makes: bool = False) -> None:
    """Raise InvalidInput unless files can be made in a folder, which is made first if it is to be (``makes``).

    ``what`` names the place that needs it, in errors.
    """
    try:
        if makes:
            folder.mkdir(parents=True, exist_ok=True)
        # Tried, not asked for: permissions do not tell of a disk that takes nothing.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        told = "name another" if makes else "make the folder, or name another"
        raise InvalidInput(
            f"{what}, expected a place that can be written (folder {folder}: {exc.strerror}); {told}"
        ) from exc


def check_renamed(path: Path, what: str) -> None:
    """Raise InvalidInput unless a file can be written aside and renamed to this path."""
    if path.is_dir():
        raise InvalidInput(f"{what}, which is a folder; name a file in it")
    check_folder(path.parent, what)


@contextmanager
def held(folders: Iterable[Path], wait_s: float) -> Iterator[tuple[int, ...]]:
    """Keep other jobs of this machine out of these folders; the descriptors that do, for a process that outlives this.

    An earlier job may still save there, though its launcher was killed: it gets ``wait_s`` to end. Raises Conflict.
    """
    until_s = time.monotonic() + wait_s
    with ExitStack() as stack:
        descriptors = []
        # In one order, so that no two wait for each other.
        for folder in sorted(folders):
            folder.mkdir(parents=True, exist_ok=True)
            # Of another user's file it is enough to read it.
            descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CREAT, 0o644)
            stack.callback(os.close, descriptor)
            _lock(descriptor, folder, until_s)
            descriptors.append(descriptor)
        yield tuple(descriptors)


def _lock(descriptor: int, folder: Path, until_s: float) -> None:
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise Conflict(
                    f"folder {folder}: another job of this machine runs there, expected none; wait for it to end, stop "
                    "it, or name another folder"
                ) from None
            if not told:
                sys.stderr.write(f"folder {folder}: waiting for another job there to end\n")
                sys.stderr.flush()
            told = True
            time.sleep(LOCK_POLL_S)
        except OSError:
            # A disk without locks, or of NFS, keeps nobody out.
            return
        else:
            return

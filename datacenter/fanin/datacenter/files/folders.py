"""Folders that a job writes to: checked before a process starts, and locked against other jobs.

A job that cannot write its result would only notice after the training.
"""

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


def check_folder(folder: Path, what: str, *, create: bool = False) -> None:
    """Check that files can be written to a folder.

    Args:
        folder: The folder.
        what: Name of the setting that it comes from, for errors.
        create: Whether to create the folder if it does not exist.

    Raises:
        InvalidInput: No file can be written there.
    """
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        # Permissions alone do not reveal a read-only or full disk, so a file is written.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        remedy = "name another" if create else "make the folder, or name another"
        raise InvalidInput(
            f"{what}, expected a place that can be written (folder {folder}: {exc.strerror}); {remedy}", code="FN-1350"
        ) from exc


def check_renamed(path: Path, what: str) -> None:
    """Raise InvalidInput unless a file can be written next to this path and renamed to it."""
    if path.is_dir():
        raise InvalidInput(f"{what}, which is a folder; name a file in it", code="FN-1350")
    check_folder(path.parent, what)


@contextmanager
def locked_folders(folders: Iterable[Path], wait_s: float) -> Iterator[tuple[int, ...]]:
    """Lock folders against other jobs of this machine.

    Args:
        folders: The folders, which are created if necessary.
        wait_s: Seconds to wait for an earlier job. Its ranks may still save although its launcher was killed.

    Yields:
        The file descriptors that hold the locks. A child process that inherits them keeps the locks.

    Raises:
        Conflict: Another job still holds a lock.
    """
    until_s = time.monotonic() + wait_s
    with ExitStack() as stack:
        descriptors = []
        # A fixed order, so that no two jobs wait for each other.
        for folder in sorted(folders):
            folder.mkdir(parents=True, exist_ok=True)
            # Read access is enough, so the lock file of another user works, too.
            descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CREAT, 0o644)
            stack.callback(os.close, descriptor)
            _lock(descriptor, folder, until_s)
            descriptors.append(descriptor)
        yield tuple(descriptors)


def _lock(descriptor: int, folder: Path, until_s: float) -> None:
    announced = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise Conflict(
                    f"folder {folder}: another job of this machine runs there, expected none; wait for it to end, stop "
                    "it, or name another folder",
                    code="FN-1351",
                ) from None
            if not announced:
                sys.stderr.write(f"folder {folder}: waiting for another job there to end\n")
                sys.stderr.flush()
            announced = True
            time.sleep(LOCK_POLL_S)
        except OSError:
            # Some file systems, such as NFS, do not support locks. The job then runs without one.
            return
        else:
            return

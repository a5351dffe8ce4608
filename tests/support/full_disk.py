"""A disk that is full for the kernel: no file can grow past a limit, or a small file system has no space left.

RLIMIT_FSIZE makes write(2) fail with EFBIG after it has written the bytes that still fit, as a full disk does. Python
ignores the signal that accompanies it. The limit applies to the entire process, so the work runs in a forked child.
"""

import errno
import os
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fanin.edge.files import DISK_PROBLEMS

FILE_LIMIT = DISK_PROBLEMS[errno.EFBIG]
"""The words of our errors for it."""


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """Limit all files to this size. Use it inside ``in_child``."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def in_child(work: Callable[[], None]) -> None:
    """Do the work in a forked process. Raise its exception as an AssertionError."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        try:
            work()
        finally:
            if sys.exc_info()[0] is not None:
                os.write(writable, traceback.format_exc().encode()[-4000:])
            # The child must not flush or end any part of the parent, above all pytest's report.
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        error = pipe.read().decode()
    os.waitpid(child, 0)
    assert not error, error


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """Mount a file system of this size at a folder. It needs the rights of root."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"a small disk cannot be mounted; run this test as root: {done.stderr}"
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path, left_bytes: int) -> None:
    """Write a file until its disk has only so many bytes left."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    os.truncate(path, path.stat().st_size - left_bytes)

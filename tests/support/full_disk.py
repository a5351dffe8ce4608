"""A disk that is really full: the kernel refuses to let any file grow past a limit.

RLIMIT_FSIZE makes write(2) fail with EFBIG (Python ignores the signal that goes with it), after it has written
what still fits, as a full disk does. It holds for the whole process, so the work is done in a forked child.
"""

import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """No file grows past so many bytes; for use within ``in_child``."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def in_child(work: Callable[[], None]) -> None:
    """Do the work in a forked process; what it raises is told as an AssertionError."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        try:
            work()
        finally:
            if sys.exc_info()[0] is not None:
                os.write(writable, traceback.format_exc().encode()[-4000:])
            # Nothing of the parent's, pytest's report least of all, is to be ended or flushed here.
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(child, 0)
    assert not told, told

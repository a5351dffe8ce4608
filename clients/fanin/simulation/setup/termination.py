"""SIGTERM during a simulation: Python would end the process at once, and its temporary folders would stay."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STATUS_BASE = 128
"""A shell shows a process that a signal has ended with this status and the signal's number."""


@contextmanager
def exits_at_sigterm() -> Iterator[None]:
    """Raise SystemExit at SIGTERM within the context: open contexts then close. A handler of the caller is kept."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(STATUS_BASE + number)

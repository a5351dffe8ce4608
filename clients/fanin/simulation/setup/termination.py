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
    """Treat SIGTERM as Ctrl-C within the context, and raise SystemExit at its end. A handler of the caller is kept.

    An error raised by a signal handler could end a step of the event loop halfway, and a task would wait for ever. At
    Ctrl-C the event loop cancels its task between two steps.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    received = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.set()
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if not received.is_set():
            raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if received.is_set():
        raise SystemExit(STATUS_BASE + signal.SIGTERM)

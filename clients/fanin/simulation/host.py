"""The process of a simulation: its signals, its log, and its garbage collector. Each context restores what it changes.

At SIGTERM, Python would end the process at once, and the temporary folders of a simulation would stay.

A simulation creates millions of short-lived objects, and almost none of them are in reference cycles. By default the
collector still traverses them after every 700 new ones, and again and again the objects of torch and of all clients.
"""

import gc
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

NUM_NEW: Final = 50_000
"""New objects after which the collector looks for cycles among them, instead of 700."""
STATUS_BASE: Final = 128
"""A shell shows a process that a signal has ended with this status and the signal's number."""


@contextmanager
def interrupted_by_sigterm() -> Iterator[threading.Event]:
    """Treat SIGTERM as Ctrl-C within the context, and yield an event that is set by it.

    An error raised by a signal handler could end a step of the event loop halfway, and a task would wait for ever. At
    Ctrl-C the event loop cancels its task between two steps. A process that a script started by ``&`` ignores Ctrl-C;
    within the context it does not, or it would ignore SIGTERM too.
    """
    received = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.set()
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if before[signal.SIGINT] is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def exits_at_sigterm() -> Iterator[None]:
    """End the process by SystemExit at SIGTERM, after the context's handling of Ctrl-C. A caller's handler is kept."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    with interrupted_by_sigterm() as received:
        try:
            yield
        except KeyboardInterrupt:
            if not received.is_set():
                raise
    if received.is_set():
        raise SystemExit(STATUS_BASE + signal.SIGTERM)


@contextmanager
def quiet_coordinator(*, quiet: bool) -> Iterator[None]:
    """Let the coordinator log nothing in this context. The libraries of an export make the root logger print errors.

    What fails is in the event log, and in the error of the simulation with its line.
    """
    logger = logging.getLogger("fanin.server")
    before = logger.level
    if quiet:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the collector run rarely in this context, and not on the objects that exist before it.

    Objects that the caller has frozen stay frozen. Otherwise its next collection would visit them all.
    """
    youngest, *older = gc.get_threshold()
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.freeze()
    if youngest:
        # 0 means that the caller has switched it off.
        gc.set_threshold(max(youngest, NUM_NEW), *older)
    try:
        yield
    finally:
        gc.set_threshold(youngest, *older)
        if freezes:
            gc.unfreeze()

"""The conditions under which a device works: the app's ``may_work``, the client's ``stop``, and the Assignment.

A training or a transfer takes minutes, so the conditions are also checked inside it. ``should_continue`` is called
before each batch and before each piece of a download or an upload. It returns True or raises ``Interrupted``. A trainer
that does not catch the exception stops within one batch.

An Assignment is over once the coordinator says so to a report of progress, from another thread. This ends the step, and
also a pause before the next one.

``may_work`` may read files or ask a system service, while a batch may take less than a millisecond. So inside a step
it is called at most every ``ASK_EVERY_S``. A device stops after at most that time and one batch or piece.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from fanin.protos.errors import InvalidInput

ASK_EVERY_S: Final = 0.1
"""Shortest time between two calls of ``may_work`` inside a step."""
LOG = logging.getLogger("fanin.clients")
RECHECK_S: Final = 1.0
"""Seconds between two calls of a ``may_work`` that returned False or raised."""
ShouldContinue = Callable[[], bool]
"""Returns True, or raises Interrupted if the device must stop now."""


class Interrupted(Exception):
    """The device must stop: a condition no longer holds, or the client is to stop. Do not catch it."""


class AssignmentOver(Interrupted):
    """The Assignment is over: its Update is not needed."""


class Conditions:
    """The conditions of one device.

    Args:
        may_work: The app's function; an exception in it counts as False.
        now: A monotonic clock, in seconds.
        recheck_s: Seconds between two calls of a ``may_work`` that returned False.
        ask_every_s: Shortest time between two calls inside a step.
    """

    def __init__(
        self,
        may_work: Callable[[], bool],
        now: Callable[[], float],
        recheck_s: float = RECHECK_S,
        ask_every_s: float = ASK_EVERY_S,
    ) -> None:
        self.recheck_s = recheck_s
        self._ask_every_s = ask_every_s
        self._may_work = may_work
        self._now = now
        self._last_check_s = float("-inf")
        self._has_failed = False
        # The end of an upload does not wait for gRPC's thread, which may still be in ``may_work``.
        self._asking = threading.Lock()
        self._is_stopping = threading.Event()
        self._has_news = threading.Event()
        self._over = ""

    @property
    def is_stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._is_stopping.is_set()

    def stop(self) -> None:
        """Interrupt the current step, and prevent further steps. May be called from any thread."""
        self._is_stopping.set()
        self._has_news.set()

    def begin_assignment(self) -> None:
        """Note that the device works for another Assignment, or for none."""
        self._over = ""

    def end_assignment(self, reason: str) -> None:
        """Interrupt the work for the Assignment, which is over for this reason. May be called from any thread."""
        self._over = reason
        self._has_news.set()

    def wait(self, seconds: float) -> bool:
        """Wait this long, or until ``stop`` is called or the Assignment is over. Return whether ``stop`` was called."""
        if not self.is_stopping:
            self._has_news.wait(seconds)
            self._has_news.clear()
        return self.is_stopping

    def hold(self) -> bool:
        """Return whether the device may work now. Calls ``may_work``, one thread at a time."""
        with self._asking:
            may_work = self._ask()
            self._last_check_s = self._now()
        return may_work

    def should_continue(self) -> bool:
        """Return True.

        Raises:
            AssignmentOver: The Assignment is over.
            Interrupted: The client is to stop, or ``may_work`` returned False.
        """
        if self.is_stopping:
            raise Interrupted("the client stops")
        self.check_assignment()
        if self._now() - self._last_check_s >= self._ask_every_s and not self.hold():
            raise Interrupted("may_work no longer holds")
        return True

    def check_assignment(self) -> None:
        """Raise AssignmentOver if the Assignment is over."""
        if self._over:
            raise AssignmentOver(self._over)

    def _ask(self) -> bool:
        try:
            answer: object = self._may_work()
            if not isinstance(answer, bool | np.bool_):
                raise InvalidInput(
                    f"returned {type(answer).__name__}, expected True or False; return True to work", code="FN-0801"
                )
            may_work = bool(answer)
        except Exception as exc:  # the app's code may raise anything
            if not self._has_failed:
                LOG.exception(
                    "may_work: %s: %s; the client pauses and calls it again every %g s",
                    type(exc).__name__,
                    exc,
                    self.recheck_s,
                )
            self._has_failed = True
            may_work = False
        else:
            self._has_failed = False
        return may_work

"""The log of events that peers cause: a few records per minute for each kind, then their number.

Any peer can make calls that are refused, and any device can report failures. Without a limit, a flood of them fills the
disk that holds the Updates.
"""

import asyncio
import logging
import sys
from contextvars import Context
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 60.0
MAX_LINES: Final = 20
"""Lines of one kind per window: enough to identify the cause, and at most some 10 kB."""


@dataclass(slots=True)
class _Window:
    num_calls: int = 0


class LimitedLog:
    """Logs at most ``max_lines`` lines of a kind per window, on the event loop. A kind is a word of the caller's,
    such as the class of an error.

    Args:
        log: Receives the lines: at level INFO, and exceptions at ERROR.
        max_lines: Lines of one kind per window.
        what: The noun of the number that follows, such as "refused calls".
    """

    def __init__(self, log: logging.Logger, max_lines: int = MAX_LINES, what: str = "refused calls") -> None:
        self._log = log
        self._what = what
        self._max_lines = max_lines
        self._windows: dict[str, _Window] = {}

    def log(self, kind: str, text: str, code: str = "") -> None:
        """Log a line, unless ``max_lines`` lines of its kind were logged within the window.

        Args:
            kind: Its kind.
            text: The line.
            code: The code of the error in it, for programs.
        """
        if self.is_due(kind):
            self._log.info("%s", text, extra={"code": code})

    def exception(self, text: str) -> None:
        """Log the exception that is being handled, with its traceback.

        Its kind is its class and the line that raised it: a device repeats a call that fails, so one cause raises many
        exceptions.
        """
        error = sys.exception()
        assert error is not None, "an exception is being handled"
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = "" if trace is None else f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        if self.is_due(f"{type(error).__name__}{place}"):
            self._log.exception("%s", text)

    def is_due(self, kind: str) -> bool:
        """Count an event of a kind. Return whether to log it."""
        window = self._windows.get(kind)
        if window is None:
            window = self._windows[kind] = _Window()
            # In a context of its own: the number is about no device.
            asyncio.get_running_loop().call_later(WINDOW_S, self._end, kind, context=Context())
        window.num_calls += 1
        return window.num_calls <= self._max_lines

    def _end(self, kind: str) -> None:
        num_hidden = self._windows.pop(kind).num_calls - self._max_lines
        if num_hidden > 0:
            self._log.info("%s: %d more %s within %g s", kind, num_hidden, self._what, WINDOW_S)


def limit_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Log what fails in the loop itself, such as a connection that cannot be accepted, once a minute for each kind."""
    errors = LimitedLog(logging.getLogger("asyncio"), max_lines=1, what="errors of the event loop")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        if errors.is_due(f"{context.get('message')} {type(context.get('exception')).__name__}"):
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)

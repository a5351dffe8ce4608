"""The log of events that peers cause: a few lines per minute for each kind, then their number.

Any peer can make calls that are refused, and any device can report failures. Without a limit, a flood of them fills the
disk that holds the Updates.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 60.0
MAX_LINES: Final = 20
"""Lines of one kind per window: enough to identify the cause, and at most some 10 kB."""


@dataclass(slots=True)
class _Window:
    num_calls: int = 0


class LimitedLog:
    """Logs at most ``max_lines`` lines of a kind per window, on the event loop. A kind is a class of errors.

    Args:
        log: Receives the lines, at level INFO.
        max_lines: Lines of one kind per window.
        what: The noun of the number that follows, such as "refused calls".
    """

    def __init__(self, log: logging.Logger, max_lines: int = MAX_LINES, what: str = "refused calls") -> None:
        self._log = log
        self._what = what
        self._max_lines = max_lines
        self._windows: dict[str, _Window] = {}

    def log(self, kind: str, text: str) -> None:
        """Log a line, unless ``max_lines`` lines of its kind were logged within the window."""
        window = self._windows.get(kind)
        if window is None:
            window = self._windows[kind] = _Window()
            asyncio.get_running_loop().call_later(WINDOW_S, self._end, kind)
        window.num_calls += 1
        if window.num_calls <= self._max_lines:
            self._log.info("%s", text)

    def _end(self, kind: str) -> None:
        num_hidden = self._windows.pop(kind).num_calls - self._max_lines
        if num_hidden > 0:
            self._log.info("%s: %d more %s within %g s", kind, num_hidden, self._what, WINDOW_S)

"""What a line of the log is about: a Run, a Round, a device. Programs read it as fields of ``--log-format json``.

A line about a Run is logged by ``about_run``, which names it. All other lines have the scope that the current task or
thread has noted, such as the device whose call it serves.
"""

import logging
from collections.abc import MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class LogScope:
    """The subject of a line. ``run`` and ``device`` are ids; "" and 0 stand for none."""

    run: str = ""
    round: int = 0
    device: str = ""


_CURRENT: Final[ContextVar[LogScope | None]] = ContextVar("fanin log scope", default=None)


def note_scope(scope: LogScope) -> None:
    """Let the following lines of this task or thread have a scope."""
    _CURRENT.set(scope)


def current_scope() -> LogScope:
    """Return the scope of this task or thread."""
    return _CURRENT.get() or LogScope()


def scope_of(record: logging.LogRecord) -> LogScope:
    """Return the scope of a record: its own one, or that of the task or thread that logs it."""
    scope = getattr(record, "scope", None)
    return scope if isinstance(scope, LogScope) else current_scope()


class RunLog(logging.LoggerAdapter[logging.Logger]):
    """Logs lines about a Run. Each begins with its id."""

    def __init__(self, log: logging.Logger, scope: LogScope) -> None:
        super().__init__(log, {"scope": scope})
        self._prefix = f"run {scope.run}: "

    def process(self, msg: object, kwargs: MutableMapping[str, object]) -> tuple[object, MutableMapping[str, object]]:
        """Return the line with the Run before it, and its scope."""
        kwargs["extra"] = self.extra
        return f"{self._prefix}{msg}", kwargs


def about_run(log: logging.Logger, run_id: str, round_number: int = 0) -> RunLog:
    """Return the log for lines about a Run, or about one of its Rounds."""
    return RunLog(log, LogScope(run=run_id, round=round_number))

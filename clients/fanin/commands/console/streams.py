"""Standard output and standard error of a command: text of others cannot control the terminal.

Names, reasons and errors of peers, files and other packages reach the terminal through many commands. So the streams
themselves escape what is not printable, and no command needs a precaution: an escape sequence, a bell or a control
character that changes the direction of text is printed as ``\\x1b``, ``\\x07`` or ``\\u202e``.

The log has one line for each record. A line feed in a peer's text could forge one, so its formatter escapes that, too.
"""

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from enum import StrEnum
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Final, TextIO, cast

from fanin.edge.scopes import scope_of
from fanin.protos.errors import FaninError

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
INDENT: Final = "    "
LOG_FORMAT_VARIABLE: Final = "FANIN_LOG_FORMAT"
"""The environment variable with the form of the log, for child processes."""
LAYOUT: Final = "\n\t"
"""Characters that lay out a command's own text. A carriage return does so only as the first one of a write: a progress
line begins with it."""


def printable(text: str, keep: str = "") -> str:
    r"""Return the text with characters that are not printable escaped, for example a line feed as ``\n``.

    Args:
        text: The text.
        keep: Further characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else one.encode("unicode_escape").decode() for one in text)


class EscapingStream:
    """A text stream that escapes what would control a terminal. All else is that of the stream behind it."""

    def __init__(self, stream: TextIO) -> None:
        self.behind = stream

    def write(self, text: str) -> int:
        """Write the text, escaped. Returns the number of its characters."""
        start = text[:1] if text[:1] == "\r" else ""
        self.behind.write(start + printable(text[len(start) :], LAYOUT))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the lines, escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.behind, name)


def behind(stream: TextIO) -> TextIO:
    """Return the stream behind one that escapes, for a caller that escapes each text itself."""
    return stream.behind if isinstance(stream, EscapingStream) else stream


@contextmanager
def escaped_output() -> Iterator[None]:
    """Escape everything that is written to standard output and standard error within this context.

    Characters that the encoding of the locale lacks are escaped, too, so no text fails to be printed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    out, error = (cast("TextIO", EscapingStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(error):
        yield


class LogFormat(StrEnum):
    """The form of a log."""

    TEXT = "text"
    JSON = "json"


def configure_logging(level: int, form: LogFormat = LogFormat.TEXT, handler: logging.Handler | None = None) -> None:
    """Log records of at least ``level`` to a handler, by default to standard error.

    Child processes that log have the same form.
    """
    handler = handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else OneLineFormatter(FORMAT))
    os.environ[LOG_FORMAT_VARIABLE] = form.value
    logging.basicConfig(level=level, handlers=[handler])
    # Warnings of libraries are lines of the log, too.
    logging.captureWarnings(form is LogFormat.JSON)


def inherited_format() -> LogFormat:
    """Return the form of the log of the process that started this one."""
    return LogFormat.JSON if os.environ.get(LOG_FORMAT_VARIABLE) == LogFormat.JSON.value else LogFormat.TEXT


def error_codes(record: logging.LogRecord) -> Iterable[str]:
    """Return the codes of the errors that a record has as arguments or as its exception."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    errors = [*arguments, record.exc_info[1] if record.exc_info else None]
    return dict.fromkeys(error.code for error in errors if isinstance(error, FaninError))


class LogFile(RotatingFileHandler):
    """A log file that is rotated by its size, and that another program may rotate, too.

    A file that was renamed or removed, such as by logrotate, is opened again before the next record. Only this user can
    read it.

    Args:
        path: The file.
        max_bytes: The size at which the next file begins; 0: never.
        num_old: The number of older files that stay: ``PATH.1`` is the newest of them.
    """

    def __init__(self, path: Path, max_bytes: int, num_old: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=num_old, encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        if self.stream is not None and not _is_at(self.stream, Path(self.baseFilename)):
            self.stream.close()
            self.stream = self._open()
        super().emit(record)

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600))


def _is_at(stream: TextIOWrapper, path: Path) -> bool:
    """Return whether the path is still that of an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except OSError:
        return False


class OneLineFormatter(logging.Formatter):
    """A formatter that escapes characters that are not printable and indents each line of a traceback.

    It adds the codes of the errors that a record has as arguments or as its exception.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record on one line."""
        codes = "".join(f" [{code}]" for code in error_codes(record))
        return printable(super().formatMessage(record) + codes)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return the local time with its offset from UTC: without it, an hour is ambiguous when summer time ends."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        """Return the traceback, indented, so that none of its lines looks like a record."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        """Return the stack, indented."""
        return _indented(super().formatStack(stack_info))


class JsonFormatter(logging.Formatter):
    """A formatter that returns one JSON object in ASCII on one line.

    It has the fields ``time`` (RFC 3339, UTC), ``level``, ``logger`` and ``message``. As far as they are known, it also
    has ``run``, ``round``, ``device``, ``code`` of an error, and ``exception`` with a traceback. The message is escaped
    as in the text log before JSON escapes it, so that a program may print it.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record."""
        scope, time = scope_of(record), datetime.fromtimestamp(record.created, UTC)
        fields: dict[str, object] = {
            "time": time.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage()),
            "run": printable(scope.run),
            "round": scope.round,
            "device": printable(scope.device),
            "code": next(iter(error_codes(record)), getattr(record, "code", "")),
        }
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = printable(self.formatException(record.exc_info), "\n")
        return json.dumps({name: value for name, value in fields.items() if value})


def _indented(text: str) -> str:
    return "\n".join(f"{INDENT}{printable(line)}" for line in text.split("\n"))

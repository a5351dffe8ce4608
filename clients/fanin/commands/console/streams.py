"""Standard output and standard error of a command: text of others cannot control the terminal.

Names, reasons and errors of peers, files and other packages reach the terminal through many commands. So the streams
themselves escape what is not printable, and no command needs a precaution: an escape sequence, a bell or a control
character that changes the direction of text is printed as ``\\x1b``, ``\\x07`` or ``\\u202e``.

The log has one line for each record. A line feed in a peer's text could forge one, so its formatter escapes that, too.
"""

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import TracebackType
from typing import Final, TextIO, cast

from fanin.protos.errors import FaninError

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
INDENT: Final = "    "
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
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text, escaped. Returns the number of its characters."""
        start = text[:1] if text[:1] == "\r" else ""
        self._stream.write(start + printable(text[len(start) :], LAYOUT))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the lines, escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextmanager
def escaped_output() -> Iterator[None]:
    """Escape everything that is written to standard output and standard error within this context."""
    out, error = (cast("TextIO", EscapingStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(error):
        yield


def configure_logging(level: int) -> None:
    """Log records of at least ``level`` to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler])


class OneLineFormatter(logging.Formatter):
    """A formatter that escapes characters that are not printable and indents each line of a traceback.

    It adds the codes of the errors that a record has as arguments or as its exception.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record on one line."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        errors = [*arguments, record.exc_info[1] if record.exc_info else None]
        codes = dict.fromkeys(f" [{error.code}]" for error in errors if isinstance(error, FaninError))
        return printable(super().formatMessage(record) + "".join(codes))

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        """Return the traceback, indented, so that none of its lines looks like a record."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        """Return the stack, indented."""
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"{INDENT}{printable(line)}" for line in text.split("\n"))

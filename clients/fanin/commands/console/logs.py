"""The log of a process on standard error: one line a record, even if the text comes from a peer.

A line feed in a peer's text could forge a record; an escape sequence could control the terminal that shows the log.
The formatter escapes both, so callers of the log need no precaution.
"""

import logging
import sys
from types import TracebackType
from typing import Final

from fanin.commands.console.streams import printable

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
INDENT: Final = "    "


def configure_logging(level: int) -> None:
    """Log records of at least ``level`` to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler])


class OneLineFormatter(logging.Formatter):
    """A formatter that escapes characters that are not printable and indents each line of a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record on one line."""
        return printable(super().formatMessage(record))

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

"""The log of a process on standard error: one line for each record, whatever text a peer sent.

A line feed in a peer's text would forge a record, an escape sequence would command the terminal that shows the log.
Both are escaped here, once, so no caller of the log has to think of it.
"""

import logging
import sys
from types import TracebackType
from typing import Final

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
INDENT: Final = "    "


def configure_logging(level: int) -> None:
    """Log to standard error from ``level`` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler])


class OneLineFormatter(logging.Formatter):
    """Escapes what is not printable. A traceback follows its record, each line of it indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record, on one line."""
        return printable(super().formatMessage(record))

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        """The traceback, indented: no line of it can pass for a record."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        """The stack, indented."""
        return _indented(super().formatStack(stack_info))


def printable(text: str) -> str:
    r"""The text with each character that is not printable as an escape: a line feed as ``\n``."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _indented(text: str) -> str:
    return "\n".join(f"{INDENT}{printable(line)}" for line in text.split("\n"))

"""Standard output and standard error of a command: text of others cannot control the terminal.

Names, reasons and errors of peers, files and other packages reach the terminal through many commands. So the streams
themselves escape what is not printable, and no command needs a precaution: an escape sequence, a bell or a control
character that changes the direction of text is printed as ``\\x1b``, ``\\x07`` or ``\\u202e``.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Final, TextIO, cast

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

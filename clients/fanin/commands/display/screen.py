"""A stream of text lines. On a terminal it has styles, and one live line at its end that updates in place.

Standard output escapes control sequences, because most text is that of a peer. This room writes its own sequences to
the stream behind it, so it escapes each text first.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, TextIO

from fanin.commands.console.streams import LAYOUT, behind, printable
from fanin.protos.texts import lasted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

REFRESHES: Final = 4
"""Updates of the live line in a second."""
WHOLE_UNTIL_S: Final = 100


class Screen:
    """A stream that a command writes lines to.

    Attributes:
        is_terminal: Whether the stream is a terminal that can update lines in place.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._console = _console(stream) if self.is_terminal else None

    @property
    def columns(self) -> int:
        """The width of the terminal; 100 without one."""
        return self._console.width if self._console is not None else 100

    def line(self, text: str, style: str = "") -> None:
        """Write a text as lines of its own."""
        if self._console is None:
            self._stream.write(f"{text}\n")
        else:
            from rich.text import Text

            self._console.print(Text(printable(text, LAYOUT), style=style))
        self._stream.flush()

    def spans(self, *spans: tuple[str, str], wraps: bool = True) -> None:
        """Write texts, each with its style, as one line. A narrow terminal wraps it, or cuts it."""
        if self._console is None:
            self.line("".join(text for text, _ in spans))
        else:
            from rich.text import Text

            self._console.print(Text.assemble(*((printable(text), style) for text, style in spans)), no_wrap=not wraps)

    @contextmanager
    def live(self, text: Callable[[], str]) -> Iterator[None]:
        """Show the result of ``text`` as the last line, again and again. Without a terminal nothing is shown."""
        with ExitStack() as stack:
            if self._console is not None:
                from rich.live import Live

                live = Live(
                    get_renderable=lambda: _cut(text()),
                    console=self._console,
                    refresh_per_second=REFRESHES,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                stack.enter_context(live)
            yield

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """Show a text with the seconds that have passed, while a step runs."""
        began_s = time.monotonic()
        with self.live(lambda: f"{text}  {elapsed(began_s)}"):
            yield


def elapsed(began_s: float) -> str:
    """Return the time since then for a live line, whose digits must not flicker."""
    seconds = time.monotonic() - began_s
    return f"{seconds:.0f} s" if seconds < WHOLE_UNTIL_S else lasted(seconds)


def _console(stream: TextIO) -> "Console":
    from rich.console import Console

    return Console(file=behind(stream), force_terminal=True, highlight=False, markup=False, emoji=False)


def _cut(text: str) -> "RenderableType":
    from rich.text import Text

    return Text(printable(text), style="dim", no_wrap=True, overflow="ellipsis")


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on standard error, one a line."""
    screen = Screen(sys.stderr)
    for note in notes:
        screen.line(f"note: {note}")

"""The steps of a command that takes long, on standard error: each a line with the seconds since the command began.

On a terminal the last line is the current step with its seconds.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Final, TextIO, cast

from fanin.commands.display.screen import Screen, elapsed

STEP_LOGGERS: Final = ("fanin.edge.export", "fanin.simulation.progress")
"""Loggers whose records are steps of a command."""


@contextmanager
def progress(command: str, *, quiet: bool, live: bool = True) -> Iterator[Callable[[str], None]]:
    """Print the steps of a command on standard error.

    The log records of an export or a simulation are printed, too. While this context is entered, standard error must
    be written to by this module and ``sys.stderr`` alone, or ``live`` must be False.

    Yields:
        A function that prints one step.
    """
    began_s = time.monotonic()
    screen = Screen(sys.stderr)
    current: list[tuple[str, float]] = []

    def step(text: str) -> None:
        if not quiet:
            screen.line(f"fanin {command}: {time.monotonic() - began_s:5.1f} s: {text}")
            current[:] = [(text, time.monotonic())]

    with ExitStack() as stack:
        for name in STEP_LOGGERS:
            stack.enter_context(_shown(logging.getLogger(name), _Steps(step)))
        if live and not quiet and screen.is_terminal:
            stack.enter_context(screen.live(lambda: _of_step(current)))
            stack.enter_context(redirect_stderr(cast("TextIO", Lines(screen, sys.stderr))))
        yield step


def _of_step(current: Sequence[tuple[str, float]]) -> str:
    return "".join(f"{text}  {elapsed(at_s)}" for text, at_s in current)


class Lines:
    """A text stream that writes whole lines to a screen, above its live line."""

    def __init__(self, screen: Screen, stream: TextIO) -> None:
        self._screen = screen
        self._stream = stream
        self._rest = ""

    def write(self, text: str) -> int:
        """Write the lines that are complete."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._screen.line(line)
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextmanager
def _shown(logger: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    """Pass the records of a logger to a handler alone."""
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # The exporter's libraries configure the root logger, which would repeat each line.
    logger.propagate = False
    try:
        yield
    finally:
        logger.level, logger.propagate = before
        logger.removeHandler(handler)


class _Steps(logging.Handler):
    """Passes each record's text to a function."""

    def __init__(self, step: Callable[[str], None]) -> None:
        super().__init__()
        self._step = step

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        self._step(record.getMessage())

"""The progress of a long step: a bar on a terminal, nothing elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

from fanin.commands.console.streams import behind, printable
from fanin.commands.display.screen import Screen

Advance = Callable[[int], None]
"""Adds a number of bytes, or of steps."""


@contextmanager
def bar(
    text: str, total: int | None = None, *, is_bytes: bool = False, stream: TextIO | None = None
) -> Iterator[Advance]:
    """Show a bar while a step runs.

    Args:
        text: The step, as in ``uploading the bundle``.
        total: The bytes or steps of all of it; None if it is not known.
        is_bytes: Whether bytes are counted.
        stream: Where; default: standard error.

    Yields:
        A function that adds to the bar.
    """
    target = sys.stderr if stream is None else stream
    if not Screen(target).is_terminal:
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    console = Console(file=behind(target), force_terminal=True, highlight=False, markup=False, emoji=False)
    amount = (
        (progress.DownloadColumn(), progress.TransferSpeedColumn()) if is_bytes else (progress.MofNCompleteColumn(),)
    )
    columns = (progress.TextColumn("{task.description}", markup=False), progress.BarColumn(24), *amount)
    with progress.Progress(*columns, progress.TimeElapsedColumn(), console=console, transient=True) as shown:
        task = shown.add_task(printable(text), total=total)
        yield lambda count: shown.advance(task, count)


def byte_bar(text: str, total: int) -> AbstractContextManager[Advance]:
    """Show a bar of bytes."""
    return bar(text, total, is_bytes=True)

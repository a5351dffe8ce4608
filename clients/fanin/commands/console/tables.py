"""Tables of commands: as wide as the terminal; unwrapped in a file or a pipe, because a cut name cannot be used."""

import sys
from typing import Final

from rich.console import Console, RenderableType

PIPE_COLUMNS: Final = 4096
"""Columns of a file or a pipe: more than any table has."""


def print_tables(*tables: RenderableType) -> None:
    """Print tables, or the text instead of them, to standard output."""
    # No markup: a cell may have the text of a peer, or a name in brackets.
    # No colors: the stream escapes their control sequences as it does those of a peer.
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    console = Console(width=width, markup=False, emoji=False, color_system=None)
    for table in tables:
        console.print(table)

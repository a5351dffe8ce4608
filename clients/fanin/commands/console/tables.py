"""Tables of commands: as wide as the terminal; unwrapped in a file or a pipe, because a cut name cannot be used."""

import sys
from typing import Final

from rich.console import Console, RenderableType

PIPE_COLUMNS: Final = 4096
"""Columns of a file or a pipe: more than any table has."""


def print_tables(*tables: RenderableType) -> None:
    """Print tables, or the text instead of them, to standard output."""
    # No markup: a cell may have the text of a peer, or a name in brackets.
    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, markup=False, emoji=False)
    for table in tables:
        console.print(table)

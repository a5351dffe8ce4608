"""The verbs of a subcommand, such as ``fanin token create``, and its connection to a coordinator."""

import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fanin.commands.console.terminal import credentials, naming_start, run_command
from fanin.commands.console.usage import WRONG_USAGE, WrongUsage, report_usage

if TYPE_CHECKING:
    from fanin.clients.administrator import Administrator

HELP_COLUMNS: Final = 80
Verbs = Mapping[str, Callable[..., int | None]]


def run_verb(noun: str, summary: str, verbs: Verbs, argv: Sequence[str]) -> int:
    """Run one verb of a subcommand, or print the verbs.

    Args:
        noun: The subcommand.
        summary: One sentence about it.
        verbs: The typer function of each verb; the first line of its docstring describes it.
        argv: The arguments after the subcommand.

    Returns:
        The exit status.
    """
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, verbs)) + 2
        lines = [f"usage: fanin {noun} VERB [OPTIONS]", "", summary, ""]
        for verb, function in verbs.items():
            indent = " " * (width + 2)
            lines += textwrap.wrap(f"  {verb:{width}}{_summary(function)}", HELP_COLUMNS, subsequent_indent=indent)
        text = "\n".join([*lines, "", f"fanin {noun} VERB --help lists the options.", ""])
        (sys.stdout if argv else sys.stderr).write(text)
        return 0 if argv else WRONG_USAGE
    if argv[0] not in verbs:
        return report_usage(noun, WrongUsage(f"got {argv[0]!r}, expected one of {', '.join(verbs)}"), argv)
    return run_command(verbs[argv[0]], argv[1:], f"{noun} {argv[0]}")


@contextmanager
def administrator(state: Path, server: str, ca: Path | None, token_file: Path | None) -> "Iterator[Administrator]":
    """Connect to a coordinator; the connection closes when the context ends. See ``credentials``."""
    # Imported here: wrong usage needs no grpc.
    from fanin.clients.administrator import Administrator

    known = credentials(state, server, ca, token_file)
    with (
        naming_start(state, server),
        Administrator.connect(known.address, known.ca_certificate, known.token) as client,
    ):
        yield client


def _summary(function: Callable[..., object]) -> str:
    return (function.__doc__ or "").strip().splitlines()[0]

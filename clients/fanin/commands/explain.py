"""``fanin explain``: show what the code of an error means."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from fanin.commands.console.terminal import JsonOption, prints_text, run_command, write_json
from fanin.protos.codes import explained


def main(argv: Sequence[str]) -> int:
    """Run ``fanin explain``."""
    return run_command(explain, argv)


def explain(
    code: Annotated[str, typer.Argument(metavar="CODE", help="The code of an error, such as FN-0302.")],
    json: JsonOption = "",
) -> None:
    """Show meaning, cause and remedy of an error by its code."""
    entry = explained(code)
    if json:
        write_json(json, asdict(entry))
    if prints_text(json):
        sys.stdout.write(f"{entry.meaning}\n\nCause: {entry.cause}\n\nRemedy: {entry.remedy}\n")

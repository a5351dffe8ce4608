"""``fanin promote``: a Version of one Run becomes the newest of another one of the same Bundle."""

from collections.abc import Sequence
from typing import Annotated

import typer

from fanin.commands.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    RoundsOption,
    RunArgument,
    ServerOption,
    StateOption,
    TokenOption,
    Where,
    command_run,
    run_command,
)
from fanin.protos.control import Adopt


def main(argv: Sequence[str]) -> int:
    """The command."""
    return run_command(promote, argv)


def promote(
    from_run: Annotated[str, typer.Argument(metavar="FROM", help="The run that has the version.")],
    number: Annotated[int, typer.Argument(min=0, help="Its number there.")],
    run_id: RunArgument,
    rounds: RoundsOption = 0,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Make a version of one run the newest of another, which must be paused or have ended."""
    where = Where(state=state, server=server, ca=ca, token_file=token_file)
    command_run(where, run_id, Adopt(from_run_id=from_run, number=number, rounds=rounds), json)

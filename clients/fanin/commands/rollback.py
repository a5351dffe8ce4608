"""``fanin rollback``: an older Version becomes the newest, under a new number."""

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
    return run_command(rollback, argv)


def rollback(
    run_id: RunArgument,
    number: Annotated[int, typer.Argument(min=0, help="The version to go back to.")],
    rounds: RoundsOption = 0,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Make an older version of a run its newest; the run must be paused or have ended."""
    where = Where(state=state, server=server, ca=ca, token_file=token_file)
    command_run(where, run_id, Adopt(number=number, rounds=rounds), json)

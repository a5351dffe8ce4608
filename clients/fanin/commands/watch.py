"""``fanin watch``: what happened in a Run, then what happens, until it rests."""

from collections.abc import Sequence
from typing import Annotated

import typer

from fanin.commands.show import follow
from fanin.commands.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    ServerOption,
    StateOption,
    TokenOption,
    connect,
    run_command,
)
from fanin.protos.runs import RunState


def main(argv: Sequence[str]) -> int:
    """The command."""
    return run_command(watch, argv)


def watch(
    run_id: Annotated[str, typer.Argument(help="The run; fanin runs lists them.")],
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> int:
    """Follow a run until it rests; exit status 1 if it failed. With --json, one JSON object a line."""
    line, operator = connect(state, server, ca, token_file)
    outcome = follow(operator.watch(run_id), json)
    line.close()
    return int(outcome is RunState.FAILED)

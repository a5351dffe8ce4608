"""``fanin watch``: what happened in a Run, then what happens, until it has ended."""

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
from fanin.protos.control import RunState


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
    """Follow a run until it has ended; exit status 1 if it failed or was stopped. With --json, one object a line."""
    line, operator = connect(state, server, ca, token_file)
    outcome = follow(operator.watch(run_id), json)
    line.close()
    return int(outcome in (RunState.FAILED, RunState.STOPPED))

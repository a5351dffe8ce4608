"""``fanin watch``: the events of a Run, past and future, until it ends."""

from collections.abc import Sequence
from typing import Annotated

import typer

from fanin.commands.console.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    ServerOption,
    StateOption,
    TokenOption,
    VerboseOption,
    connect,
    run_command,
)
from fanin.commands.display.follow import Watched, follow
from fanin.protos.messages import RunState


def main(argv: Sequence[str]) -> int:
    """Run ``fanin watch``."""
    return run_command(watch, argv)


def watch(
    run_id: Annotated[str, typer.Argument(help="The run; fanin runs lists them.")],
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = "",
) -> int:
    """Follow a run until it ends. Exit status 1 if it failed or was stopped. With --json, print one object a line."""
    with connect(state, server, ca, token_file) as operator:
        outcome = follow(operator.watch_live(run_id), Watched(json_target=json, verbose=verbose))
    return int(outcome in (RunState.FAILED, RunState.STOPPED))

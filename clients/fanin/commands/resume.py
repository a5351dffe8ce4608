"""``fanin resume``: a Run goes on."""

from collections.abc import Sequence

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
from fanin.protos.control import Resume


def main(argv: Sequence[str]) -> int:
    """The command."""
    return run_command(resume, argv)


def resume(
    run_id: RunArgument,
    rounds: RoundsOption = 0,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Go on with a run that is paused or has failed; with --rounds also with one that has finished or was stopped."""
    where = Where(state=state, server=server, ca=ca, token_file=token_file)
    command_run(where, run_id, Resume(rounds=rounds), json)

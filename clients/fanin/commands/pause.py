"""``fanin pause``: a Run takes no further devices, and its Round waits."""

from collections.abc import Sequence

from fanin.commands.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    RunArgument,
    ServerOption,
    StateOption,
    TokenOption,
    Where,
    command_run,
    run_command,
)
from fanin.protos.control import Pause


def main(argv: Sequence[str]) -> int:
    """The command."""
    return run_command(pause, argv)


def pause(
    run_id: RunArgument,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Pause a run: devices at work may finish, nobody new is asked, deadlines stand still."""
    where = Where(state=state, server=server, ca=ca, token_file=token_file)
    command_run(where, run_id, Pause(), json)

"""``fanin stop``: a Run ends."""

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
from fanin.protos.control import Stop


def main(argv: Sequence[str]) -> int:
    """The command."""
    return run_command(stop, argv)


def stop(
    run_id: RunArgument,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """End a run: an open round fails, one that is being folded still becomes a version."""
    where = Where(state=state, server=server, ca=ca, token_file=token_file)
    command_run(where, run_id, Stop(), json)

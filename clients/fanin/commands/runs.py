"""``fanin runs``: the Runs of a coordinator."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fanin.commands.show import run_row
from fanin.commands.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    ServerOption,
    StateOption,
    TokenOption,
    connect,
    run_command,
    write_json,
)
from fanin.protos.chunks import short


def main(argv: Sequence[str]) -> int:
    """The command."""
    return run_command(runs, argv)


def runs(
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """List the runs of a coordinator: state, newest version, rounds done, why a run rests."""
    line, operator = connect(state, server, ca, token_file)
    found = operator.runs()
    line.close()
    if json:
        write_json(json, {"runs": [run_row(info) for info in found]})
        return
    table = Table()
    # A name that is cut cannot be copied into the next command.
    table.add_column("run", no_wrap=True)
    for heading in ("plan", "state", "version", "digest", "rounds", "reason"):
        table.add_column(heading)
    for info in found:
        digest = short(info.version_sha256)
        row = (info.run_id, info.plan.name, info.state.value, str(info.version), digest, str(info.num_rounds))
        table.add_row(*row, info.reason)
    Console().print(table if found else "no runs yet; start one with: fanin run PLAN.toml")

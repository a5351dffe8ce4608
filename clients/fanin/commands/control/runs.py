"""``fanin runs``: the list of a coordinator's Runs."""

from collections.abc import Sequence

from rich.table import Table

from fanin.commands.console.show import count_text, run_row
from fanin.commands.console.streams import printable
from fanin.commands.console.tables import print_tables
from fanin.commands.console.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    ServerOption,
    StateOption,
    TokenOption,
    connect,
    prints_text,
    run_command,
    write_json,
)
from fanin.protos.chunks import short
from fanin.protos.messages import RunInfo


def main(argv: Sequence[str]) -> int:
    """Run ``fanin runs``."""
    return run_command(runs, argv)


def runs(
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """List the runs of a coordinator with their state, newest version, number of rounds and reason."""
    with connect(state, server, ca, token_file) as operator:
        infos = operator.runs()
    if json:
        write_json(json, {"runs": [run_row(info) for info in infos]})
    if prints_text(json):
        print_tables(_table(infos) if infos else "no runs yet; start one with: fanin run PLAN.toml")


def _table(infos: Sequence[RunInfo]) -> Table:
    table = Table()
    # Users copy the name into the next command, so it must not wrap.
    table.add_column("run", no_wrap=True)
    for heading in ("plan", "state", "version", "digest", "rounds", "best", "reason"):
        table.add_column(heading)
    for info in infos:
        digest = short(info.version_sha256)
        plan = "" if info.plan is None else info.plan.name
        version, num_rounds = count_text(info, info.version), count_text(info, info.num_rounds)
        table.add_row(
            info.run_id, plan, info.state.value, version, digest, num_rounds, _best(info), printable(info.reason)
        )
    return table


def _best(info: RunInfo) -> str:
    """Return the best Version on held-out data with its metric, empty without an evaluation."""
    if info.plan is None or info.best_evaluation is None:
        return ""
    metric, evaluation = info.plan.evaluation.best, info.best_evaluation
    return f"{evaluation.version}: {metric} {evaluation.values[metric]:.4f}"

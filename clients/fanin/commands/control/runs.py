"""``fanin runs``: the list of a coordinator's Runs."""

from collections.abc import Sequence
from typing import Annotated, Final

import typer
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
from fanin.commands.console.usage import wrong_usage
from fanin.protos.chunks import short
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import RunInfo, RunState

STATES: Final = tuple(state.value for state in RunState)
NO_RUNS: Final = "no runs yet; start one with: fanin run PLAN.toml"


def main(argv: Sequence[str]) -> int:
    """Run ``fanin runs``."""
    return run_command(runs, argv)


def runs(
    only: Annotated[
        str,
        typer.Option("--only", metavar=f"[{'|'.join(STATES)}]", help="Only runs in this state, or in these: A,B."),
    ] = "",
    last: Annotated[int, typer.Option("--last", min=0, help="Only so many of the newest runs; 0: all.")] = 0,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """List the runs of a coordinator with their state, newest version, number of rounds and reason."""
    with wrong_usage():
        states = _states(only)
    with connect(state, server, ca, token_file) as operator:
        infos = operator.runs(states, last)
    if json:
        write_json(json, {"runs": [run_row(info) for info in infos]})
    if prints_text(json):
        none = f"no runs are {' or '.join(only.split(','))}" if only else NO_RUNS
        print_tables(_table(infos) if infos else none)


def _states(text: str) -> tuple[RunState, ...]:
    words = text.split(",") if text else []
    if unknown := [word for word in words if word not in STATES]:
        raise InvalidInput(
            f"--only: got {unknown[0]!r}, expected one of {', '.join(STATES)}, or several with commas between them",
            code="FN-1008",
        )
    return tuple(RunState(word) for word in words)


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

"""``fanin bench memory``: the coordinator's peak memory above idle, while all devices upload at once.

The coordinator is ``fanin serve``. Idle is its memory when it has just started to serve. The devices
(``harness.crowd``) are threads of one other process. Publishing the model is measured separately: it happens
once a Run, by one caller.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Final

import typer

from fanin.commands.bench.harness.report import write_report
from fanin.commands.bench.harness.rss import PeakRss
from fanin.commands.bench.harness.site import (
    RUN_ID,
    ClientsOption,
    FolderOption,
    MegabytesOption,
    begin_run,
    load_of,
    operating,
    place,
    state_of,
)
from fanin.commands.console.processes import Children, follow_run
from fanin.commands.console.terminal import JsonOption, run_command
from fanin.protos.errors import Conflict
from fanin.protos.messages import RunRested, RunState

GATE: Final = 2.6


def main(argv: Sequence[str]) -> int:
    """Run ``fanin bench memory``."""
    return run_command(memory, argv, "bench memory")


def memory(
    clients: ClientsOption = 64,
    megabytes: MegabytesOption = 64.0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds.")] = 2,
    rule: Annotated[str, typer.Option("--rule", help="The aggregation rule of the rounds.")] = "weighted_mean",
    folder: FolderOption = None,
    json: JsonOption = "",
) -> None:
    """Measure a coordinator's peak memory above idle, with its children, while all devices upload at once."""
    load = replace(load_of(clients, megabytes, rounds), rule=rule)
    with place(folder) as used, Children(used) as children:
        process = children.serve(state_of(used))
        with PeakRss(process.pid) as publishing:
            begin_run(used, load)
        with PeakRss(process.pid) as working:
            words = [str(used), str(clients), str(load.num_values), str(rounds)]
            children.start("crowd", [sys.executable, "-m", "fanin.commands.bench.harness.crowd", *words])
            with operating(used) as operator:
                *_, last = follow_run(operator, RUN_ID, 0, children.check_failed)
        if not isinstance(last.event, RunRested) or last.event.state is not RunState.FINISHED:
            raise Conflict(f"the run did not finish: {last.event}", code="FN-1044")
    # Relative to idle before the Run, so memory that publishing did not free counts too.
    over = working.peak_bytes - publishing.idle_bytes
    row = {
        "clients": clients,
        "model_bytes": load.model_bytes,
        "rounds": rounds,
        "rule": rule,
        "idle_rss_bytes": publishing.idle_bytes,
        "peak_rss_bytes": working.peak_bytes,
        "peak_rss_over_idle_bytes": over,
        "peak_rss_over_idle_models": over / load.model_bytes,
        "gate_peak_rss_over_idle_models": GATE,
        "publishing_peak_rss_over_idle_bytes": publishing.peak_bytes - publishing.idle_bytes,
        "publishing_peak_rss_over_idle_models": (publishing.peak_bytes - publishing.idle_bytes) / load.model_bytes,
    }
    write_report(row, json)

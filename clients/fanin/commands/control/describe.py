"""``fanin describe``: a Run with its Plan, state, active devices and last Rounds."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from fanin.commands.console.show import run_row
from fanin.commands.console.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    RunArgument,
    ServerOption,
    StateOption,
    TokenOption,
    connect,
    run_command,
    write_json,
)
from fanin.protos.control import MAX_DESCRIBED_ROUNDS, RoundInfo, RunDescription
from fanin.protos.plans import Plan


def main(argv: Sequence[str]) -> int:
    """Run ``fanin describe``."""
    return run_command(describe, argv)


def describe(
    run_id: RunArgument,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, max=MAX_DESCRIBED_ROUNDS, help="Number of rounds to show, newest first.")
    ] = 10,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Show a run: its plan, state, newest version, active devices and last rounds."""
    with connect(state, server, ca, token_file) as operator:
        description = operator.describe(run_id, rounds)
    if json:
        write_json(json, description_row(description))
    else:
        sys.stdout.write(description_text(description))


def description_row(description: RunDescription) -> dict[str, object]:
    """Return the JSON row of a described Run. JSON writes an infinite number as null."""
    return {
        **run_row(description.run),
        "plan": asdict(description.run.plan),
        "num_devices": description.num_devices,
        "num_at_work": description.num_at_work,
        "at_work": list(description.at_work),
        "num_gave_up": description.num_gave_up,
        "deadline_s": description.deadline_s,
        "grid": list(description.grid),
        "last_rounds": [_round_row(info) for info in description.rounds],
    }


def _round_row(info: RoundInfo) -> dict[str, object]:
    row = {**asdict(info), "phase": info.phase.value}
    row["opened_at_s"] = row.pop("opened_at")
    return row


def description_text(description: RunDescription) -> str:
    """Return a described Run as text."""
    info = description.run
    reason = f" ({info.reason})" if info.reason else ""
    lines = [
        f"run {info.run_id}",
        f"  state     {info.state.value}{reason}",
        *([] if info.started_by is None else [f"  started   by {info.started_by}"]),
        f"  version   {info.version} {info.version_sha256}",
        f"  bundle    {info.bundle_sha256}",
        f"  rounds    {info.num_rounds} that ended in a version, of {info.plan.stop.max_rounds} planned",
        *_plan_lines(info.plan),
    ]
    if grid := description.grid:
        lines.append(f"  grid      {len(grid)} blocks, steps 2^{min(grid)} to 2^{max(grid)}")
    deadline = f", {description.deadline_s:.0f} s left" if description.deadline_s else ""
    num_at_work, at_work = description.num_at_work, description.at_work
    lines.append(f"  devices   {num_at_work} at work of {description.num_devices} enrolled{deadline}")
    lines += [f"            {device}" for device in at_work]
    if len(at_work) < num_at_work:
        lines.append(f"            and {num_at_work - len(at_work)} more")
    if description.num_gave_up:
        lines.append(f"  gave up   {description.num_gave_up} in this round; the coordinator's log has the reasons")
    lines += [_round_line(info) for info in description.rounds]
    return "\n".join(lines) + "\n"


def _plan_lines(plan: Plan) -> list[str]:
    cohort = plan.cohort
    early = "" if cohort.min_report_s == float("inf") else f" from {cohort.min_report_s:g} s on, and"
    return [
        f"  plan      {plan.name}",
        f"  cohort    {cohort.concurrency} at work, {cohort.buffer} updates close a round",
        f"            {cohort.quorum} suffice{early} at its deadline of {cohort.deadline_s:g} s",
        f"            selected by {cohort.selection}",
        f"  codec     {plan.codec.name}, at most {plan.codec.max_shift} bits coarser than the grid",
        f"  training  {plan.training.epochs} epochs at learning rate {plan.training.learning_rate:g}",
    ]


def _round_line(info: RoundInfo) -> str:
    result = f"{info.num_updates} updates" + (f", version {info.version}" if info.version else "")
    opened = datetime.fromtimestamp(info.opened_at, UTC).isoformat(sep=" ", timespec="seconds")
    return f"  round {info.round}: {info.phase.value}, from version {info.base_version}, {result}, opened {opened}"

"""``fanin describe``: a Run with its Plan, where it stands, who is at work, and its last Rounds."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from fanin.commands.show import run_row
from fanin.commands.terminal import (
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
    """The command."""
    return run_command(describe, argv)


def describe(
    run_id: RunArgument,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, max=MAX_DESCRIBED_ROUNDS, help="How many of the last rounds to show.")
    ] = 10,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Show a run: its plan, its state and newest version, the devices at work, its last rounds."""
    line, operator = connect(state, server, ca, token_file)
    found = operator.describe(run_id, rounds)
    line.close()
    if json:
        write_json(json, description_row(found))
    else:
        sys.stdout.write(text_of(found))


def description_row(found: RunDescription) -> dict[str, object]:
    """A described Run for programs. Where the Plan says nothing of it, ``min_report_s`` is null."""
    plan = asdict(found.run.plan)
    if plan["cohort"]["min_report_s"] == float("inf"):
        # JSON has no infinity.
        plan["cohort"]["min_report_s"] = None
    return {
        **run_row(found.run),
        "plan": plan,
        "num_devices": found.num_devices,
        "num_at_work": found.num_at_work,
        "at_work": list(found.at_work),
        "deadline_s": found.deadline_s,
        "grid": list(found.grid),
        "last_rounds": [_round_row(one) for one in found.rounds],
    }


def _round_row(one: RoundInfo) -> dict[str, object]:
    row = {**asdict(one), "phase": one.phase.value}
    row["opened_at_s"] = row.pop("opened_at")
    return row


def text_of(found: RunDescription) -> str:
    """A described Run for people."""
    info = found.run
    reason = f" ({info.reason})" if info.reason else ""
    lines = [
        f"run {info.run_id}",
        f"  state     {info.state.value}{reason}",
        f"  version   {info.version} {info.version_sha256}",
        f"  bundle    {info.bundle_sha256}",
        f"  rounds    {info.num_rounds} that ended in a version, of {info.plan.stop.max_rounds} planned",
        *_plan_lines(info.plan),
    ]
    if found.grid:
        lines.append(f"  grid      {len(found.grid)} blocks, steps 2^{min(found.grid)} to 2^{max(found.grid)}")
    left = f", {found.deadline_s:.0f} s left" if found.deadline_s else ""
    lines.append(f"  devices   {found.num_at_work} at work of {found.num_devices} enrolled{left}")
    lines += [f"            {device}" for device in found.at_work]
    if len(found.at_work) < found.num_at_work:
        lines.append(f"            and {found.num_at_work - len(found.at_work)} more")
    lines += [_round_line(one) for one in found.rounds]
    return "\n".join(lines) + "\n"


def _plan_lines(plan: Plan) -> list[str]:
    cohort = plan.cohort
    early = "" if cohort.min_report_s == float("inf") else f" from {cohort.min_report_s:g} s on, and"
    return [
        f"  plan      {plan.name}",
        f"  cohort    {cohort.concurrency} at work, {cohort.buffer} updates close a round",
        f"            {cohort.quorum} suffice{early} at its deadline of {cohort.deadline_s:g} s",
        f"  codec     {plan.codec.name}, at most {plan.codec.max_shift} bits coarser than the grid",
        f"  training  {plan.training.epochs} epochs at learning rate {plan.training.learning_rate:g}",
    ]


def _round_line(one: RoundInfo) -> str:
    ended = f", version {one.version}" if one.version else ""
    opened = datetime.fromtimestamp(one.opened_at, UTC).isoformat(sep=" ", timespec="seconds")
    return (
        f"  round {one.round}: {one.phase.value}, from version {one.base_version}, {one.num_updates} updates{ended}, "
        f"opened {opened}"
    )

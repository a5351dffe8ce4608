"""``fanin describe``: a Run with its Plan, state, active devices and last Rounds."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Annotated

import typer

from fanin.commands.console.show import count_text, evaluation_text, run_row, saturated_text
from fanin.commands.console.streams import printable
from fanin.commands.console.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    RunArgument,
    ServerOption,
    StateOption,
    TokenOption,
    connect,
    prints_text,
    run_command,
    write_json,
)
from fanin.commands.control.private import mask_options, mask_text, privacy_lines
from fanin.commands.display.plans import plan_lines, settings_lines
from fanin.protos.messages import (
    FIRST_EPOCH,
    MAX_DESCRIBED_ROUNDS,
    Coverage,
    DiskReport,
    FailureCount,
    RoundInfo,
    RunDescription,
    TrainingProgress,
)
from fanin.protos.plans import Plan
from fanin.protos.texts import counted


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
    if prints_text(json):
        sys.stdout.write(description_text(description))


def description_row(description: RunDescription) -> dict[str, object]:
    """Return the JSON row of a described Run. JSON writes an infinite number as null."""
    live = description.live
    return {
        **run_row(description.run),
        "plan": None if description.run.plan is None else asdict(description.run.plan),
        "masks": mask_options(description.run.plan),
        "num_devices": description.num_devices,
        "num_at_work": live.num_at_work,
        "at_work": list(live.at_work),
        "progress": {device: asdict(each) for device, each in live.progress.items()},
        "num_gave_up": live.num_gave_up,
        "num_refused": live.num_refused,
        "num_waiting": live.num_waiting,
        "last_failure": live.last_failure,
        "failures": [asdict(each) for each in live.failures],
        "saturated": {
            "num_devices": description.saturated.num_devices,
            "num_values": dict(description.saturated.num_values),
        },
        "coverage": None if description.coverage is None else asdict(_plain(description.coverage)),
        "deadline_s": live.deadline_s,
        "grid": list(description.grid),
        "disk": None if description.disk is None else asdict(description.disk),
        "num_digest_only": description.num_digest_only,
        "num_without_parameters": description.num_without_parameters,
        "warnings": [asdict(warning) for warning in description.warnings],
        "last_rounds": [_round_row(info, description.run.plan) for info in description.rounds],
    }


def _plain(coverage: Coverage) -> Coverage:
    """Return a coverage whose mapping ``asdict`` can copy."""
    return replace(coverage, required=dict(coverage.required))


def _round_row(info: RoundInfo, plan: Plan | None) -> dict[str, object]:
    row = asdict(info)
    row["opened_at_s"] = row.pop("opened_at")
    if plan is not None:
        flower = replace(plan.flower, config=plan.flower_in(info.round).config)
        row |= {"training": asdict(plan.training_in(info.round)), "flower": asdict(flower)}
    return row


def _progress_text(progress: TrainingProgress | None) -> str:
    """Return the last report of a device after its id; empty without a step."""
    if progress is None or not progress.step:
        return ""
    of = f" of {progress.num_steps}" if progress.num_steps else ""
    epoch = f", epoch {progress.epoch} of {progress.num_epochs}" if progress.num_epochs > 1 else ""
    return f"  step {progress.step}{of}{epoch}"


def description_text(description: RunDescription) -> str:
    """Return a described Run as text."""
    info, plan = description.run, description.run.plan
    planned = "" if plan is None else f", of {info.max_rounds} planned"
    reason = f" ({info.reason})" if info.reason else ""
    lines = [
        f"run {info.run_id}",
        f"  state     {info.state.value}{reason}",
        *([] if info.started_by is None else [f"  started   by {info.started_by}"]),
        f"  version   {count_text(info, info.version)} {info.version_sha256}".rstrip(),
        *([f"  epoch     {info.epoch}"] if info.epoch > FIRST_EPOCH else []),
        f"  bundle    {info.bundle_sha256}",
        f"  rounds    {count_text(info, info.num_rounds)} that ended in a version{planned}",
        *([] if plan is None else plan_lines(plan)),
        *([f"  masks     {masks}"] if (masks := mask_text(plan)) else []),
        *(settings_lines(plan, description.rounds[0].round) if plan is not None and description.rounds else ()),
    ]
    if info.newest_evaluation is not None:
        lines.append(f"  held out  {evaluation_text(info.newest_evaluation)}")
    if plan is not None and (best := info.best_evaluation) is not None:
        metric = plan.evaluation.best
        lines.append(f"  best      version {best.version}: {metric} {best.values[metric]:.4f}")
    lines += privacy_lines(info.privacy)
    has_sums = plan is not None and bool(plan.privacy) and not plan.privacy.is_shared
    if has_sums and description.num_digest_only:
        versions = counted(description.num_digest_only, "version")
        lines.append(f"  erased    the updates and the seeds of {versions}: verify starts from the noised sums")
    elif description.num_digest_only or description.num_without_parameters:
        lines.append(
            f"  removed   by retention: the updates of {counted(description.num_digest_only, 'version')}, of which "
            f"verify checks the record alone, and the parameters of {description.num_without_parameters}"
        )
    if grid := description.grid:
        lines.append(f"  grid      {counted(len(grid), 'block')}, steps 2^{min(grid)} to 2^{max(grid)}")
    live = description.live
    deadline = f", {live.deadline_s:.0f} s left" if live.deadline_s else ""
    num_at_work, at_work = live.num_at_work, live.at_work
    lines.append(f"  devices   {num_at_work} at work of {description.num_devices} enrolled{deadline}")
    lines += [f"            {device}{_progress_text(live.progress.get(device))}" for device in at_work]
    if len(at_work) < num_at_work:
        lines.append(f"            and {num_at_work - len(at_work)} more")
    if live.num_waiting:
        lines.append(f"  waiting   {counted(live.num_waiting, 'device')} for work of any run")
    if live.num_gave_up:
        lines.append(f"  gave up   {live.num_gave_up} in this round")
    if live.num_refused:
        lines.append(f"  refused   {live.num_refused} in this round")
    lines += [_reason_line(each) for each in reversed(live.failures)]
    lines += [f"  warning   {warning.text}" for warning in description.warnings]
    if description.saturated.num_devices:
        lines.append(f"  saturated in version {info.version}: {saturated_text(description.saturated)}")
    if (covered := description.coverage) is not None and covered.num_devices:
        entries = ", ".join(f"{entry} {number}" for entry, number in sorted(covered.required.items()))
        lines.append(
            f"  coverage  {covered.num_devices} of {counted(covered.num_enrolled, 'enrolled device')} in version "
            f"{info.version}{f': {entries}' if entries else ''}"
        )
    if description.disk is not None:
        lines.append(f"  disk      {disk_text(description.disk)}")
    lines += [_round_line(info) for info in description.rounds]
    return "\n".join(map(printable, lines)) + "\n"


def disk_text(disk: DiskReport) -> str:
    """Return the space of a coordinator's folder, its growth, and the days until the disk is full."""
    text = f"{disk.used_bytes / 1e6:,.0f} MB used, {disk.free_bytes / 1e6:,.0f} MB free"
    if disk.bytes_per_day is None:
        return text
    left = "" if disk.days_left is None else f", full in {disk.days_left:,.0f} days"
    return f"{text}, {disk.bytes_per_day / 1e6:+,.1f} MB a day{left}"


def _reason_line(count: FailureCount) -> str:
    what = f"several reasons, the last: {count.newest!r}" if count.is_mixed else repr(count.newest)
    return f"  reason    {count.num_times} x {what}"


def _round_line(info: RoundInfo) -> str:
    result = counted(info.num_updates, "update") + (f", version {info.version}" if info.version else "")
    opened = datetime.fromtimestamp(info.opened_at, UTC).isoformat(sep=" ", timespec="seconds")
    return f"  round {info.round}: {info.phase}, from version {info.base_version}, {result}, opened {opened}"

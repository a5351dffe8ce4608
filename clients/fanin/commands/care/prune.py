"""``fanin prune``: remove what the retention of a Run does not keep, or show what would go."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

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
from fanin.commands.console.usage import wrong_usage
from fanin.protos.messages import Prune, Pruned
from fanin.protos.plans import RetentionPlan
from fanin.protos.texts import counted


def main(argv: Sequence[str]) -> int:
    """Run ``fanin prune``."""
    return run_command(prune, argv)


def prune(
    run_id: RunArgument,
    apply: Annotated[bool, typer.Option("--apply", help="Remove it. Without this, nothing changes.")] = False,
    keep_versions: Annotated[
        int | None, typer.Option("--keep-versions", help="Limits of this call instead of those of the plan.")
    ] = None,
    keep_updates: Annotated[int | None, typer.Option("--keep-updates", help="As --keep-versions.")] = None,
    keep_days: Annotated[float | None, typer.Option("--keep-days", help="As --keep-versions.")] = None,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Show what the retention of a run does not keep; with --apply, remove it.

    What an open round, the newest version or a rollback needs stays, and so does the best evaluated version. What is
    less than an hour old stays, too: devices may still download it.
    """
    with wrong_usage():
        limits = RetentionPlan(keep_versions=keep_versions, keep_updates=keep_updates, keep_days=keep_days)
    request = Prune(run_id=run_id, retention=limits if limits else None, apply=apply)
    with connect(state, server, ca, token_file) as operator:
        pruned = operator.prune(request)
    if json:
        write_json(json, {"run_id": run_id, **asdict(pruned)})
    if prints_text(json):
        sys.stdout.write(_text(run_id, pruned))


def _text(run_id: str, pruned: Pruned) -> str:
    limits = pruned.retention or RetentionPlan()
    named = ", ".join(f"{name} = {value:g}" for name, value in asdict(limits).items() if value is not None)
    stored = (
        f"parameters of {counted(pruned.num_stored_versions, 'version')}, "
        f"updates of {counted(pruned.num_stored_rounds, 'round')}"
    )
    lines = [f"run {run_id}: {named or 'no limits'}", f"  stored      {stored}"]
    if pruned.num_versions or pruned.num_rounds or pruned.num_events:
        updates = f"{counted(pruned.num_updates, 'update')} of {counted(pruned.num_rounds, 'round')}"
        does = "removed   " if pruned.applied else "would go  "
        lines += [
            f"  {does}  parameters of {counted(pruned.num_versions, 'version')}, {_size(pruned.version_bytes)}",
            f"  {does}  {updates}, {_size(pruned.update_bytes)}",
            f"  {does}  {counted(pruned.num_events, 'event')}",
        ]
        if not pruned.applied:
            lines.append("  fanin verify then checks only the record of these versions. Remove it with --apply")
    elif limits:
        lines.append("  nothing goes")
    else:
        lines.append(
            "  nothing goes: set [retention] in the plan, or pass --keep-versions, --keep-updates or --keep-days"
        )
    if pruned.old_enough_at:
        when = datetime.fromtimestamp(pruned.old_enough_at, UTC)
        grace = "versions stay for an hour after the next one"
        age = grace if limits.keep_days is None else f"{grace}, and all for keep_days"
        lines.append(
            f"  too young   parameters of {counted(pruned.num_young_versions, 'version')}, updates of "
            f"{counted(pruned.num_young_rounds, 'round')}: {age}. The first may go from {when:%Y-%m-%d %H:%M:%S} UTC on"
        )
    return "\n".join(lines) + "\n"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"

"""``fanin prune``: remove what the retention of a Run does not keep, or show what would go."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
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

GRACE = "  what was replaced less than an hour ago stays in any case"


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
    if not (pruned.num_versions or pruned.num_rounds or pruned.num_events):
        return f"run {run_id}: its retention keeps everything\n{GRACE}\n"
    does = "removed" if pruned.applied else "would remove"
    lines = [
        f"run {run_id}: {does}",
        f"  updates     {pruned.num_updates} of {counted(pruned.num_rounds, 'round')}, {_size(pruned.update_bytes)}",
        f"  parameters  of {counted(pruned.num_versions, 'version')}, {_size(pruned.version_bytes)}",
        f"  events      {pruned.num_events}",
        GRACE,
    ]
    if not pruned.applied:
        lines.append("  fanin verify then checks only the record of these versions. Remove it with --apply")
    return "\n".join(lines) + "\n"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"

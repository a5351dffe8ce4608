"""``fanin backup`` and ``fanin restore``: a copy of a coordinator's folder, and a new folder from it."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fanin.commands.console.terminal import (
    DEFAULT_STATE,
    JsonOption,
    QuietOption,
    StateOption,
    prints_text,
    run_command,
    write_json,
)
from fanin.commands.display.steps import progress
from fanin.protos.texts import counted
from fanin.server.care.backup import Copied, back_up
from fanin.server.care.places import place_of
from fanin.server.care.restore import Restored, restore


def main(argv: Sequence[str]) -> int:
    """Run ``fanin backup``."""
    return run_command(backup, argv)


def restore_main(argv: Sequence[str]) -> int:
    """Run ``fanin restore``."""
    return run_command(restore_folder, argv, "restore")


def backup(
    target: Annotated[
        str,
        typer.Argument(
            metavar="DIR|URL", help="Folder of the backup, or s3://BUCKET/PREFIX: new, or of an earlier backup."
        ),
    ],
    state: StateOption = DEFAULT_STATE,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Verify every file of earlier backups, in the backup and in --state, not a 30th."
        ),
    ] = False,
    quiet: QuietOption = False,
    json: JsonOption = "",
) -> int:
    """Back up a coordinator's folder while it serves. A repeated backup copies only what is new.

    The backup has the keys that sign versions: keep it as secret as the folder. It verifies a 30th of the files of
    earlier backups, and replaces damaged ones. Exit status 1 if a file of the coordinator is missing or damaged.
    """
    with progress("backup", quiet=quiet or not prints_text(json)) as step:
        copied = back_up(state, place_of(target), step, verifies_all=verify)
    if json:
        row = asdict(copied)
        write_json(json, {**row.pop("manifest"), **row})
    if prints_text(json):
        sys.stdout.write(_copied_text(target, copied))
    return int(bool(copied.manifest.lost or copied.damaged))


def restore_folder(
    source: Annotated[str, typer.Argument(metavar="DIR|URL", help="Folder or URL of the backup.")],
    state: Annotated[Path, typer.Option("--state", help="The new folder: missing or empty.")],
    was_stopped: Annotated[
        bool,
        typer.Option(
            "--was-stopped",
            help="The coordinator was stopped before this backup and never served again: its runs continue at once.",
        ),
    ] = False,
    quiet: QuietOption = False,
    json: JsonOption = "",
) -> None:
    """Write a new coordinator's folder from a backup, and verify every file.

    Its runs then wait for fanin reclaim, because devices may have seen later versions.
    """
    with progress("restore", quiet=quiet or not prints_text(json)) as step:
        restored = restore(place_of(source), state, step, was_stopped=was_stopped)
    if json:
        write_json(
            json,
            {**asdict(restored.manifest), "waiting": list(restored.waiting), "uncharged": list(restored.uncharged)},
        )
    if prints_text(json):
        sys.stdout.write(_restored_text(state, restored))


def _copied_text(target: str, copied: Copied) -> str:
    manifest = copied.manifest
    sizes = f"{counted(manifest.num_files, 'file')}, {manifest.size_bytes / 1e6:,.1f} MB"
    new = f"{counted(copied.num_new_files, 'file')} and {copied.new_bytes / 1e6:,.1f} MB new"
    lines = [
        f"backup {target}: {sizes}; {new}, {copied.num_verified:,} others verified",
        *(f"  was damaged in the backup, replaced: {path}" for path in copied.healed),
        *(f"  missing or damaged in the coordinator's folder, whole in the backup: {path}" for path in copied.damaged),
        *(f"  missing or damaged in the coordinator's folder and in the backup: {path}" for path in manifest.lost),
    ]
    return "\n".join(lines) + "\n"


def _restored_text(state: Path, restored: Restored) -> str:
    lines = [
        f"restored {state} from {counted(restored.manifest.num_files, 'file')}; start it: fanin serve --state {state}"
    ]
    if restored.waiting:
        lines.append("  devices may have seen later versions, so the publisher continues each run:")
        target = restored.waiting[0] if len(restored.waiting) == 1 else "--all"
        lines.append(f"    fanin reclaim {target} --key publisher.key --state {state}")
        if restored.uncharged:
            lines.append(
                "  an administrator charges what private runs released after the backup, at least N rounds of each run:"
            )
        lines += [f"    fanin privacy charge {name} --rounds N --state {state}" for name in restored.uncharged]
        lines.append(f"  then: fanin resume RUN --state {state}")
    return "\n".join(lines) + "\n"

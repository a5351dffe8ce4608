"""Integrity of the checkpoints in a folder: which ones can be loaded, and the faults of the others.

A checkpoint can be loaded if its ``progress.json`` is valid and each of its files matches the digest in it. Checkpoints
after the one that LATEST names were never finished and are ignored. If LATEST is missing or damaged, every checkpoint
with a ``progress.json`` counts, because that file is written after all others.

Invariant: nothing is unpickled before its digest matches. This module does not import torch.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fanin.datacenter.checkpoints.progress import (
    MARKER,
    Progress,
    checkpoint_steps,
    folder_name,
    marked_step,
    read_progress,
)
from fanin.protos.errors import Corrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointScan:
    """The complete checkpoints of a folder, newest first, and the ``faults`` of the folder and the other ones."""

    complete: tuple[Progress, ...] = ()
    faults: tuple[str, ...] = ()


def scan(folder: Path) -> CheckpointScan:
    """Return the checkpoints in a folder, judged by LATEST and each ``progress.json`` alone."""
    if not folder.is_dir():
        return CheckpointScan()
    complete: list[Progress] = []
    faults: list[str] = []
    marked = None
    try:
        marked = marked_step(folder)
    except Corrupted as exc:
        faults.append(str(exc))
    unmarked = marked is None and not faults
    steps = [step for step in checkpoint_steps(folder) if marked is None or step <= marked]
    if marked is not None and marked not in steps:
        faults.append(f"{folder / MARKER}: names {folder_name(marked)}, which is not there")
    for step in reversed(steps):
        try:
            progress = read_progress(folder / folder_name(step))
        except Corrupted as exc:
            faults.append(str(exc))
            continue
        if progress is not None:
            complete.append(progress)
        elif step == marked:
            faults.append(f"{folder / folder_name(step)}: has no progress.json, though {MARKER} names it")
    if unmarked and complete:
        faults.append(f"{folder / MARKER}: is missing, though there are whole checkpoints")
    return CheckpointScan(complete=tuple(complete), faults=tuple(faults))


def digests_of(checkpoint: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of files of a checkpoint, by name. Raises OSError."""
    digests = {}
    for name in names:
        with (checkpoint / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def faults_of(checkpoint: Path, digests: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Return the faults of the files ``names`` of a checkpoint; empty if all match their digests."""
    faults = []
    for name in names:
        try:
            digest = digests_of(checkpoint, [name])[name]
        except OSError as exc:
            faults.append(f"{checkpoint / name}: cannot be read ({exc.strerror})")
            continue
        if digest != digests[name]:
            faults.append(f"{checkpoint / name}: digest mismatch: received {digest}, expected {digests[name]}")
    return faults

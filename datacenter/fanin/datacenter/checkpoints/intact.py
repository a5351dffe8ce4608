"""Which checkpoints of a folder can be taken, the newest first, and what is wrong with the others.

A checkpoint can be taken if its ``progress.json`` is right and each file has the digest that stands there. Steps after
the one that LATEST names were never finished and are left out. If LATEST itself is missing or damaged, every checkpoint
counts whose ``progress.json`` is there: that file is written after all others. Nothing is unpickled before its digest
was compared. Needs no torch.
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
class Found:
    """The checkpoints of a folder that may be taken, newest first, and the ``faults`` of newer or other ones."""

    whole: tuple[Progress, ...] = ()
    faults: tuple[str, ...] = ()


def find(folder: Path) -> Found:
    """The checkpoints in a folder, as far as LATEST and each ``progress.json`` tell."""
    if not folder.is_dir():
        return Found()
    whole: list[Progress] = []
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
            whole.append(progress)
        elif step == marked:
            faults.append(f"{folder / folder_name(step)}: has no progress.json, though {MARKER} names it")
    if unmarked and whole:
        faults.append(f"{folder / MARKER}: is missing, though there are whole checkpoints")
    return Found(whole=tuple(whole), faults=tuple(faults))


def digests_of(checkpoint: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of files of a checkpoint, in hexadecimal, by name. Raises OSError."""
    found = {}
    for name in names:
        with (checkpoint / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def faults_of(checkpoint: Path, digests: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """What is wrong with the files of a checkpoint that ``names`` are; empty if they are as they were written."""
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

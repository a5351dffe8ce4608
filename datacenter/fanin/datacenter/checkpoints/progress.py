"""Progress of a training job, and the marker that names its newest complete checkpoint.

A folder of checkpoints::

    step-00000040/      the ranks' files, and progress.json, written last, with the SHA-256 of all others
    step-00000050/
    LATEST              the name of the newest complete checkpoint

Invariant: ``LATEST`` is written aside, synced and renamed after all files of its checkpoint are on the disk. An
interrupted save is therefore never loaded, however many of its files exist. Later damage is detected by the digests
(``fanin.datacenter.checkpoints.integrity``). The launcher reads ``LATEST`` too, because torchrun exits with status 1
even after an orderly stop. Nothing here is pickled, and nothing needs torch.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Final

from fanin.protos.errors import Corrupted, InvalidInput

FORMAT: Final = 2
MARKER: Final = "LATEST"
PROGRESS_FILE: Final = "progress.json"
DIGEST: Final = "digest"
COUNTS: Final = ("step", "epoch", "position", "seed")
FOLDER_NAME: Final = re.compile(r"step-(\d{8,})\Z", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a training job: equal on every rank, and independent of the mesh.

    Attributes:
        step: Optimizer steps completed.
        epoch: Current epoch, from 0.
        position: Samples of the epoch's global order that were already used.
        seed: Seed of that order.
        measures: Further numbers to store, such as the best loss so far.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    seed: int = 0
    measures: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise InvalidInput(
                    f"progress: got {name} {value!r}, expected a whole number, 0 or more", code="FN-1339"
                )
        for name, number in self.measures.items():
            if type(number) not in (int, float) or not math.isfinite(number):
                raise InvalidInput(f"progress: got {name} {number!r}, expected a finite number", code="FN-1339")


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in a folder, complete or not, oldest first."""
    matches = (FOLDER_NAME.match(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def marked_step(folder: Path) -> int | None:
    """Return the step of the checkpoint that LATEST names; None if there is no such file. Raises Corrupted."""
    row = _read(folder / MARKER, {"format", "folder"})
    if row is None:
        return None
    name = row["folder"]
    match = FOLDER_NAME.match(name) if isinstance(name, str) else None
    if match is None:
        raise Corrupted(
            f"{folder / MARKER}: got folder {name!r}, expected a checkpoint's, such as {folder_name(40)}",
            code="FN-1337",
        )
    return int(match[1])


def latest(folder: Path) -> Progress | None:
    """Return the progress of the checkpoint that LATEST names; None without LATEST. Raises Corrupted."""
    step = marked_step(folder)
    if step is None:
        return None
    progress = read_progress(folder / folder_name(step))
    if progress is None:
        raise Corrupted(f"{folder / MARKER}: names {folder_name(step)}, which is missing or incomplete", code="FN-1337")
    return progress


def describe_latest(folder: Path) -> str:
    """Return, for an error, which checkpoint in a folder remains: the newest complete one, or none."""
    try:
        progress = latest(folder)
    except Corrupted:
        # The ranks look for an older one, and report the fault, when the job resumes.
        return f"{MARKER} in {folder} names no complete one"
    return f"{folder} has no earlier one" if progress is None else f"{folder_name(progress.step)} stays"


def read_progress(checkpoint: Path) -> Progress | None:
    """Return the progress of one checkpoint; None if it is incomplete. Raises Corrupted."""
    row = _progress_row(checkpoint)
    if row is None:
        return None
    path = checkpoint / PROGRESS_FILE
    counts = {name: value for name in COUNTS if isinstance(value := row[name], int)}
    measures = row["measures"]
    if not isinstance(measures, dict) or len(counts) < len(COUNTS):
        raise Corrupted(
            f"{path}: got {str(row)[:80]}, expected whole numbers, and an object of measures", code="FN-1336"
        )
    if checkpoint.name != folder_name(counts["step"]):
        raise Corrupted(
            f"{path}: got step {counts['step']}, expected that of its folder, {checkpoint.name}", code="FN-1336"
        )
    try:
        return Progress(**counts, measures=measures)
    except InvalidInput as exc:
        raise Corrupted(f"{path}: {exc}", code=exc.code) from exc


def read_digests(checkpoint: Path) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of the other files of a checkpoint, by name. Raises Corrupted."""
    row, path = _progress_row(checkpoint), checkpoint / PROGRESS_FILE
    if row is None:
        raise Corrupted(f"{path}: is missing, expected the digests of the checkpoint's files", code="FN-1336")
    files = row["files"]
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise Corrupted(
            f"{path}: got files {str(files)[:80]}, expected an object from names to digests", code="FN-1336"
        )
    return files


def write_progress(checkpoint: Path, progress: Progress, digests: Mapping[str, str]) -> None:
    """Mark a checkpoint as complete. Sync all of its other files, which have these digests, before you call it."""
    row = {"format": FORMAT, **asdict(progress), "files": dict(digests)}
    _write(checkpoint / PROGRESS_FILE, {**row, DIGEST: _digest(row)})


def write_marker(folder: Path, step: int) -> None:
    """Point LATEST to the checkpoint after ``step`` steps."""
    _sync(folder / folder_name(step))
    _write(folder / MARKER, {"format": FORMAT, "folder": folder_name(step)})


def _write(path: Path, row: Mapping[str, object]) -> None:
    draft = path.with_name(f"{path.name}.new")
    with draft.open("wb") as file:
        file.write(json.dumps(row, indent=1).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Sync the directory entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(row: Mapping[str, object]) -> str:
    return sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def _progress_row(checkpoint: Path) -> dict[str, object] | None:
    """Return the contents of progress.json after its digest was compared; None without the file. Raises Corrupted."""
    path = checkpoint / PROGRESS_FILE
    row = _read(path, {"format", "files", DIGEST, *(each.name for each in fields(Progress))})
    if row is None:
        return None
    digest = row.pop(DIGEST)
    if digest != _digest(row):
        raise Corrupted(
            f"{path}: digest mismatch: received {digest!r}, expected {_digest(row)}; the file was changed",
            code="FN-1336",
        )
    return row


def _read(path: Path, keys: set[str]) -> dict[str, object] | None:
    try:
        row = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise Corrupted(f"{path}: cannot be read ({exc.strerror})", code="FN-1336") from exc
    except (ValueError, RecursionError) as exc:
        raise Corrupted(f"{path}: not JSON, expected an object with format {FORMAT}", code="FN-1336") from exc
    if not isinstance(row, dict) or row.get("format") != FORMAT or set(row) != keys:
        raise Corrupted(
            f"{path}: got {str(row)[:80]}, expected format {FORMAT} and the keys {', '.join(sorted(keys))}",
            code="FN-1336",
        )
    return row

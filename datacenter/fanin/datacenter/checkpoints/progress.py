"""Where a training stands, and the marker that says which checkpoint is whole.

A folder of checkpoints::

    step-00000040/      what each rank wrote, and progress.json, the last of its files, with the SHA-256 of all others
    step-00000050/
    LATEST              the name of the newest one that is whole

``LATEST`` is written aside, synced and renamed once everything that it names is on the disk: a save that was
interrupted is never taken, however much of it is there. What was damaged later is found by its digest
(``fanin.datacenter.checkpoints.intact``). A launcher judges by it too, since torchrun ends with status 1
when it is stopped in order. Nothing here is pickled, and nothing needs torch.
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
    """How far a training is; the same on every rank, and of no mesh.

    ``step``: optimizer steps done. ``position``: samples of ``epoch``'s global order that were taken, an order that
    ``seed`` decides. ``measures``: numbers that go along, such as the best loss so far.
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
                raise InvalidInput(f"progress: got {name} {value!r}, expected a whole number, 0 or more")
        for name, number in self.measures.items():
            if type(number) not in (int, float) or not math.isfinite(number):
                raise InvalidInput(f"progress: got {name} {number!r}, expected a finite number")


def folder_name(step: int) -> str:
    """What the checkpoint after so many steps is called."""
    return f"step-{step:08d}"


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of all checkpoints in a folder, whole or not, oldest first."""
    found = (FOLDER_NAME.match(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def marked_step(folder: Path) -> int | None:
    """The step that LATEST names; None if there is no such file. Raises Corrupted."""
    row = _read(folder / MARKER, {"format", "folder"})
    if row is None:
        return None
    name = row["folder"]
    match = FOLDER_NAME.match(name) if isinstance(name, str) else None
    if match is None:
        raise Corrupted(f"{folder / MARKER}: got folder {name!r}, expected a checkpoint's, such as {folder_name(40)}")
    return int(match[1])


def latest(folder: Path) -> Progress | None:
    """How far the checkpoint is that LATEST names; None if there is none. Raises Corrupted."""
    step = marked_step(folder)
    if step is None:
        return None
    progress = read_progress(folder / folder_name(step))
    if progress is None:
        raise Corrupted(f"{folder / MARKER}: names {folder_name(step)}, which is not there or not whole")
    return progress


def read_progress(checkpoint: Path) -> Progress | None:
    """How far one checkpoint is; None if it is not whole. Raises Corrupted."""
    row = _progress_row(checkpoint)
    if row is None:
        return None
    path = checkpoint / PROGRESS_FILE
    counts = {name: value for name in COUNTS if isinstance(value := row[name], int)}
    measures = row["measures"]
    if not isinstance(measures, dict) or len(counts) < len(COUNTS):
        raise Corrupted(f"{path}: got {str(row)[:80]}, expected whole numbers, and an object of measures")
    if checkpoint.name != folder_name(counts["step"]):
        raise Corrupted(f"{path}: got step {counts['step']}, expected that of its folder, {checkpoint.name}")
    try:
        return Progress(**counts, measures=measures)
    except InvalidInput as exc:
        raise Corrupted(f"{path}: {exc}") from exc


def read_digests(checkpoint: Path) -> dict[str, str]:
    """The SHA-256, in hexadecimal, of each other file of a checkpoint, by name. Raises Corrupted."""
    row, path = _progress_row(checkpoint), checkpoint / PROGRESS_FILE
    if row is None:
        raise Corrupted(f"{path}: is missing, expected the digests of the checkpoint's files")
    files = row["files"]
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise Corrupted(f"{path}: got files {str(files)[:80]}, expected an object from names to digests")
    return files


def write_progress(checkpoint: Path, progress: Progress, digests: Mapping[str, str]) -> None:
    """Say that a checkpoint is whole: all of its other files, with these digests, must be on the disk."""
    row = {"format": FORMAT, **asdict(progress), "files": dict(digests)}
    _write(checkpoint / PROGRESS_FILE, {**row, DIGEST: _digest(row)})


def write_marker(folder: Path, step: int) -> None:
    """Make the checkpoint after so many steps the one that is taken."""
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
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(row: Mapping[str, object]) -> str:
    return sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def _progress_row(checkpoint: Path) -> dict[str, object] | None:
    """What progress.json holds, if its digest is right; None if it is missing. Raises Corrupted."""
    path = checkpoint / PROGRESS_FILE
    row = _read(path, {"format", "files", DIGEST, *(each.name for each in fields(Progress))})
    if row is None:
        return None
    digest = row.pop(DIGEST)
    if digest != _digest(row):
        raise Corrupted(f"{path}: digest mismatch: received {digest!r}, expected {_digest(row)}; the file was changed")
    return row


def _read(path: Path, keys: set[str]) -> dict[str, object] | None:
    try:
        row = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise Corrupted(f"{path}: cannot be read ({exc.strerror})") from exc
    except (ValueError, RecursionError) as exc:
        raise Corrupted(f"{path}: not JSON, expected an object with format {FORMAT}") from exc
    if not isinstance(row, dict) or row.get("format") != FORMAT or set(row) != keys:
        raise Corrupted(f"{path}: got {str(row)[:80]}, expected format {FORMAT} and the keys {', '.join(sorted(keys))}")
    return row

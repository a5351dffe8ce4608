"""The unfinished training of a device, so that a loss of power costs some seconds of it and not all.

A trainer writes its state from time to time, and reads it when the same Assignment begins again. The content is the
trainer's own. The file names the Assignment, and its label the Bundle and the Version. So the state of another training
is never used. It ends with its Assignment: with the stored Update, or when the device gives the Assignment up.

A file has the form::

    offset  size  field
    0       8     magic b"fanin-t1" (the digit is the format number)
    8       32    SHA-256 of the rest
    40      L     label: JSON ["ASSIGNMENT","BUNDLE SHA-256","VERSION SHA-256"] in ASCII, then a line feed
    40+L          the content of the trainer

A training must not fail because it cannot be saved. A short or full disk, and a state beyond the budget, are logged
once, and the training continues without.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from fanin.clients.device.storage.files import own_files, replace
from fanin.protos.errors import StorageFull, StorageUnavailable
from fanin.protos.messages import Assignment

LOG = logging.getLogger("fanin.clients")
MAGIC: Final = b"fanin-t1"
DEFAULT_MAX_BYTES: Final = 1 << 30
"""Most bytes of a saved training: 128 million parameters with Adam's two states need 1.5 GB, and are not saved."""
RESERVE_BYTES: Final = 64 << 20
"""Bytes that stay free on the disk: the device still has to store its Update, and the system has files of its own."""
_LABEL: Final = len(MAGIC) + hashlib.sha256().digest_size
_TRAINING_NAME: Final = re.compile(r"[^.].*\.training(\.new)?", re.ASCII)


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write to the disk of a folder."""
    return shutil.disk_usage(folder).free


class TrainingStore:
    """The saved training in a folder. A device works for one Assignment at a time, so there is at most one.

    Args:
        folder: The folder; it is created if it is missing.
        max_bytes: Most bytes of a saved training.
        free: Returns the free bytes of the disk of a folder.
    """

    def __init__(
        self, folder: Path, max_bytes: int = DEFAULT_MAX_BYTES, free: Callable[[Path], int] = free_bytes
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._free = free
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, assignment: Assignment) -> "TrainingFile":
        """Return the saved training of an Assignment, which may be empty. Those of others are removed."""
        path = self._folder / f"{assignment.assignment_id}.training"
        for other in own_files(self._folder, _TRAINING_NAME):
            if other != path:
                other.unlink()
        return TrainingFile(path, label_of(assignment), self._problem_of)

    def clear(self) -> None:
        """Remove all saved trainings."""
        for path in own_files(self._folder, _TRAINING_NAME):
            path.unlink()

    def _problem_of(self, size_bytes: int) -> str:
        """Return why a training of this size cannot be saved; empty if it can."""
        if size_bytes > self._max_bytes:
            return f"its state has {size_bytes} bytes, at most {self._max_bytes} are saved"
        free = self._free(self._folder)
        if free - size_bytes < RESERVE_BYTES:
            return f"its state has {size_bytes} bytes, and {free} are free on the disk; {RESERVE_BYTES} stay free"
        return ""


class TrainingFile:
    """The saved training of one Assignment. See ``SavedTraining``."""

    def __init__(self, path: Path, label: bytes, problem_of: Callable[[int], str]) -> None:
        self._path = path
        self._label = label
        self._problem_of = problem_of
        self._has_failed = False

    def read(self) -> memoryview | None:
        """Return the content that was written last; None without one. Damage is logged."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            self._warn(f"cannot be read ({exc.strerror})")
            return None
        content = memoryview(data)
        if data[: len(MAGIC)] != MAGIC or hashlib.sha256(content[_LABEL:]).digest() != data[len(MAGIC) : _LABEL]:
            self._warn("is damaged on this disk, or has another format")
            return None
        end = _LABEL + len(self._label)
        if data[_LABEL:end] != self._label:
            self._warn("is of another bundle or version")
            return None
        return content[end:]

    def write(self, pieces: Sequence[bytes | memoryview]) -> bool:
        """Replace the content durably. Return False if it cannot be saved; the reason is logged once."""
        size_bytes = _LABEL + len(self._label) + sum(len(piece) for piece in pieces)
        problem = self._problem_of(size_bytes)
        if not problem:
            digest = hashlib.sha256(self._label)
            for piece in pieces:
                digest.update(piece)
            try:
                replace(self._path, (MAGIC, digest.digest(), self._label, *pieces))
                return True
            except (StorageFull, StorageUnavailable) as exc:
                problem = str(exc)
        if not self._has_failed:
            self._has_failed = True
            LOG.warning("the training continues, but cannot be saved: %s", problem)
        return False

    def _warn(self, problem: str) -> None:
        LOG.warning("the saved training %s %s; the training begins anew", self._path.name, problem)


def label_of(assignment: Assignment) -> bytes:
    """Return the label of a saved training."""
    names = [assignment.assignment_id, assignment.bundle.manifest.sha256, assignment.version.sha256]
    return json.dumps(names, separators=(",", ":")).encode() + b"\n"

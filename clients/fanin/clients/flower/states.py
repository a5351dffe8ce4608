"""The state of a Flower app between Rounds on a device's disk: one file for each Run, lineage and Round.

A file has ``context.state`` of the app and the arrays that stay on the device, both after the training of a Round. It
is pending until the next Assignment of the Run, which names the Round whose state counts. A failed Round is not named,
and the app starts from the state before it.

A file consists of the magic b"fanin-f1", the SHA-256 (32 bytes) of the remaining bytes, and an uncompressed .npz file.
"""

import hashlib
import io
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np

from fanin.clients.device.storage.files import own_files, replace
from fanin.clients.device.updates import state_label
from fanin.edge.tensors import Array
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput

LOG = logging.getLogger("fanin.clients")
MAGIC: Final = b"fanin-f1"
MAX_RUNS: Final = 4
"""Runs whose states are kept. The end of a Run is not announced."""
MAX_STATE_BYTES: Final = 64 << 20
"""Largest ``context.state``. It grows with each Round if an app only appends to it."""
_HEAD: Final = len(MAGIC) + hashlib.sha256().digest_size
_STATE_NAME: Final = re.compile(r"(?P<run>[^.].*)\.(?P<lineage>[0-9]+)\.(?P<round>[0-9]+)\.flower(\.new)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerState:
    """The state of an app.

    Attributes:
        context: ``context.state``, serialized; empty in the beginning.
        local: The arrays that stay on the device, by name.
    """

    context: bytes = b""
    local: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if len(self.context) > MAX_STATE_BYTES:
            raise InvalidInput(
                f"context.state: got {len(self.context)} bytes, expected at most {MAX_STATE_BYTES}; let the app remove "
                "records that it no longer needs",
                code="FN-0912",
            )


class AppStates(Protocol):
    """The states of an app."""

    def get(self, assignment: m.Assignment, first: FlowerState) -> FlowerState:
        """Return the state that an Assignment names: ``first``, or that after an earlier Round."""
        ...

    def put(self, assignment: m.Assignment, state: FlowerState) -> None:
        """Store the state after the training of an Assignment."""
        ...


class FlowerStates:
    """The states in a folder, which is created if it is missing. See AppStates."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def get(self, assignment: m.Assignment, first: FlowerState) -> FlowerState:
        """Return the state that an Assignment names: ``first``, or that after an earlier Round.

        A missing or damaged file is logged, and the app starts from ``first``.
        """
        number = assignment.state.round
        if not number:
            return first
        path = self._path(assignment, number)
        try:
            state = _decode(path.read_bytes())
            os.utime(path)
        except (OSError, ValueError, LookupError) as exc:
            LOG.warning("%s: cannot be read (%s); the app starts without a state", state_label(assignment, number), exc)
            return first
        return FlowerState(
            context=state.context, local={name: state.local.get(name, first.local[name]) for name in first.local}
        )

    def put(self, assignment: m.Assignment, state: FlowerState) -> None:
        """Store the state after the training of an Assignment, and remove those that no Assignment names again.

        Raises:
            StorageFull: The disk is full.
        """
        replace(self._path(assignment, assignment.round), _encode(state))
        kept = {self._path(assignment, number).name for number in (assignment.state.round, assignment.round)}
        paths = sorted(own_files(self._folder, _STATE_NAME), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        runs = list(dict.fromkeys([assignment.run_id, *map(_run_of, paths)]))[:MAX_RUNS]
        for path in paths:
            if _run_of(path) not in runs or (_run_of(path) == assignment.run_id and path.name not in kept):
                path.unlink(missing_ok=True)

    def _path(self, assignment: m.Assignment, number: int) -> Path:
        return self._folder / f"{assignment.run_id}.{assignment.state.lineage}.{number}.flower"


def _run_of(path: Path) -> str:
    match = _STATE_NAME.fullmatch(path.name)
    assert match is not None, "own_files returns files of this name"
    return match["run"]


def _encode(state: FlowerState) -> bytes:
    buffer = io.BytesIO()
    # By position: a name of the app may be any text.
    arrays = {f"a{index}": value for index, value in enumerate(state.local.values())}
    names = np.array(list(state.local), dtype=np.str_)
    np.savez(buffer, context=np.frombuffer(state.context, np.uint8), names=names, **arrays)  # type: ignore[arg-type]
    content = buffer.getvalue()
    return MAGIC + hashlib.sha256(content).digest() + content


def _decode(data: bytes) -> FlowerState:
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(data[_HEAD:]).digest() != data[len(MAGIC) : _HEAD]:
        raise ValueError("damaged, or of another format")
    with np.load(io.BytesIO(data[_HEAD:]), allow_pickle=False) as file:
        local = {str(name): file[f"a{index}"] for index, name in enumerate(file["names"])}
        return FlowerState(context=file["context"].tobytes(), local=local)

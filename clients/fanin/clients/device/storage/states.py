"""The states of stages on a device's disk, one file for each Run and Round.

A state is written and synced before the header of its Update, so there is no Update without its state. It is pending
until the next Assignment of the Run, which names the Round whose state counts.

A file has the form::

    offset  size  field
    0       8     magic b"fanin-s1" (the digit is the format number)
    8       32    SHA-256 of the rest
    40      L     label: JSON ["RUN",LINEAGE,ROUND] in ASCII, then a line feed
    40+L          the tensors "STAGE/TENSOR" (num_values,) in canonical form (``fanin.edge.tensors``)

A state belongs to one device. The file does not name the device, so do not copy it to another device's folder.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from fanin.clients.device.storage.files import own_files, replace
from fanin.edge.codecs.pipeline import States
from fanin.edge.tensors import TensorTable, decode_parameters, encode_parameters
from fanin.protos.chunks import short
from fanin.protos.errors import Corrupted, InvalidInput, NotFound

MAGIC: Final = b"fanin-s1"
MAX_RUNS: Final = 4
"""Runs whose states are kept. A state has the size of the parameters, and the end of a Run is not announced."""
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a full disk. The state is not lost: the device tries again later."""
_LABEL: Final = len(MAGIC) + hashlib.sha256().digest_size
_STATE_NAME: Final = re.compile(r"(?P<run>[^.].*)\.(?P<round>[0-9]+)\.state(?P<draft>\.new)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLabel:
    """Names the state after a device's Update of one Round."""

    run_id: str
    lineage: int
    round: int

    def __str__(self) -> str:
        return f"state of run {self.run_id}, round {self.round}"


class StateStore:
    """The states in a folder, of at most ``max_runs`` Runs."""

    def __init__(self, folder: Path, max_runs: int = MAX_RUNS) -> None:
        self._folder = folder
        self._max_runs = max_runs
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, label: StateLabel, states: States) -> None:
        """Store the states of all stages. They are durable before this returns. Raises StorageFull."""
        replace(self._path(label), encode_states(label, states))

    def get(self, label: StateLabel, first: States) -> States:
        """Return stored states.

        Args:
            label: Their label.
            first: States of the same form.

        Raises:
            NotFound: There is no file.
            Corrupted: The file cannot be read or is damaged, or has another format, lineage or form.
        """
        path = self._path(label)
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError as exc:
            raise NotFound(
                f"{label}: got no file {path.name}, expected the one of that update", code="FN-0836"
            ) from exc
        except OSError as exc:
            if exc.errno in FULL:
                raise
            raise Corrupted(f"{label}: {path.name} cannot be read ({exc.strerror})", code="FN-0837") from exc
        return decode_states(data, label, first)

    def rounds(self, run_id: str) -> tuple[int, ...]:
        """Return the Rounds of a Run with a state, in rising order."""
        return tuple(
            sorted(int(number) for run, number, draft in self._files().values() if (run, draft) == (run_id, None))
        )

    def keep(self, run_id: str, rounds: Collection[int]) -> None:
        """Remove all other states of a Run, and all states of Runs that are not among the last used ``max_runs``."""
        names = {(run_id, str(number), None) for number in rounds}
        files = self._files()
        by_age = sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)
        runs = tuple(dict.fromkeys([run_id, *(files[path][0] for path in by_age)]))[: self._max_runs]
        for path, name in files.items():
            if name[0] not in runs or (name[0] == run_id and name not in names):
                path.unlink()

    def _files(self) -> dict[Path, tuple[str, str, str | None]]:
        """Return Run, Round and draft mark of each file."""
        return {
            path: (match["run"], match["round"], match["draft"])
            for path in own_files(self._folder, _STATE_NAME)
            if (match := _STATE_NAME.fullmatch(path.name))
        }

    def _path(self, label: StateLabel) -> Path:
        return self._folder / f"{label.run_id}.{label.round}.state"


def encode_states(label: StateLabel, states: States) -> bytes:
    """Return the bytes of a file."""
    tensors = {f"{stage}/{name}": values for stage, state in states.items() for name, values in state.items()}
    table = TensorTable.of({name: values.shape for name, values in tensors.items()})
    line = json.dumps([label.run_id, label.lineage, label.round], separators=(",", ":")).encode() + b"\n"
    content = line + encode_parameters(table, table.flatten(tensors))
    return MAGIC + hashlib.sha256(content).digest() + content


def decode_states(data: bytes, label: StateLabel, first: States) -> States:
    """Return the states in the bytes of a file, read-only. See ``StateStore.get``."""
    if data[: len(MAGIC)] != MAGIC:
        raise Corrupted(f"{label}: got the format {data[: len(MAGIC)]!r}, expected {MAGIC!r}", code="FN-0837")
    digest, expected = hashlib.sha256(memoryview(data)[_LABEL:]).hexdigest(), data[len(MAGIC) : _LABEL].hex()
    if digest != expected:
        sides = f"got the digest {short(digest)}, expected {short(expected)}"
        if short(digest) == short(expected):
            sides = f"got the digest {digest}, expected {expected}"
        raise Corrupted(f"{label}: damaged on this disk: {sides}", code="FN-0837")
    try:
        return _parsed(data, label, first)
    except (ValueError, TypeError, RecursionError, InvalidInput) as exc:
        raise Corrupted(
            f"{label}: got another content than this fanin writes ({exc}), expected its form", code="FN-0837"
        ) from exc


def _parsed(data: bytes, label: StateLabel, first: States) -> States:
    """Return the states in bytes whose digest is right. Raises Corrupted, or the errors of the parsers."""
    end = data.index(b"\n", _LABEL)
    run_id, lineage, number = json.loads(data[_LABEL:end])
    if (run_id, lineage, number) != (label.run_id, label.lineage, label.round):
        raise Corrupted(
            f"{label}: got one of run {run_id}, lineage {lineage}, round {number}, expected run {label.run_id}, "
            f"lineage {label.lineage}, round {label.round}",
            code="FN-0837",
        )
    table, flat = decode_parameters(data[end + 1 :])
    shapes = {f"{stage}/{name}": values.shape for stage, state in first.items() for name, values in state.items()}
    if table != TensorTable.of(shapes):
        actual = {spec.name: spec.shape for spec in table.specs}
        raise Corrupted(f"{label}: got the tensors {actual}, expected {dict(sorted(shapes.items()))}", code="FN-0837")
    if not np.isfinite(flat).all():
        raise Corrupted(f"{label}: got NaN or infinity, expected finite values", code="FN-0837")
    views = table.views(flat)
    return {stage: {name: views[f"{stage}/{name}"] for name in state} for stage, state in first.items()}

"""A backup of a coordinator's folder, while it serves, in a folder of its own or in an object store (``places``).

    manifest.json          replaced last: what is not in it is not part of the backup
    database/SHA256.db     a snapshot of fanin.db
    secrets/SHA256         the files of tls/ and tokens/
    blobs/, updates/       the files that the database names, as in the coordinator's folder

Chunks and payloads never change and are named by their digests, so a repeated backup copies only what is new. The files
are copied after the database: all that it names is there already. If retention removes one of them meanwhile, the
backup takes a later snapshot. After the manifest was replaced, files that it no longer needs are removed. So a backup
that is interrupted leaves the one before it whole.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fanin.edge.tensors import sha256_hex
from fanin.protos.errors import Conflict, Corrupted, InvalidInput
from fanin.protos.release import __version__
from fanin.server.care.places import BackupPlace, FolderPlace, file_digest
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.disk import Durability
from fanin.server.storage.sqlite.care import StoredFile, named_files
from fanin.server.storage.sqlite.engine import copy_database, form_of, open_engine
from fanin.server.storage.sqlite.runs import SqliteRuns

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
SECRET_FOLDERS: Final = ("tls", "tokens")
CONTENTS: Final = ("blobs", "updates", "database", "secrets", MANIFEST, "lock")
MAX_SNAPSHOTS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupManifest:
    """The manifest of a backup.

    Attributes:
        format: The form of the backup.
        release: The fanin that wrote it.
        form: The form of the database.
        created_at_s: Wall time.
        database: The digest of the database.
        secrets: The digest of each file of ``tls`` and ``tokens`` by its path.
        num_files: Chunks and payloads.
        size_bytes: Their bytes, and those of the database.
        newest: The newest Version of each Run, as (epoch, number).
        lost: Paths of files that the record names and that are missing or damaged in the coordinator's folder.
    """

    format: int
    release: str
    form: str
    created_at_s: float
    database: str
    secrets: dict[str, str]
    num_files: int
    size_bytes: int
    newest: dict[str, tuple[int, int]]
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A finished backup, and what was new in it."""

    manifest: BackupManifest
    num_new_files: int
    new_bytes: int


class _Vanished(Exception):
    """Retention removed a file after the snapshot."""


def back_up(state: Path, place: BackupPlace, report: Callable[[str], None]) -> Copied:
    """Copy a coordinator's folder into a backup, new or repeated.

    Args:
        state: The folder. A coordinator may serve from it.
        place: Where the backup is.
        report: Receives the steps.

    Raises:
        InvalidInput: The place has other files.
        Conflict: Another process writes this backup.
        Corrupted: The record is damaged, or of another fanin.
        StorageFull: No space is left.
        StorageUnavailable: The object store cannot be reached.
    """
    _check_place(state, place)
    os.umask(0o077)
    with place.held() as drafts:
        for _ in range(MAX_SNAPSHOTS):
            try:
                return _copy(state, place, drafts, report)
            except _Vanished as exc:
                report(f"retention removed {exc} meanwhile; a later snapshot is taken")
        raise Conflict(
            f"{place}: retention removed files during {MAX_SNAPSHOTS} snapshots; try again later", code="FN-1442"
        )


def _copy(state: Path, place: BackupPlace, drafts: Path, report: Callable[[str], None]) -> Copied:
    draft = drafts / "draft"
    for name in ("draft", "draft-wal", "draft-shm"):
        draft.with_name(name).unlink(missing_ok=True)
    copy_database(state / "fanin.db", draft)
    report(f"database: {draft.stat().st_size / 1e6:,.1f} MB")
    stored = place.sizes()
    secrets = _copy_secrets(state, place, stored)
    engine = open_engine(draft, Durability.PROCESS, upgrade=False)
    try:
        blobs = FolderBlobs(state / "blobs", Durability.PROCESS)
        files = list(named_files(engine, lambda manifest: blobs.read_artifact("manifest", manifest)))
        copied, lost = _copy_files(state, place, files, stored, report)
        if lost:
            _check_still_named(state, lost)
        report(f"files: {len(copied):,} of {len(files):,} are new")
        runs = SqliteRuns(engine)
        newest = {run_id: _order(runs, run_id) for run_id in runs.run_ids()}
        form = form_of(engine)
    finally:
        engine.dispose()
    # Only now: the engine writes its journal mode into the file.
    digest, database_bytes = file_digest(draft), draft.stat().st_size
    place.put(draft, f"database/{digest}.db", digest)
    draft.unlink()
    manifest = BackupManifest(
        format=FORMAT,
        release=__version__,
        form=form,
        created_at_s=time.time(),
        database=digest,
        secrets=secrets,
        num_files=len(files) - len(lost),
        size_bytes=sum(file.size_bytes for file in files) + database_bytes,
        newest=newest,
        lost=tuple(file.path for file in lost),
    )
    data = json.dumps(asdict(manifest), indent=1).encode()
    place.write(MANIFEST, data)
    if place.read(MANIFEST) != data:
        raise Conflict(
            f"{place}: another process writes this backup; repeat it when that one has ended", code="FN-0399"
        )
    _sweep(place, manifest, {file.path for file in files})
    return Copied(manifest=manifest, num_new_files=len(copied), new_bytes=sum(file.size_bytes for file in copied))


def _copy_files(
    state: Path, place: BackupPlace, files: list[StoredFile], stored: Mapping[str, int], report: Callable[[str], None]
) -> tuple[list[StoredFile], list[StoredFile]]:
    """Copy the files that the backup does not have. Return these, and those that are missing or damaged."""
    copied: list[StoredFile] = []
    lost: list[StoredFile] = []
    for file in files:
        if stored.get(file.path) == file.size_bytes:
            continue
        if not place.put(state / file.path, file.path, file.sha256):
            lost.append(file)
            continue
        copied.append(file)
        if len(copied) % 1000 == 0:
            report(f"copied {len(copied):,} new files of {len(files):,}")
    return copied, lost


def _check_still_named(state: Path, lost: list[StoredFile]) -> None:
    """Raise _Vanished if the database of the coordinator no longer names a file that could not be copied."""
    engine = open_engine(state / "fanin.db", Durability.PROCESS, upgrade=False)
    try:
        blobs = FolderBlobs(state / "blobs", Durability.PROCESS)
        named = {file.path for file in named_files(engine, lambda each: blobs.read_artifact("manifest", each))}
    finally:
        engine.dispose()
    if gone := [file.path for file in lost if file.path not in named]:
        raise _Vanished(gone[0])


def _copy_secrets(state: Path, place: BackupPlace, stored: Mapping[str, int]) -> dict[str, str]:
    secrets = {}
    for path in sorted(path for name in SECRET_FOLDERS for path in (state / name).glob("*") if path.is_file()):
        data = path.read_bytes()
        secrets[str(path.relative_to(state))] = digest = sha256_hex(data)
        if stored.get(f"secrets/{digest}") != len(data):
            place.write(f"secrets/{digest}", data)
    return secrets


def read_manifest(place: BackupPlace) -> BackupManifest:
    """Return the manifest of a backup. Raises InvalidInput if there is none, Corrupted if it is damaged."""
    data = place.read(MANIFEST)
    if data is None:
        raise InvalidInput(
            f"{place}: not a finished backup, {MANIFEST} is missing; give the folder of fanin backup, or run it again",
            code="FN-1442",
        )
    try:
        row = json.loads(data)
        if row["format"] != FORMAT:
            raise InvalidInput(
                f"{place}: got the format {row['format']}, expected {FORMAT}; restore it with fanin {row['release']}",
                code="FN-1444",
            )
        orders = {run_id: (int(epoch), int(number)) for run_id, (epoch, number) in row["newest"].items()}
        return BackupManifest(**{**row, "newest": orders, "lost": tuple(row["lost"])})
    except (ValueError, KeyError, TypeError) as exc:
        raise Corrupted(f"{place}: {MANIFEST} is damaged ({exc}); use another backup", code="FN-1442") from exc


def _order(runs: SqliteRuns, run_id: str) -> tuple[int, int]:
    newest = runs.version(run_id)
    assert newest is not None, "a run has at least version 0"
    return newest.order


def _check_place(state: Path, place: BackupPlace) -> None:
    if not (state / "fanin.db").is_file():
        raise InvalidInput(f"{state}: not a coordinator's folder, fanin.db is missing; give --state", code="FN-1012")
    if isinstance(place, FolderPlace):
        if place.folder.exists() and not place.folder.is_dir():
            raise InvalidInput(f"backup {place}: got a file, expected a folder", code="FN-1449")
        if place.folder.resolve().is_relative_to(state.resolve()):
            raise InvalidInput(f"backup {place}: is within {state}, expected another folder", code="FN-1449")
    foreign = sorted(path for path in place.sizes() if path.split("/", 1)[0] not in CONTENTS)
    if foreign:
        raise InvalidInput(
            f"backup {place}: has {foreign[0]!r}, which no backup has, expected an empty folder or an earlier backup",
            code="FN-1449",
        )


def _sweep(place: BackupPlace, manifest: BackupManifest, named: set[str]) -> None:
    """Remove the files that the backup does not need any more."""
    needed = {
        *(MANIFEST, "lock", f"database/{manifest.database}.db"),
        *(f"secrets/{digest}" for digest in manifest.secrets.values()),
        *named,
    }
    place.remove([path for path in place.sizes() if path not in needed])

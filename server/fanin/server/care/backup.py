"""A backup of a coordinator's folder, while it serves, in a folder of its own.

    manifest.json          replaced last: what is not in it is not part of the backup
    database/SHA256.db     a snapshot of fanin.db
    secrets/SHA256         the files of tls/ and tokens/
    blobs/, updates/       the files that the database names, as in the coordinator's folder

Chunks and payloads never change and are named by their digests, so a repeated backup copies only what is new. The files
are copied after the database: all that it names is there already. If retention removes one of them meanwhile, the
backup takes a later snapshot. After the manifest was replaced, files that it no longer needs are removed. So a backup
that is interrupted leaves the one before it whole.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fanin.edge.files import held, sync_folder
from fanin.edge.tensors import sha256_hex
from fanin.protos.errors import Conflict, Corrupted, InvalidInput
from fanin.protos.release import __version__
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.disk import Durability, disk_errors, write_file
from fanin.server.storage.sqlite.care import StoredFile, named_files
from fanin.server.storage.sqlite.engine import copy_database, form_of, open_engine
from fanin.server.storage.sqlite.runs import SqliteRuns

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
SECRET_FOLDERS: Final = ("tls", "tokens")
CONTENTS: Final = ("blobs", "updates", "database", "secrets", MANIFEST, "lock")
MAX_SNAPSHOTS: Final = 10
_READ_BYTES: Final = 1 << 20


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


def back_up(state: Path, target: Path, report: Callable[[str], None]) -> Copied:
    """Copy a coordinator's folder into a backup, new or repeated.

    Args:
        state: The folder. A coordinator may serve from it.
        target: The folder of the backup.
        report: Receives the steps.

    Raises:
        InvalidInput: The target has other files.
        Conflict: Another process writes this backup.
        Corrupted: The record is damaged, or of another fanin.
        StorageFull: No space is left.
    """
    _check_target(state, target)
    os.umask(0o077)
    with held(target, "wait for it, or back up to another folder", mode=0o700), disk_errors(str(target)):
        for name in ("database", "secrets"):
            (target / name).mkdir(exist_ok=True, mode=0o700)
        for _ in range(MAX_SNAPSHOTS):
            try:
                return _copy(state, target, report)
            except _Vanished as exc:
                report(f"retention removed {exc} meanwhile; a later snapshot is taken")
        raise Conflict(
            f"{target}: retention removed files during {MAX_SNAPSHOTS} snapshots; try again later", code="FN-1442"
        )


def _copy(state: Path, target: Path, report: Callable[[str], None]) -> Copied:
    draft = target / "database" / "draft"
    for name in ("draft", "draft-wal", "draft-shm"):
        draft.with_name(name).unlink(missing_ok=True)
    copy_database(state / "fanin.db", draft)
    report(f"database: {draft.stat().st_size / 1e6:,.1f} MB")
    secrets = _copy_secrets(state, target)
    engine = open_engine(draft, Durability.PROCESS, upgrade=False)
    try:
        blobs = FolderBlobs(state / "blobs", Durability.PROCESS)
        files = list(named_files(engine, lambda manifest: blobs.read_artifact("manifest", manifest)))
        copied, lost = _copy_files(state, target, files, report)
        if lost:
            _check_still_named(state, lost)
        report(f"files: {len(copied):,} of {len(files):,} are new")
        runs = SqliteRuns(engine)
        newest = {run_id: _order(runs, run_id) for run_id in runs.run_ids()}
        form = form_of(engine)
    finally:
        engine.dispose()
    # Only now: the engine writes its journal mode into the file.
    digest = file_digest(draft)
    database = draft.replace(target / "database" / f"{digest}.db")
    manifest = BackupManifest(
        format=FORMAT,
        release=__version__,
        form=form,
        created_at_s=time.time(),
        database=digest,
        secrets=secrets,
        num_files=len(files) - len(lost),
        size_bytes=sum(file.size_bytes for file in files) + database.stat().st_size,
        newest=newest,
        lost=tuple(file.path for file in lost),
    )
    for folder in ("database", "secrets"):
        sync_folder(target / folder)
    write_file(target / MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
    _sweep(target, manifest, {file.path for file in files})
    return Copied(manifest=manifest, num_new_files=len(copied), new_bytes=sum(file.size_bytes for file in copied))


def _copy_files(
    state: Path, target: Path, files: list[StoredFile], report: Callable[[str], None]
) -> tuple[list[StoredFile], list[StoredFile]]:
    """Copy the files that the backup does not have. Return these, and those that are missing or damaged."""
    copied, lost = [], []
    folders: set[Path] = set()
    for file in files:
        path = target / file.path
        if path.is_file() and path.stat().st_size == file.size_bytes:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.draft")
        if copy_file(state / file.path, draft) != file.sha256:
            draft.unlink(missing_ok=True)
            lost.append(file)
            continue
        draft.replace(path)
        folders |= {path.parent, path.parent.parent}
        copied.append(file)
        if len(copied) % 1000 == 0:
            report(f"copied {len(copied):,} new files of {len(files):,}")
    for folder in folders:
        sync_folder(folder)
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


def _copy_secrets(state: Path, target: Path) -> dict[str, str]:
    secrets = {}
    for path in sorted(path for name in SECRET_FOLDERS for path in (state / name).glob("*") if path.is_file()):
        data = path.read_bytes()
        secrets[str(path.relative_to(state))] = digest = sha256_hex(data)
        write_file(target / "secrets" / digest, data)
    return secrets


def copy_file(source: Path, target: Path) -> str:
    """Copy a file durably and return the digest of its content, "" if there is no such file."""
    digest = hashlib.sha256()
    try:
        with source.open("rb") as reader, target.open("wb") as writer:
            while data := reader.read(_READ_BYTES):
                digest.update(data)
                writer.write(data)
            writer.flush()
            os.fsync(writer.fileno())
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> BackupManifest:
    """Return the manifest of a backup. Raises InvalidInput if there is none, Corrupted if it is damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        raise InvalidInput(
            f"{folder}: not a finished backup, {MANIFEST} is missing; give the folder of fanin backup, or run it again",
            code="FN-1442",
        )
    try:
        row = json.loads(path.read_text("utf-8"))
        if row["format"] != FORMAT:
            raise InvalidInput(
                f"{path}: got the format {row['format']}, expected {FORMAT}; restore it with fanin {row['release']}",
                code="FN-1444",
            )
        orders = {run_id: (int(epoch), int(number)) for run_id, (epoch, number) in row["newest"].items()}
        return BackupManifest(**{**row, "newest": orders, "lost": tuple(row["lost"])})
    except (ValueError, KeyError, TypeError) as exc:
        raise Corrupted(f"{path}: damaged ({exc}); use another backup", code="FN-1442") from exc


def _order(runs: SqliteRuns, run_id: str) -> tuple[int, int]:
    newest = runs.version(run_id)
    assert newest is not None, "a run has at least version 0"
    return newest.order


def _check_target(state: Path, target: Path) -> None:
    if "://" in str(target) or str(target).startswith(("s3:", "gs:", "http:", "https:")):
        raise InvalidInput(
            f"backup {target}: got a URL, expected a folder; back up to a folder and copy it with your storage's tool",
            code="FN-1449",
        )
    if not (state / "fanin.db").is_file():
        raise InvalidInput(f"{state}: not a coordinator's folder, fanin.db is missing; give --state", code="FN-1012")
    if target.exists() and not target.is_dir():
        raise InvalidInput(f"backup {target}: got a file, expected a folder", code="FN-1449")
    if target.resolve().is_relative_to(state.resolve()):
        raise InvalidInput(f"backup {target}: is within {state}, expected another folder", code="FN-1449")
    foreign = sorted(path.name for path in target.glob("*") if path.name not in CONTENTS) if target.exists() else []
    if foreign:
        raise InvalidInput(
            f"backup {target}: has {foreign[0]!r}, which no backup has, expected an empty folder or an earlier backup",
            code="FN-1449",
        )


def _sweep(target: Path, manifest: BackupManifest, named: set[str]) -> None:
    """Remove the files that the backup does not need any more."""
    needed = {
        f"database/{manifest.database}.db",
        *(f"secrets/{digest}" for digest in manifest.secrets.values()),
        *named,
    }
    for path in _files(target):
        if str(path.relative_to(target)) not in needed:
            path.unlink(missing_ok=True)
    for folder in sorted((target / "updates").glob("*/*"), reverse=True):
        if not any(folder.iterdir()):
            shutil.rmtree(folder)


def _files(target: Path) -> Iterator[Path]:
    for name in ("database", "secrets", "blobs", "updates"):
        yield from (path for path in (target / name).rglob("*") if path.is_file())

"""A backup of a coordinator's folder, while it serves, in a folder of its own or in an object store (``places``).

    manifest.json          replaced last: what is not in it is not part of the backup
    database/SHA256.db     a snapshot of fanin.db
    secrets/SHA256         the files of tls/ and tokens/
    blobs/, updates/       the files that the database names, as in the coordinator's folder

Chunks and payloads never change and are named by their digests, so a repeated backup copies only what is new. Of the
others it verifies a share, in the backup and in the coordinator's folder: reading all of both each night costs as much
as the first backup did. The share is chosen by digest and by the number of the backup, so SHARES backups in a row read
every file, at whatever interval they run. A missing file, or one of another size, is noticed by every backup. The files
are copied after the database: all that it names is there already. If retention removes one of them meanwhile, the
backup takes a later snapshot. After the manifest was replaced, files that it no longer needs are removed. So a backup
that is interrupted leaves the one before it whole.

The seeds of privacy noise and the Updates of Runs with privacy are not part of a backup: with them, who reads it could
subtract the noise.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fanin.edge.tensors import sha256_hex
from fanin.protos.errors import Conflict, Corrupted, InvalidInput
from fanin.protos.release import __version__
from fanin.server.care.copies import Bundles, Copying
from fanin.server.care.places import BackupPlace, FolderPlace, file_digest
from fanin.server.storage.disk import Durability, write_file
from fanin.server.storage.sqlite.care import StoredFile, named_files
from fanin.server.storage.sqlite.commands import leave_out_private
from fanin.server.storage.sqlite.engine import copy_database, form_of, open_engine
from fanin.server.storage.sqlite.runs import SqliteRuns

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
SECRET_FOLDERS: Final = ("tls", "tokens")
CONTENTS: Final = ("blobs", "updates", "database", "secrets", MANIFEST, "lock")
MAX_SNAPSHOTS: Final = 10
MARK: Final = "backup.json"
"""The file of the coordinator's folder that says when it was backed up last. No backup has it."""
SHARES: Final = 30
"""Backups that verify every file once: a month of nights."""


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
        lost: Paths of files that the record names and of which neither the coordinator's folder nor the backup has a
            whole copy.
        index: The number of the backups to this place before it.
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
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A finished backup.

    Attributes:
        manifest: Its manifest.
        num_new_files: The files that it did not have.
        new_bytes: Their bytes.
        num_verified: The files of earlier backups whose digests were verified, in the backup and in the folder.
        healed: Paths of files that were damaged in the backup and were replaced.
        damaged: Paths of files that are missing or damaged in the coordinator's folder, and whole in the backup.
    """

    manifest: BackupManifest
    num_new_files: int
    new_bytes: int
    num_verified: int
    healed: tuple[str, ...]
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBackup:
    """The newest backup of a folder: wall time, and the number of files that were missing or damaged in the folder."""

    at_s: float
    num_damaged: int


class _Vanished(Exception):
    """Retention removed a file after the snapshot."""


def back_up(state: Path, place: BackupPlace, report: Callable[[str], None], *, verifies_all: bool = False) -> Copied:
    """Copy a coordinator's folder into a backup, new or repeated.

    Args:
        state: The folder. A coordinator may serve from it.
        place: Where the backup is.
        report: Receives the steps.
        verifies_all: Verify every file of earlier backups instead of a share.

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
        copying = Copying(state=state, place=place, report=report)
        index = _next_index(place)
        share = None if verifies_all else index % SHARES
        for _ in range(MAX_SNAPSHOTS):
            try:
                copied = _copy(copying, drafts, index, share)
            except _Vanished as exc:
                report(f"retention removed {exc} meanwhile; a later snapshot is taken")
                continue
            _mark(state, copied, report)
            return copied
        raise Conflict(
            f"{place}: retention removed files during {MAX_SNAPSHOTS} snapshots; try again later", code="FN-1442"
        )


def last_backup(state: Path) -> LastBackup | None:
    """Return the newest backup of a folder, None if none is known: a restored folder has none."""
    try:
        row = json.loads((state / MARK).read_text("utf-8"))
        return LastBackup(at_s=float(row["at_s"]), num_damaged=int(row["num_damaged"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mark(state: Path, copied: Copied, report: Callable[[str], None]) -> None:
    last = LastBackup(at_s=copied.manifest.created_at_s, num_damaged=len(copied.manifest.lost) + len(copied.damaged))
    try:
        write_file(state / MARK, json.dumps(asdict(last)).encode())
        # It is no secret, and the coordinator may run as another user.
        (state / MARK).chmod(0o644)
    except OSError as exc:
        # The user of the command may only read the folder.
        report(f"{state / MARK} cannot be written ({exc.strerror}), so the page shows no time of this backup")


def _next_index(place: BackupPlace) -> int:
    try:
        return read_manifest(place).index + 1
    except (InvalidInput, Corrupted):
        return 0


def _copy(copying: Copying, drafts: Path, index: int, share: int | None) -> Copied:
    state, place, report = copying.state, copying.place, copying.report
    draft = drafts / "draft"
    for name in ("draft", "draft-wal", "draft-shm"):
        draft.with_name(name).unlink(missing_ok=True)
    copy_database(state / "fanin.db", draft)
    report(f"database: {draft.stat().st_size / 1e6:,.1f} MB")
    stored = place.sizes()
    secrets = _copy_secrets(state, place)
    engine = open_engine(draft, Durability.PROCESS, upgrade=False)
    try:
        leave_out_private(engine, time.time())
        bundles = Bundles(state, place)
        files = list(named_files(engine, bundles.read))
        due = {file.path for file in files if share in (None, int(file.sha256[:8], 16) % SHARES)} | bundles.damaged
        tally = copying.copy(files, stored, due)
        if absent := tally.lost + tally.damaged:
            _check_still_named(state, bundles, absent)
        report(f"files: {len(tally.copied):,} of {len(files):,} are new, {tally.num_verified:,} others verified")
        runs = SqliteRuns(engine)
        newest = {run_id: _order(runs, run_id) for run_id in runs.run_ids()}
        form = form_of(engine)
    finally:
        engine.dispose()
    # Only now: the engine writes its journal mode into the file, and leaves out what is private.
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
        num_files=len(files) - len(tally.lost),
        size_bytes=sum(file.size_bytes for file in files) + database_bytes,
        newest=newest,
        lost=_paths(tally.lost),
        index=index,
    )
    data = json.dumps(asdict(manifest), indent=1).encode()
    place.write(MANIFEST, data)
    if place.read(MANIFEST) != data:
        raise Conflict(
            f"{place}: another process writes this backup; repeat it when that one has ended", code="FN-0399"
        )
    _sweep(place, manifest, {file.path for file in files})
    return Copied(
        manifest=manifest,
        num_new_files=len(tally.copied),
        new_bytes=sum(file.size_bytes for file in tally.copied),
        num_verified=tally.num_verified,
        healed=_paths(tally.healed),
        damaged=_paths(tally.damaged),
    )


def _paths(files: list[StoredFile]) -> tuple[str, ...]:
    return tuple(file.path for file in files)


def _check_still_named(state: Path, bundles: Bundles, absent: list[StoredFile]) -> None:
    """Raise _Vanished if the database of the coordinator no longer names a file that is not whole in its folder."""
    engine = open_engine(state / "fanin.db", Durability.PROCESS, upgrade=False)
    try:
        named = {file.path for file in named_files(engine, bundles.read)}
    finally:
        engine.dispose()
    if gone := [file.path for file in absent if file.path not in named]:
        raise _Vanished(gone[0])


def _copy_secrets(state: Path, place: BackupPlace) -> dict[str, str]:
    secrets = {}
    for path in sorted(path for name in SECRET_FOLDERS for path in (state / name).glob("*") if path.is_file()):
        data = path.read_bytes()
        secrets[str(path.relative_to(state))] = digest = sha256_hex(data)
        if place.read(f"secrets/{digest}") != data:
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

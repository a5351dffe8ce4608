"""A restored backup: a new folder, whose Runs wait until their publisher reclaims them.

Devices may have seen later Versions than the backup has, and refuse earlier ones. Only the publisher can begin the next
epoch, whose Versions they accept (docs/decisions/0041). So every Run is marked: it serves no Version and opens no Round
until ``fanin reclaim``. The new folder appears under its name when it is complete, by one rename.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from fanin.edge.files import sync_folder
from fanin.protos.chunks import Artifact
from fanin.protos.errors import Conflict, Corrupted, InvalidInput
from fanin.protos.messages import COORDINATOR, RESTORE_CALL, STOP_CALL
from fanin.protos.release import __version__
from fanin.server.care.backup import BackupManifest, read_manifest
from fanin.server.care.places import BackupPlace
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.disk import Durability, disk_errors
from fanin.server.storage.records import AuditFact
from fanin.server.storage.sqlite.administration import SqliteAudit
from fanin.server.storage.sqlite.care import blob_path, named_files
from fanin.server.storage.sqlite.commands import mark_restored
from fanin.server.storage.sqlite.engine import known_forms, open_engine, writing
from fanin.server.storage.sqlite.ledger.rows import SqliteLedger, forget_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A restored folder.

    Attributes:
        manifest: The manifest of the backup.
        waiting: The Runs that wait for their publisher.
        uncharged: The populations whose privacy ledgers lost an interval. Their Runs wait until it is charged.
    """

    manifest: BackupManifest
    waiting: tuple[str, ...]
    uncharged: tuple[str, ...]


def restore(backup: BackupPlace, state: Path, report: Callable[[str], None], *, was_stopped: bool = False) -> Restored:
    """Write a backup to a new folder, with every digest verified.

    Args:
        backup: Where the backup is.
        state: The new folder: missing or empty.
        report: Receives the steps.
        was_stopped: The coordinator was stopped before the backup and never served again. Then no device has seen a
            later Version, and the Runs continue without their publisher.

    Raises:
        InvalidInput: It is no backup, or a newer fanin wrote it.
        Conflict: The folder is not empty, or the backup is of a coordinator that was not stopped.
        Corrupted: A file of the backup is missing or damaged.
        StorageFull: No space is left.
    """
    manifest = read_manifest(backup)
    known = known_forms()
    if manifest.form not in known:
        raise InvalidInput(
            f"{backup}: written by fanin {manifest.release} with the database form {manifest.form}, this is fanin "
            f"{__version__} with the forms {known[0]} to {known[-1]}; restore it with that fanin or a newer one",
            code="FN-1444",
        )
    _check_free(state)
    os.umask(0o077)
    draft = state.with_name(f".{state.name}.{secrets.token_hex(4)}.restoring")
    try:
        with disk_errors(str(state)):
            waiting, uncharged = _write(backup, manifest, draft, report, was_stopped=was_stopped)
            if state.exists():
                state.rmdir()
            draft.rename(state)
            sync_folder(state.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Restored(manifest=manifest, waiting=waiting, uncharged=uncharged)


def _check_free(state: Path) -> None:
    if state.exists() and (not state.is_dir() or any(state.iterdir())):
        what = "a coordinator's folder" if (state / "fanin.db").exists() else "not an empty folder"
        raise Conflict(
            f"{state}: {what}, expected a folder that is missing or empty; give another --state, or stop its "
            "coordinator and move the folder away",
            code="FN-1443",
        )


def _write(
    backup: BackupPlace, manifest: BackupManifest, draft: Path, report: Callable[[str], None], *, was_stopped: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Write all files. Return the Runs that wait for their publisher, and the populations that wait for a charge."""
    draft.mkdir(parents=True, mode=0o700)
    _copy(backup, f"database/{manifest.database}.db", draft / "fanin.db", manifest.database)
    for path, digest in manifest.secrets.items():
        (draft / path).parent.mkdir(exist_ok=True, mode=0o700)
        _copy(backup, f"secrets/{digest}", draft / path, digest)
    # An older form is migrated here, so that the folder is complete when it appears.
    engine = open_engine(draft / "fanin.db", Durability.HOST)
    try:
        files = list(named_files(engine, partial(_read_manifest, backup, draft)))
        lost = set(manifest.lost)
        for index, file in enumerate(files, 1):
            if file.path not in lost:
                (draft / file.path).parent.mkdir(parents=True, exist_ok=True)
                _copy(backup, file.path, draft / file.path, file.sha256)
            if index % 1000 == 0:
                report(f"verified {index:,} of {len(files):,} files")
        when = f"the backup of {datetime.fromtimestamp(manifest.created_at_s, UTC):%Y-%m-%d %H:%M} UTC"
        if was_stopped:
            _check_stopped(SqliteAudit(engine), backup)
        _record(SqliteAudit(engine), when, report)
        with writing(engine) as connection:
            forget_place(connection)
        if was_stopped:
            return (), ()
        waiting = mark_restored(engine, f"restored from {when}", time.time())
        return waiting, tuple(each.name for each in SqliteLedger(engine).populations() if each.uncharged)
    finally:
        engine.dispose()


def _check_stopped(audit: SqliteAudit, backup: BackupPlace) -> None:
    """Raise Conflict if the coordinator served at the backup, or was killed before it: it wrote no end into its log."""
    page = audit.audit_page(1)
    last = audit.audit_page(page.num_entries).entries[-1:]
    if last and (last[0].principal, last[0].call) not in ((COORDINATOR, STOP_CALL), (COORDINATOR, RESTORE_CALL)):
        raise Conflict(
            f"{backup}: the last entry of its audit log is {last[0].call} of {last[0].principal}, expected {STOP_CALL} "
            f"of {COORDINATOR}: the coordinator served at this backup, or was killed before it; restore without "
            "--was-stopped, or start it, stop it by SIGTERM, and back it up again",
            code="FN-1721",
        )


def _record(audit: SqliteAudit, when: str, report: Callable[[str], None]) -> None:
    """Append the restore to the audit log. A head that was kept after the backup is lost, and this entry says why."""
    try:
        page = audit.audit_page(1)
        subject = f"{when}, whose head was {page.head} at entry {page.num_entries}"
        audit.append(AuditFact(principal=COORDINATOR, call=RESTORE_CALL, subject=subject), time.time())
    except Corrupted as exc:
        report(f"the restore was not recorded: {exc}")


def _read_manifest(backup: BackupPlace, draft: Path, artifact: Artifact) -> bytes:
    """Return the manifest of a Bundle. Its Chunks are copied first."""
    for ref in artifact.chunks:
        path = blob_path(ref.sha256)
        (draft / path).parent.mkdir(parents=True, exist_ok=True)
        _copy(backup, path, draft / path, ref.sha256)
    return FolderBlobs(draft / "blobs", Durability.PROCESS).read_artifact("manifest", artifact)


def _copy(backup: BackupPlace, path: str, target: Path, digest: str) -> None:
    actual = backup.fetch(path, target)
    if actual != digest:
        problem = f"got the digest {actual[:16]}, expected {digest[:16]}" if actual else "missing"
        raise Corrupted(f"{backup}: {path}: {problem}; the backup is damaged, use another one", code="FN-1442")

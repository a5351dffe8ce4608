"""The folder of a coordinator, opened: all its durable state in one place.

fanin.db        the database
spool/          uploads under way
updates/        committed payloads
blobs/          Chunks of Bundles and Versions
fanin.place.0   with fanin.place.1: whether fanin.db is the newest one of this folder (``storage.sqlite.ledger.places``)
release         the fanin that opened it last
tls/            the local certificate authority (``access.authority``)
tokens/         the first tokens, for the user who started the coordinator (``administration.token_files``)
lock            held by the coordinator that serves from this folder
"""

import logging
import os
import socket
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from fanin.edge.files import held, storage_error, without_foreign
from fanin.protos.errors import Corrupted
from fanin.protos.messages import AuditPage
from fanin.protos.release import __version__
from fanin.server.aggregation.verify import Archive
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.disk import Durability, failed_write, write_file
from fanin.server.storage.lanes import Lane
from fanin.server.storage.protocols.archive import MessageArchive, RoundArchive, RunArchive
from fanin.server.storage.protocols.files import BlobReader, Payloads
from fanin.server.storage.spool import FolderSpool
from fanin.server.storage.sqlite.administration import SqliteAudit
from fanin.server.storage.sqlite.care import SqliteRetention
from fanin.server.storage.sqlite.commands import SqliteCommands
from fanin.server.storage.sqlite.devices import SqliteDevices
from fanin.server.storage.sqlite.engine import RELEASE_FILE, open_engine, open_reader, touch, write_times
from fanin.server.storage.sqlite.history import SqliteEvaluations, SqliteHistory
from fanin.server.storage.sqlite.laned import (
    LanedAudit,
    LanedCommands,
    LanedDevices,
    LanedEvaluations,
    LanedHistory,
    LanedLeases,
    LanedLedger,
    LanedMessages,
    LanedRetention,
    LanedRounds,
    LanedRuns,
    LanedTokens,
)
from fanin.server.storage.sqlite.ledger.rows import SqliteLedger, mark_copied
from fanin.server.storage.sqlite.messages import SqliteMessages
from fanin.server.storage.sqlite.rounds import SqliteRounds
from fanin.server.storage.sqlite.runs import SqliteRuns
from fanin.server.storage.stores import CoordinatorState, Files, Stores

LOG: Final = logging.getLogger("fanin.server.folder")
BLOBS_FOLDER: Final = "blobs"
"""The folder of the Chunks, within that of a coordinator."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadOnlyState:
    """An ``Archive`` over a folder that another process may serve from."""

    runs: RunArchive
    rounds: RoundArchive
    messages: MessageArchive
    blobs: BlobReader
    spool: Payloads


def hold_folder(folder: Path) -> AbstractContextManager[None]:
    """Lock a coordinator's folder for this process. Two coordinators on one folder would both drive its Rounds.

    Raises:
        Conflict: Another process holds the lock.
    """
    return held(folder, "stop this coordinator, or give another --state", mode=0o700)


def check_authority(folder: Path) -> None:
    """Raise Corrupted if a folder that was served before has lost its certificate authority.

    A new authority would be created silently, and every device and operator would refuse it. An operator who wants a
    new one creates an empty ``tls`` folder.
    """
    tls = folder / "tls"
    has_authority = (tls / "ca.key").exists() or (tls / "ca.pem").exists()
    is_wanted = tls.is_dir() and not without_foreign(tls.iterdir())
    if (folder / "fanin.db").exists() and not has_authority and not is_wanted:
        raise Corrupted(
            f"{tls}: has no authority, expected ca.key and ca.pem of the coordinator that wrote fanin.db; restore it "
            "from a backup, or create an empty folder there: a new authority is created, whose ca.pem every device "
            "and operator needs",
            code="FN-0680",
        )


def exposed_secrets(folder: Path) -> tuple[Path, ...]:
    """Return the files with keys and tokens that other users of this machine can read or change.

    A folder that is the user's alone protects all files in it.
    """
    if not folder.stat().st_mode & _OTHERS:
        return ()
    secrets = (
        folder / "fanin.db",
        folder / "fanin.db-wal",
        *folder.glob("tls/*.key"),
        *folder.glob("tokens/*.token"),
        *folder.glob("tokens/*.key"),
    )
    return tuple(sorted(path for path in secrets if path.exists() and path.stat().st_mode & _OTHERS))


def open_state(
    folder: Path, durability: Durability, lanes: tuple[Lane, Lane], wall: Callable[[], float]
) -> CoordinatorState:
    """Open the folder of a coordinator; create it if there is none.

    Args:
        folder: The folder.
        durability: What an acknowledged Update survives.
        lanes: The store lane, with one thread, and the disk lane.
        wall: The clock that dates the record, in seconds since the Unix epoch.

    Raises:
        Corrupted: The database cannot be opened, or is missing in a folder that had one.
        StorageFull: The disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    durability.sync_folder(folder.parent)
    _check_complete(folder)
    engine = open_engine(folder / "fanin.db", durability)
    for name in mark_copied(engine, wall()):
        LOG.warning(
            "%s: may lack rows of the privacy ledger of the population %s: the folder is a copy, files of it were put "
            "back, or the owner or the permissions of its fanin.place files were changed; its runs wait until "
            "an administrator charges what it lacks: fanin privacy charge %s --rounds N, with 0 if it lacks nothing",
            *(folder, name, name),
        )
    write_file(folder / RELEASE_FILE, f"{__version__}\n".encode())
    store_lane, disk_lane = lanes
    runs, rounds, devices = SqliteRuns(engine), SqliteRounds(engine), SqliteDevices(engine)
    messages = SqliteMessages(engine)
    stores = Stores(
        devices=LanedDevices(devices, store_lane),
        tokens=LanedTokens(devices.tokens, store_lane),
        audit=LanedAudit(SqliteAudit(engine), store_lane),
        runs=LanedRuns(runs, store_lane),
        rounds=LanedRounds(rounds, runs, store_lane),
        messages=LanedMessages(messages, store_lane),
        evaluations=LanedEvaluations(SqliteEvaluations(engine), store_lane),
        retention=LanedRetention(SqliteRetention(engine), store_lane),
        ledger=LanedLedger(SqliteLedger(engine), store_lane),
        leases=LanedLeases(engine, store_lane),
        control=LanedCommands(SqliteCommands(engine), store_lane),
        wall=wall,
        holder=f"{socket.gethostname()}:{os.getpid()}",
    )
    files = Files(
        blobs=FolderBlobs(folder / BLOBS_FOLDER, durability),
        spool=FolderSpool(folder / "spool", folder / "updates", durability),
        lane=disk_lane,
    )

    async def check() -> None:
        await store_lane(partial(touch, engine))
        error = await disk_lane(partial(failed_write, folder / "lock"))
        if error is not None:
            raise storage_error(str(folder), error)

    # On the disk lane, with connections of its own: a page of a long Run must not delay the commits of a Round.
    history = LanedHistory(SqliteHistory(open_reader(folder / "fanin.db")), disk_lane)
    return CoordinatorState(
        stores=stores,
        files=files,
        runs=runs,
        rounds=rounds,
        messages=messages,
        history=history,
        check=check,
        write_times=write_times(engine),
    )


def open_archive(folder: Path) -> Archive:
    """Open the folder of a coordinator for reading. A coordinator may serve from it at the same time.

    Raises:
        Corrupted: The database cannot be opened, or is missing in a folder that had one.
    """
    durability = Durability.PROCESS
    _check_complete(folder)
    engine = open_engine(folder / "fanin.db", durability, upgrade=False)
    return _ReadOnlyState(
        runs=SqliteRuns(engine),
        rounds=SqliteRounds(engine),
        messages=SqliteMessages(engine),
        blobs=FolderBlobs(folder / BLOBS_FOLDER, durability),
        spool=FolderSpool(folder / "spool", folder / "updates", durability),
    )


def open_audit(folder: Path) -> Callable[[int], AuditPage]:
    """Open the audit log of a coordinator's folder for reading: a function of the first entry of a page.

    Raises:
        Corrupted: The database cannot be opened, or is missing in a folder that had one.
    """
    _check_complete(folder)
    return SqliteAudit(open_engine(folder / "fanin.db", Durability.PROCESS, upgrade=False)).audit_page


def _check_complete(folder: Path) -> None:
    """Raise Corrupted if a folder that was served before has lost its database.

    The database is written first, so any other file proves that there was one. A new database would have none of the
    Runs, devices and tokens, and SQLite would delete the content of the old write-ahead log.
    """
    database = folder / "fanin.db"
    if database.exists() and database.stat().st_size:
        return
    patterns = ("blobs/??/*", "updates/*/*/*.payload", "tokens/*.token")
    remains = [pattern.partition("/")[0] for pattern in patterns if without_foreign(folder.glob(pattern))]
    if remains:
        problem = "empty" if database.exists() else "missing"
        raise Corrupted(
            f"{database}: {problem}, but {', '.join(remains)} of an earlier coordinator are there; restore a backup of "
            "the folder with fanin.db and fanin.db-wal, or start in another folder (--state)",
            code="FN-0501",
        )

"""The folder of a coordinator, opened: all its durable state in one place.

fanin.db        the database
spool/          uploads under way
updates/        committed payloads
blobs/          Chunks of Bundles and Versions
tls/            the local certificate authority (``access.authority``)
tokens/         the first tokens, for the user who started the coordinator (``access.tokens``)
lock            held by the coordinator that serves from this folder
"""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fanin.protos.errors import Conflict, Corrupted
from fanin.server.aggregation.verify import Archive
from fanin.server.storage.blobs import Blobs
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import Lane
from fanin.server.storage.spool import Spool
from fanin.server.storage.sqlite.commands import ControlStore
from fanin.server.storage.sqlite.devices import DeviceStore
from fanin.server.storage.sqlite.engine import open_engine
from fanin.server.storage.sqlite.rounds import RoundStore
from fanin.server.storage.sqlite.runs import RunStore
from fanin.server.storage.stores import Files, Stores, SyncStores


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorState:
    """The durable state of a coordinator. A composition root takes from it what each part uses.

    Attributes:
        sync: The synchronous stores, for verification and for tests. A server uses ``stores``.
        stores: The database, for the event loop.
        files: Blobs and spool, for the event loop.
    """

    sync: SyncStores
    stores: Stores
    files: Files

    @property
    def devices(self) -> DeviceStore:
        """Devices and tokens."""
        return self.sync.devices

    @property
    def runs(self) -> RunStore:
        """Runs, Versions and events."""
        return self.sync.runs

    @property
    def rounds(self) -> RoundStore:
        """Rounds and committed Updates."""
        return self.sync.rounds

    @property
    def control(self) -> ControlStore:
        """The transactions of operators' commands."""
        return self.sync.control

    @property
    def blobs(self) -> Blobs:
        """Chunks of Bundles and Versions."""
        return self.files.blobs

    @property
    def spool(self) -> Spool:
        """Uploads under way, and committed payloads."""
        return self.files.spool


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadOnlyState:
    """An ``Archive`` over a folder that another process may serve from."""

    runs: RunStore
    rounds: RoundStore
    blobs: Blobs
    spool: Spool


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock a coordinator's folder for this process. Two coordinators on one folder would both drive its Rounds.

    The kernel holds the lock, so it ends with the process in any case.

    Raises:
        Conflict: Another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise Conflict(
                f"{folder}: another coordinator serves from this folder; stop it, or give another --state"
            ) from exc
        yield


def check_authority(folder: Path) -> None:
    """Raise Corrupted if a folder that was served before has lost its certificate authority.

    A new authority would be created silently, and every device and operator would refuse it. An operator who wants a
    new one creates an empty ``tls`` folder.
    """
    tls = folder / "tls"
    has_authority = (tls / "ca.key").exists() or (tls / "ca.pem").exists()
    is_wanted = tls.is_dir() and not any(tls.iterdir())
    if (folder / "fanin.db").exists() and not has_authority and not is_wanted:
        raise Corrupted(
            f"{tls}: has no authority, expected ca.key and ca.pem beside fanin.db of an earlier coordinator; restore "
            "it from a backup, or create an empty folder there: a new authority is created, whose ca.pem every device "
            "and operator needs"
        )


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
    store_lane, disk_lane = lanes
    sync = SyncStores(
        devices=DeviceStore(engine), runs=RunStore(engine), rounds=RoundStore(engine), control=ControlStore(engine)
    )
    return CoordinatorState(
        sync=sync,
        stores=Stores(sync, store_lane, wall),
        files=Files(
            blobs=Blobs(folder / "blobs", durability),
            spool=Spool(folder / "spool", folder / "updates", durability),
            lane=disk_lane,
        ),
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
        runs=RunStore(engine),
        rounds=RoundStore(engine),
        blobs=Blobs(folder / "blobs", durability),
        spool=Spool(folder / "spool", folder / "updates", durability),
    )


def _check_complete(folder: Path) -> None:
    """Raise Corrupted if a folder that was served before has lost its database.

    The database is written first, so any other file proves that there was one. A new database would have none of the
    Runs, devices and tokens, and SQLite would delete the content of the old write-ahead log.
    """
    database = folder / "fanin.db"
    if database.exists() and database.stat().st_size:
        return
    patterns = ("blobs/??/*", "updates/*/*/*.payload", "tokens/*.token")
    left = [pattern.partition("/")[0] for pattern in patterns if any(folder.glob(pattern))]
    if left:
        problem = "empty" if database.exists() else "missing"
        raise Corrupted(
            f"{database}: {problem}, but {', '.join(left)} of an earlier coordinator are there; restore a backup of "
            "the folder with fanin.db and fanin.db-wal, or begin anew in another folder (--state)"
        )

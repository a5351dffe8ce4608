"""A coordinator's folder, opened: everything durable under one roof.

fanin.db        the store
spool/          uploads under way
updates/        committed payloads
blobs/          Chunks of Bundles and Versions
tls/            the local authority (``authority``)
tokens/         the first tokens, for the user who started it (``tokens``)
lock            held by the coordinator that serves from here
"""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fanin.protos.errors import Conflict, Corrupted
from fanin.server.aggregation.verify import Record
from fanin.server.observe.observer import Observer
from fanin.server.rounds.effects import Tools
from fanin.server.storage.blobs import Blobs
from fanin.server.storage.commits import GroupCommit
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import Lane
from fanin.server.storage.spool import Spool
from fanin.server.storage.sqlite.commands import ControlStore
from fanin.server.storage.sqlite.devices import DeviceStore
from fanin.server.storage.sqlite.engine import open_engine
from fanin.server.storage.sqlite.rounds import RoundStore
from fanin.server.storage.sqlite.runs import RunStore


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Keep a coordinator's folder to this process; two on one folder would both drive its Rounds.

    The lock is the kernel's, so it goes with the process, however that ends. Raises Conflict if it is taken.
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


def open_state(
    folder: Path,
    durability: Durability,
    lanes: tuple[Lane, Lane],
    wall: Callable[[], float],
    observer: Observer,
) -> Tools:
    """The tools of a coordinator over its folder; ``lanes`` are those of the store and of the disk.

    Raises Corrupted if the database cannot be opened, or is missing where there was one; StorageFull.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    durability.sync_folder(folder.parent)
    _check_complete(folder)
    engine = open_engine(folder / "fanin.db", durability)
    store_lane, disk_lane = lanes
    rounds = RoundStore(engine)
    return Tools(
        devices=DeviceStore(engine),
        runs=RunStore(engine),
        rounds=rounds,
        commits=GroupCommit(rounds, store_lane),
        control=ControlStore(engine),
        blobs=Blobs(folder / "blobs", durability),
        spool=Spool(folder / "spool", folder / "updates", durability),
        store_lane=store_lane,
        disk_lane=disk_lane,
        wall=wall,
        observer=observer,
    )


def _check_complete(folder: Path) -> None:
    """Raise Corrupted if a folder that was served before has lost its database.

    The database is written before anything else, so the other files prove that there was one. A fresh database would
    know none of the Runs, devices and tokens, and SQLite would remove what its write-ahead log still holds.
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


def look_into(folder: Path) -> Record:
    """What a coordinator's folder records of its Runs, while one serves from it or not. Raises Corrupted."""
    durability = Durability.PROCESS
    _check_complete(folder)
    engine = open_engine(folder / "fanin.db", durability, only_look=True)
    return Record(
        runs=RunStore(engine),
        rounds=RoundStore(engine),
        blobs=Blobs(folder / "blobs", durability),
        spool=Spool(folder / "spool", folder / "updates", durability),
    )

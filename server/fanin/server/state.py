"""A coordinator's folder, opened: everything durable under one roof.

fanin.db        the store
spool/          uploads under way
updates/        committed payloads
blobs/          Chunks of Bundles and Versions
tls/            the local authority (``authority``)
tokens/         the first tokens, for the user who started it (``commands.serve``)
lock            held by the coordinator that serves from here
"""

import asyncio
import fcntl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from fanin.protos.errors import Conflict
from fanin.server.blobs import Blobs
from fanin.server.disk import Durability
from fanin.server.observe import Observer
from fanin.server.spool import Spool
from fanin.server.store.devices import DeviceStore
from fanin.server.store.engine import open_engine
from fanin.server.store.rounds import RoundStore
from fanin.server.store.runs import RunStore
from fanin.server.work import Lane, Tools

T = TypeVar("T")


class ThreadLane:
    """Work on threads of its own. One thread makes a lane on which work is done one after the other."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def __call__(self, work: Callable[[], T]) -> T:
        """Await ``work`` on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Wait for work under way, take no more."""
        self._threads.shutdown()


async def inline(work: Callable[[], T]) -> T:
    """Work done at once, on the event loop: for simulations, where a thread would escape the virtual clock."""
    return work()


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

    Raises Corrupted if the database cannot be opened.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    engine = open_engine(folder / "fanin.db", durability)
    store_lane, disk_lane = lanes
    return Tools(
        devices=DeviceStore(engine),
        runs=RunStore(engine),
        rounds=RoundStore(engine),
        blobs=Blobs(folder / "blobs", durability),
        spool=Spool(folder / "spool", folder / "updates", durability),
        store_lane=store_lane,
        disk_lane=disk_lane,
        wall=wall,
        observer=observer,
    )

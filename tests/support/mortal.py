"""A coordinator on a virtual clock that can be killed at any moment, and is then started again.

A kill copies the folder in the state of the disk, and the next life begins with the copy. The previous life may run on
for a while without effect. No caller receives its answers, and no process reads its folder any more. Devices and
operators see a broken connection. After a SIGKILL the disk has all written bytes. After a power loss it has only the
synced bytes (``forgetful``).

The moments are counted. They are before and after every effect, every sync of a file or folder, and every piece of work
on a lane, such as a transaction. Work that changed the database or a file ends with the moment "after change", other
work with "after work". A kill after other work finds the state after the last change. The same seed gives the same
moments, up to the kill.
"""

import asyncio
import random
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

from fanin.protos import messages as m
from fanin.protos.errors import FaninError, Unavailable
from fanin.server.access.limits import Limits
from fanin.server.fleet.coordinator import Coordinator
from fanin.server.folder import open_state
from fanin.server.protocols.events import Effect
from fanin.server.runs.catalog import Runs
from fanin.server.runs.recorded_setup import Parts
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.disk import Durability
from fanin.server.storage.spool import FolderSpool
from fanin.server.storage.stores import CoordinatorState, Files
from fanin.simulation import LoopbackTransport, SyntheticTrainer, VirtualDevice
from support.forgetful import ForgetfulDisk
from support.virtual import PUBLISHER

T = TypeVar("T")
PAUSE_S: Final = 1.0
"""Seconds until the coordinator is started again, and until an operator tries again."""


@dataclass
class Life:
    """One process of a coordinator, from its start to its kill."""

    folder: Path
    tick: Callable[["Life", str], None]
    rng: random.Random
    parts: Parts
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    serves: bool = False
    disk: ForgetfulDisk = field(init=False)
    state: CoordinatorState = field(init=False)
    runs: Runs = field(init=False)
    coordinator: Coordinator = field(init=False)
    _num_syncs: int = 0
    _num_exchanges: int = 0

    def __post_init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.folder.mkdir(parents=True, exist_ok=True)
        self.disk = ForgetfulDisk(self.folder, self._synced)
        state = open_state(self.folder, Durability.PROCESS, (self.lane, self.lane), clock)
        self._database = sqlite3.connect(self.folder / "fanin.db")
        self._seen = self._changes()
        blobs, spool = self.folder / "blobs", self.folder / "spool"
        files = Files(
            blobs=FolderBlobs(blobs, self.disk),
            spool=FolderSpool(spool, self.folder / "updates", self.disk),
            lane=self.lane,
        )
        self.state = replace(state, files=files)
        self.runs = Runs(state.stores, files, self, self.parts)
        self.coordinator = Coordinator(self.runs, state.stores, files, Limits(), self.rng)

    async def lane(self, work: Callable[[], T]) -> T:
        """Run the work with a delay before and after it."""
        await asyncio.sleep(self.rng.uniform(0.0, 0.02))
        self.tick(self, "before work")
        result = work()
        changes = self._changes()
        self.tick(self, "after work" if changes == self._seen else "after change")
        self._seen = changes
        await asyncio.sleep(self.rng.uniform(0.0, 0.02))
        return result

    def starting(self, run_id: str, effect: Effect) -> None:
        """See Observer."""
        self.tick(self, f"before {type(effect).__name__}")

    def finished(self, run_id: str, effect: Effect) -> None:
        """See Observer."""
        self.tick(self, f"after {type(effect).__name__}")

    async def stop(self) -> None:
        """Release all resources of this life."""
        await self.runs.stop()
        self.disk.close()
        self._database.close()

    def _synced(self, what: str) -> None:
        self._num_syncs += 1
        self.tick(self, what)

    def _changes(self) -> tuple[int, int]:
        """Return two numbers: the first changes with each commit, the second with each sync."""
        (version,) = self._database.execute("PRAGMA data_version").fetchone()
        return version, self._num_syncs

    def turn(self) -> tuple[Path, int, int, int]:
        """Return a value that differs after a change on the disk, and after the begin and the end of a call."""
        return self.folder, *self._changes(), self._num_exchanges

    async def answer_of(self, work: Coroutine[object, object, T]) -> T:
        """Return the result of a call to this life, or raise a broken connection if it is killed first."""
        self._num_exchanges += 1
        call, end = asyncio.create_task(work), asyncio.create_task(self.dead.wait())
        try:
            await asyncio.wait({call, end}, return_when=asyncio.FIRST_COMPLETED)
            if self.dead.is_set():
                raise Unavailable("the line broke")
            return call.result()
        finally:
            self._num_exchanges += 1
            call.cancel()
            end.cancel()
            await asyncio.gather(call, end, return_exceptions=True)


class Mortal:
    """The coordinator that devices and operators call, in any of its lives. Moments are numbered from 1.

    Args:
        folder: The folder of all lives.
        kill_at: The numbers of the moments of its kills.
        loses_power: Whether a kill loses what is not synced.
        parts: Returns the parts of a life, of a number from 0.

    Attributes:
        moments: The moments so far.
        turns: The numbers of the moments before which the disk or a call has changed.
        kills: The moments of its kills.
        accepted: The device and the Round of each acknowledged Update.
    """

    def __init__(
        self,
        folder: Path,
        kill_at: Collection[int] = (),
        *,
        loses_power: bool = False,
        parts: Callable[[int], Parts] = lambda life: Parts(),
    ) -> None:
        self.moments: list[str] = []
        self.turns: list[int] = []
        self.kills: list[str] = []
        self.accepted: set[tuple[str, int]] = set()
        self._loses_power = loses_power
        self._parts = parts
        self._folder = folder
        self._kill_at = frozenset(kill_at)
        self._turn: tuple[Path, int, int, int] | None = None
        self._rng = random.Random(0)
        self._tasks: set[asyncio.Task[None]] = set()
        self.life = self._new_life(folder / "life-0")

    async def start(self) -> None:
        """Start the first life."""
        await self._serve(self.life)

    async def stop(self) -> None:
        """Stop the last life."""
        await self.life.stop()
        await asyncio.gather(*self._tasks)

    # The interface for devices: the production coordinator's methods over a connection that breaks.

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        """See Coordinator."""
        life = self._serving()
        return await life.answer_of(life.coordinator.check_in(device, check_in))

    async def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        """See Coordinator."""
        life = self._serving()
        async for data in _each(life, life.coordinator.download(device, download)):
            yield data

    async def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """See Coordinator."""
        life = self._serving()
        async for reply in _each(life, life.coordinator.upload(device, header, pieces)):
            if reply.update_state is m.UpdateState.ACCEPTED:
                self.accepted.add((device, header.round))
            yield reply

    async def exchange(self, device: str, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        """See Coordinator."""
        life = self._serving()
        return await life.answer_of(life.coordinator.exchange(device, request))

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """See Coordinator."""
        life = self._serving()
        return await life.answer_of(life.coordinator.report(device, report))

    # The interface for operators.

    async def operate(self, call: Callable[[Runs], Coroutine[object, object, T]]) -> T:
        """Repeat the call until a life has answered it."""
        while True:
            try:
                life = self._serving()
                return await life.answer_of(call(life.runs))
            except Unavailable:
                await asyncio.sleep(PAUSE_S)

    def devices(self, num_devices: int, work_s: Callable[[random.Random], float]) -> list[VirtualDevice]:
        """Return devices that outlive the coordinator. They do not run yet."""
        virtual_devices = []
        for index in range(num_devices):
            line = LoopbackTransport(fleet=self, device=f"device-{index}", latency_s=0.01)
            trainer = SyntheticTrainer(partition=index, num_examples=10 + index)
            rng = random.Random(f"device {index}")
            device = VirtualDevice(line, trainer, (PUBLISHER.public,), rng, lambda rng, _: work_s(rng))
            virtual_devices.append(device)
        return virtual_devices

    # Starts and kills.

    def _serving(self) -> Life:
        if not self.life.serves:
            raise Unavailable("no coordinator serves")
        return self.life

    def _new_life(self, folder: Path) -> Life:
        _forget_place(folder / "fanin.db")
        return Life(folder, self._tick, random.Random(self._rng.random()), self._parts(len(self.kills)))

    async def _serve(self, life: Life) -> None:
        await life.runs.start()
        life.serves = not life.dead.is_set()

    def _tick(self, life: Life, what: str) -> None:
        if life.dead.is_set():
            return
        self.moments.append(what)
        turn = life.turn()
        if turn != self._turn:
            self._turn = turn
            self.turns.append(len(self.moments))
        if len(self.moments) in self._kill_at:
            self._kill(life)

    def _kill(self, life: Life) -> None:
        life.dead.set()
        life.serves = False
        self.kills.append(self.moments[-1])
        after = self._folder / f"life-{len(self.kills)}"
        if self._loses_power:
            life.disk.lose_power(after)
        else:
            shutil.copytree(life.folder, after)
        task = asyncio.get_running_loop().create_task(self._restart(life, after))
        self._tasks.add(task)

    async def _restart(self, before: Life, folder: Path) -> None:
        await asyncio.sleep(PAUSE_S)
        await before.stop()
        self.life = self._new_life(folder)
        await self._serve(self.life)


async def _each(life: Life, stream: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield the items of a stream until the life ends. One task serves the stream, as it does every call."""
    queue: asyncio.Queue[T | FaninError | None] = asyncio.Queue()

    async def serve() -> None:
        try:
            async for item in stream:
                queue.put_nowait(item)
            queue.put_nowait(None)
        except FaninError as exc:
            queue.put_nowait(exc)

    task = asyncio.create_task(serve())
    try:
        while (item := await life.answer_of(queue.get())) is not None:
            if isinstance(item, FaninError):
                raise item
            yield item
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _forget_place(path: Path) -> None:
    """Let a copied database stand for the file of the life before. A coordinator notices that it opens a copy."""
    if path.exists():
        with closing(sqlite3.connect(path)) as database, suppress(sqlite3.OperationalError), database:
            # A process that was killed while it created the database has no such table.
            database.execute("UPDATE populations SET place = NULL")

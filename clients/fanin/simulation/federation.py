"""A coordinator in this process, on the running event loop's clock, for devices in the same process.

Everything is the production code: coordinator, round machine, store, spool, fold, outer step. Its lanes are inline, for
a thread would escape the virtual clock; its state is in a folder; the key of each Run is seeded, so that signatures and
ids are the same again.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from fanin.clients.testing.line import Note, Served
from fanin.clients.testing.member import Member, Surroundings, take_part
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m
from fanin.protos.control import LoggedEvent
from fanin.protos.errors import Unavailable
from fanin.protos.plans import Plan
from fanin.server.access.limits import Limits
from fanin.server.fleet.coordinator import Coordinator
from fanin.server.folder import CoordinatorState, open_state
from fanin.server.rounds.events import Effect
from fanin.server.runs.catalog import Runs
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline
from fanin.simulation.operator import start_run

COORDINATOR: Final = "coordinator"
PAUSE_S: Final = 1.0
"""How long an operator whose line broke waits before the next try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """One line of a Federation's log: when, on its clock, who, and what."""

    time_s: float
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.time_s:10.3f}  {self.who}: {self.what}"


@dataclass(slots=True, kw_only=True)
class _Process:
    """One life of the coordinator."""

    state: CoordinatorState
    runs: Runs
    served: Served


class Federation:
    """A coordinator over ``folder``, and its devices; a Fleet as devices know it, whichever life it is in.

    ``limits`` are the coordinator's. What happens is in ``log``, in order.
    """

    def __init__(self, folder: Path, seed: int = 0, limits: Limits | None = None) -> None:
        self.log: list[Noted] = []
        self._folder = folder
        self._seed = seed
        self._limits = limits or Limits()
        self._rng = random.Random(f"{seed}/coordinator")
        self._overheard: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        # What fails, as nothing should, ends the whole: a Run would wait for it for ever.
        self._group = asyncio.TaskGroup()
        self._process: _Process | None = None

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.stop()
        # A cancelled body is how the group tells of a task that failed; other errors are the body's own, and bare.
        is_told = isinstance(value, asyncio.CancelledError)
        await self._group.__aexit__(*((kind, value, trace) if is_told else (None, None, None)))

    # What devices see.

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        """See Fleet."""
        return await self._now().served.check_in(device, check_in)

    async def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        """See Fleet."""
        async for data in self._now().served.download(device, download):
            yield data

    async def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """See Fleet."""
        async for reply in self._now().served.upload(device, header, pieces):
            yield reply

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """See Fleet."""
        return await self._now().served.report(device, report)

    # What an operator does.

    @property
    def runs(self) -> Runs:
        """The coordinator's Control service, as it is now. Raises Unavailable while it is down."""
        return self._now().runs

    @property
    def state(self) -> CoordinatorState:
        """For a look into its state. Raises Unavailable while it is down."""
        return self._now().state

    async def start_run(self, run_id: str, plan: Plan, bundle: Bundle, publisher: SigningKey) -> None:
        """Publish a Bundle and start a Run of it."""
        self.state.runs.run_key(run_id, hashlib.sha256(f"{self._seed}/{run_id}".encode()).digest())
        await start_run(self.runs, run_id, plan, bundle, publisher)

    async def watch(self, run_id: str) -> AsyncIterator[LoggedEvent]:
        """What happened and happens in a Run until it has ended, over restarts."""
        sequence = 0
        while True:
            try:
                process = self._now()
                async for recorded in process.served.stream(process.runs.watch(run_id, sequence)):
                    sequence = recorded.sequence + 1
                    yield recorded
                return
            except Unavailable:
                await asyncio.sleep(PAUSE_S)

    # Who takes part, and for how long.

    def join(self, member: Member, bundle: Bundle) -> None:
        """Let a device take part that trusts the Bundle's publisher."""
        around = Surroundings(
            fleet=self, trusted=(bundle.signed.public_key,), overheard=self._overheard, note=self.note
        )
        self._tasks.append(self._group.create_task(take_part(member, around, str(self._seed)), name=member.device))

    def interrupt(self, stops_s: Sequence[float], down_s: float) -> None:
        """Let the coordinator stop at these times from now, and serve again ``down_s`` after each."""
        self._tasks.append(self._group.create_task(self._interrupted(stops_s, down_s), name=COORDINATOR))

    def note(self, who: str, what: str) -> None:
        """Add a line to the log."""
        self.log.append(Noted(time_s=asyncio.get_running_loop().time(), who=who, what=what))

    async def start(self) -> None:
        """Serve from the folder, as a process that begins there does."""
        clock = asyncio.get_running_loop().time
        state = open_state(self._folder / "state", Durability.PROCESS, (inline, inline), clock)
        runs = Runs(state.stores, state.files, _Noting(self.note))
        rng = random.Random(self._rng.random())
        coordinator = Coordinator(runs, state.stores, state.files, self._limits, rng)
        await runs.start()
        self._process = _Process(state=state, runs=runs, served=Served(coordinator))
        self.note(COORDINATOR, "serves")

    async def stop(self) -> None:
        """Break all lines and end at once; what is durable is in the folder."""
        process, self._process = self._process, None
        if process is not None:
            self.note(COORDINATOR, "stops")
            await process.served.hang_up()
            await process.runs.stop()

    async def _interrupted(self, stops_s: Sequence[float], down_s: float) -> None:
        began = asyncio.get_running_loop().time()
        for at_s in sorted(stops_s):
            await asyncio.sleep(began + at_s - asyncio.get_running_loop().time())
            await self.stop()
            await asyncio.sleep(down_s)
            await self.start()

    def _now(self) -> _Process:
        if self._process is None:
            raise Unavailable("nobody serves")
        return self._process


class _Noting:
    """An Observer that notes each effect."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def starting(self, run_id: str, effect: Effect) -> None:
        """Is told when it is done."""

    def finished(self, run_id: str, effect: Effect) -> None:
        """Notes it."""
        self._note(COORDINATOR, f"{run_id}: {effect}")

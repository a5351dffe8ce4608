"""A coordinator and its devices in this process, on the running event loop's clock."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from fanin.clients.operator import ref_of
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.versions import sign_delegation, sign_version
from fanin.protos import messages as m
from fanin.protos.chunks import cut
from fanin.protos.plans import Plan
from fanin.server.runs.catalog import Runs
from fanin.server.storage.stores import CoordinatorState
from fanin.simulation.devices.conduct import Collusion
from fanin.simulation.federation.coordinator import COORDINATOR, CoordinatorOptions, SimulatedCoordinator
from fanin.simulation.federation.loopback import PIECE_BYTES
from fanin.simulation.federation.member import Member, Surroundings, take_part
from fanin.simulation.federation.observed import Observe
from fanin.simulation.federation.rotation import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a Federation's log: virtual time in seconds, participant, text."""

    time_s: float
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.time_s:10.3f}  {self.who}: {self.what}"


class Federation:
    """A coordinator and its devices. It is a ``Fleet`` that outlives restarts of the coordinator.

    Args:
        folder: The coordinator's state is stored in ``folder/state``. None keeps it in memory.
        seed: Seed of all random choices that do not depend on the Plan's seed.
        options: Limits of the coordinator, and further selection policies.
        piece_bytes: Bytes of a piece of an upload. Larger pieces are faster, but an upload can break at fewer places.
        observe: Receives the events of the devices' part in the Rounds, in the order of the virtual clock.

    Attributes:
        log: The events of all participants, in order.
    """

    def __init__(
        self,
        folder: Path | None = None,
        seed: int = 0,
        options: CoordinatorOptions | None = None,
        piece_bytes: int = PIECE_BYTES,
        observe: Observe = lambda event: None,
    ) -> None:
        self.log: list[LogLine] = []
        self._seed = seed
        self._piece_bytes = piece_bytes
        self._observe = observe
        state = folder and folder / "state"
        self._coordinator = SimulatedCoordinator(state, seed, options or CoordinatorOptions(), self.note)
        self._overheard: dict[str, str] = {}
        self._collusion = Collusion()
        self._tasks: list[asyncio.Task[None]] = []
        # An unexpected error of a task ends the federation; otherwise a Run would wait for that task for ever.
        self._group = asyncio.TaskGroup()

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
        # The group cancels the body to report a failed task. Other errors are the body's own and are not wrapped.
        is_cancelled = isinstance(value, asyncio.CancelledError)
        await self._group.__aexit__(*((kind, value, trace) if is_cancelled else (None, None, None)))

    # The calls of devices.

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        """See Fleet."""
        return await self._coordinator.life.fleet.check_in(device, check_in)

    def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        """See Fleet."""
        return self._coordinator.life.fleet.download(device, download)

    def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """See Fleet."""
        return self._coordinator.life.fleet.upload(device, header, pieces)

    async def exchange(self, device: str, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        """See Fleet."""
        return await self._coordinator.life.fleet.exchange(device, request)

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """See Fleet."""
        return await self._coordinator.life.fleet.report(device, report)

    # The calls of an operator.

    @property
    def runs(self) -> Runs:
        """The coordinator's Control service. Raises Unavailable while the coordinator is down."""
        return self._coordinator.life.runs

    @property
    def state(self) -> CoordinatorState:
        """The coordinator's state, to inspect. Raises Unavailable while the coordinator is down."""
        return self._coordinator.life.state

    async def start_run(self, run_id: str, plan: Plan, bundle: Bundle, publisher: SigningKey) -> None:
        """Publish a Bundle and start a Run of it."""
        await self._coordinator.seed_run_key(run_id)
        await start_run(self.runs, run_id, plan, bundle, publisher)

    async def watch(self, run_id: str) -> AsyncIterator[m.LoggedEvent]:
        """Yield the events of a Run, past and future, until it ends; continue after a restart."""
        async for entry in self._coordinator.watch(run_id):
            yield entry

    # The participants and their lifetime.

    def join(self, member: Member, bundle: Bundle) -> None:
        """Add a device that trusts the Bundle's publisher."""
        part = take_part(member, self._around(bundle), str(self._seed))
        self._tasks.append(self._group.create_task(part, name=member.device))

    def join_rotation(self, rotation: Rotation, bundle: Bundle) -> None:
        """Add devices that trust the Bundle's publisher, of which only some are present at a time."""
        around = self._around(bundle)
        for place in range(rotation.num_present):
            self._tasks.append(self._group.create_task(rotation.keep_place(around), name=f"place {place}"))

    def interrupt(self, stops_s: Sequence[float], down_s: float) -> None:
        """Stop the coordinator at these times from now, and start it again ``down_s`` seconds after each."""
        self._tasks.append(self._group.create_task(self._interrupt(stops_s, down_s), name=COORDINATOR))

    def note(self, who: str, what: str) -> None:
        """Add a line to the log."""
        self.log.append(LogLine(time_s=asyncio.get_running_loop().time(), who=who, what=what))

    async def start(self) -> None:
        """Start the coordinator from its durable state."""
        await self._coordinator.start()

    async def stop(self) -> None:
        """Stop the coordinator at once; only durable state survives."""
        await self._coordinator.stop()

    def _around(self, bundle: Bundle) -> Surroundings:
        return Surroundings(
            fleet=self,
            trusted=(bundle.signed.public_key,),
            overheard=self._overheard,
            collusion=self._collusion,
            note=self.note,
            observe=self._observe,
            piece_bytes=self._piece_bytes,
        )

    async def _interrupt(self, stops_s: Sequence[float], down_s: float) -> None:
        began = asyncio.get_running_loop().time()
        for at_s in sorted(stops_s):
            await asyncio.sleep(began + at_s - asyncio.get_running_loop().time())
            await self.stop()
            await asyncio.sleep(down_s)
            await self.start()


async def start_run(runs: Runs, run_id: str, plan: Plan, bundle: Bundle, publisher: SigningKey) -> None:
    """Publish a Bundle and start a Run of it. Raises the errors of ``Runs``."""
    for data in (bundle.signed.data, *(bundle.artifact(name) for name in bundle.manifest.artifacts)):
        for ref, piece in cut(data):
            await runs.put_chunk(ref.sha256, piece)
    await runs.publish_bundle(ref_of(bundle.signed))
    run_key = await runs.prepare_run(run_id)
    initial = bundle.manifest.artifacts[bundle.manifest.initial]
    version = sign_version(publisher, parent=None, run_id=run_id, bundle_sha256=bundle.sha256, parameters=initial)
    delegation = sign_delegation(publisher, run_id=run_id, bundle_sha256=bundle.sha256, run_public_key=run_key)
    await runs.start_run(m.StartRun(run_id=run_id, plan=plan, version=version, delegation=delegation))

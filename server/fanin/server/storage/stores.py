"""Async access to a coordinator's durable state: the database through ``Stores``, its files through ``Files``.

SQLite and file systems block. ``Stores`` runs each method of the synchronous stores on the store lane, which carries
out one transaction at a time. ``Files`` runs work on blobs and spool on the disk lane. The event loop never waits for
either. Callers write ``await stores.runs.version(run_id, 3)`` and know no lane.

The methods of the async stores have the arguments, results and errors of the synchronous methods of the same name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from fanin.protos.control import AcceptedDevices, Command, LoggedEvent, Principal, RunRested, StartRun, VersionPublished
from fanin.protos.messages import BundleRef, UpdateHeader, Version
from fanin.protos.plans import CohortPlan
from fanin.server.storage.blobs import Blobs
from fanin.server.storage.commits import GroupCommit
from fanin.server.storage.lanes import Lane
from fanin.server.storage.spool import Spool
from fanin.server.storage.sqlite.commands import ControlStore, Newest
from fanin.server.storage.sqlite.devices import DeviceStore
from fanin.server.storage.sqlite.grids import recorded_grid, recorded_state
from fanin.server.storage.sqlite.outer_states import OuterState
from fanin.server.storage.sqlite.population import EnrolledDevice
from fanin.server.storage.sqlite.rounds import CommittedUpdate, RoundRecord, RoundStore, RoundSummary
from fanin.server.storage.sqlite.runs import RunRecord, RunStore

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Blobs and spool, and the lane on which they are used."""

    blobs: Blobs
    spool: Spool
    lane: Lane

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that reads or writes files, on the disk lane.

        Returns:
            The result of ``work``. Its exceptions are raised here.
        """
        return await self.lane(partial(work, *args, **kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncStores:
    """The synchronous stores over one database."""

    devices: DeviceStore
    runs: RunStore
    rounds: RoundStore
    control: ControlStore


class Stores:
    """The stores of one database, for the event loop.

    Attributes:
        devices: Devices and tokens. They are read from memory, so these reads need no lane.
        runs: Bundles, Runs, Versions and events.
        rounds: Rounds and committed Updates.
        control: The transactions of operators' commands.
        wall: The clock that dates all entries, in seconds since the Unix epoch.
    """

    def __init__(self, sync: SyncStores, lane: Lane, wall: Callable[[], float]) -> None:
        self.devices = sync.devices
        self.runs = AsyncRunStore(sync.runs, lane)
        self.rounds = AsyncRoundStore(sync.rounds, lane)
        self.control = AsyncControlStore(sync.control, lane)
        self.wall = wall
        self._sync = sync
        self._lane = lane

    async def enroll(self, device: EnrolledDevice) -> None:
        """Record a device; a device that is known already stays as it is."""
        await self._lane(partial(self.devices.enroll, device, self.wall()))

    async def recorded_state(self, base: Version) -> OuterState:
        """See ``sqlite.grids.recorded_state``."""
        return await self._lane(partial(recorded_state, base, self._sync.runs, self._sync.rounds))

    async def recorded_grid(self, base: Version) -> tuple[int, ...] | None:
        """See ``sqlite.grids.recorded_grid``."""
        return await self._lane(partial(recorded_grid, base, self._sync.runs, self._sync.rounds))


class AsyncRunStore:
    """``RunStore`` on the store lane."""

    def __init__(self, store: RunStore, lane: Lane) -> None:
        self._store = store
        self._lane = lane

    async def add_bundle(self, bundle: BundleRef) -> None:
        """See ``RunStore.add_bundle``."""
        await self._lane(partial(self._store.add_bundle, bundle))

    async def bundle(self, sha256: str) -> BundleRef | None:
        """See ``RunStore.bundle``."""
        return await self._lane(partial(self._store.bundle, sha256))

    async def run_key(self, run_id: str, new_key: bytes) -> bytes:
        """See ``RunStore.run_key``."""
        return await self._lane(partial(self._store.run_key, run_id, new_key))

    async def add_run(self, start: StartRun, now_s: float, by: Principal | None = None) -> None:
        """See ``RunStore.add_run``."""
        await self._lane(partial(self._store.add_run, start, now_s, by))

    async def runs(self) -> tuple[RunRecord, ...]:
        """See ``RunStore.runs``."""
        return await self._lane(self._store.runs)

    async def run(self, run_id: str) -> RunRecord | None:
        """See ``RunStore.run``."""
        return await self._lane(partial(self._store.run, run_id))

    async def rest(self, run_id: str, rested: RunRested, now_s: float, *, next_sequence: int) -> bool:
        """See ``RunStore.rest``."""
        return await self._lane(partial(self._store.rest, run_id, rested, now_s, next_sequence=next_sequence))

    async def version(self, run_id: str, number: int | None = None) -> Version | None:
        """See ``RunStore.version``."""
        return await self._lane(partial(self._store.version, run_id, number))

    async def newest_version(self, run_id: str) -> Version:
        """Return the newest Version of a Run that is recorded."""
        newest = await self.version(run_id)
        assert newest is not None, "a run has at least version 0"
        return newest

    async def lineage_start(self, run_id: str) -> int:
        """See ``RunStore.lineage_start``."""
        return await self._lane(partial(self._store.lineage_start, run_id))

    async def publication(self, run_id: str, number: int) -> VersionPublished | None:
        """See ``RunStore.publication``."""
        return await self._lane(partial(self._store.publication, run_id, number))

    async def event_page(self, run_id: str, from_sequence: int) -> tuple[LoggedEvent, ...]:
        """See ``RunStore.event_page``."""
        return await self._lane(partial(self._store.event_page, run_id, from_sequence))

    async def accepted_devices(self, run_id: str, round_number: int, from_index: int) -> AcceptedDevices | None:
        """See ``RunStore.accepted_devices``."""
        return await self._lane(partial(self._store.accepted_devices, run_id, round_number, from_index))


class AsyncRoundStore:
    """``RoundStore`` on the store lane. Updates that arrive together are committed in one transaction."""

    def __init__(self, store: RoundStore, lane: Lane) -> None:
        self._store = store
        self._lane = lane
        self._commits = GroupCommit(store, lane)

    async def open(self, record: RoundRecord) -> bool:
        """See ``RoundStore.open``."""
        return await self._lane(partial(self._store.open, record))

    async def set_deadline(self, run_id: str, round_number: int, deadline_at_s: float, now_s: float) -> None:
        """See ``RoundStore.set_deadline``."""
        await self._lane(partial(self._store.set_deadline, run_id, round_number, deadline_at_s, now_s))

    async def commit(self, update: CommittedUpdate, *, buffer: int) -> CommittedUpdate | None:
        """See ``GroupCommit.commit``."""
        return await self._commits.commit(update, buffer=buffer)

    async def close(self, run_id: str, round_number: int, *, cohort: CohortPlan, now_s: float) -> RoundRecord:
        """See ``RoundStore.close``."""
        return await self._lane(partial(self._store.close, run_id, round_number, cohort=cohort, now_s=now_s))

    async def publish(
        self,
        version: Version,
        event: VersionPublished,
        *,
        next_grid: Sequence[int],
        outer_state: OuterState,
        now_s: float,
    ) -> RoundRecord:
        """See ``RoundStore.publish``."""
        publish = partial(self._store.publish, next_grid=next_grid, outer_state=outer_state, now_s=now_s)
        return await self._lane(partial(publish, version, event))

    async def fail(self, run_id: str, round_number: int, *, reason: str, now_s: float) -> RoundRecord:
        """See ``RoundStore.fail``."""
        return await self._lane(partial(self._store.fail, run_id, round_number, reason=reason, now_s=now_s))

    async def last(self, run_id: str) -> RoundRecord | None:
        """See ``RoundStore.last``."""
        return await self._lane(partial(self._store.last, run_id))

    async def unfinished(self, run_id: str) -> RoundRecord | None:
        """Return the Round of a Run that is open or closed, but has not ended."""
        last = await self.last(run_id)
        return None if last is None or last.mark.is_final else last

    async def latest(self, run_id: str, limit: int) -> tuple[RoundSummary, ...]:
        """See ``RoundStore.latest``."""
        return await self._lane(partial(self._store.latest, run_id, limit))

    async def since(self, run_id: str, base_version: int) -> tuple[RoundRecord, ...]:
        """See ``RoundStore.since``."""
        return await self._lane(partial(self._store.since, run_id, base_version))

    async def num_published(self, run_id: str) -> int:
        """See ``RoundStore.num_published``."""
        return await self._lane(partial(self._store.num_published, run_id))

    async def update(self, run_id: str, made_for: int, device_id: str) -> CommittedUpdate | None:
        """See ``RoundStore.update``."""
        return await self._lane(partial(self._store.update, run_id, made_for, device_id))

    async def updates(self, run_id: str, round_number: int) -> tuple[CommittedUpdate, ...]:
        """See ``RoundStore.updates``."""
        return await self._lane(partial(self._store.updates, run_id, round_number))

    async def headers_made_for(self, run_id: str, round_number: int) -> dict[str, UpdateHeader]:
        """See ``RoundStore.headers_made_for``."""
        return await self._lane(partial(self._store.headers_made_for, run_id, round_number))


class AsyncControlStore:
    """``ControlStore`` on the store lane."""

    def __init__(self, store: ControlStore, lane: Lane) -> None:
        self._store = store
        self._lane = lane

    async def is_done(self, command: Command) -> bool:
        """See ``ControlStore.is_done``."""
        return await self._lane(partial(self._store.is_done, command))

    async def pause(self, command: Command, now_s: float) -> None:
        """See ``ControlStore.pause``."""
        await self._lane(partial(self._store.pause, command, now_s))

    async def resume(self, command: Command, num_rounds: int, now_s: float) -> None:
        """See ``ControlStore.resume``."""
        await self._lane(partial(self._store.resume, command, num_rounds, now_s))

    async def stop(self, command: Command, now_s: float, *, is_stuck: bool = False) -> None:
        """See ``ControlStore.stop``."""
        await self._lane(partial(self._store.stop, command, now_s, is_stuck=is_stuck))

    async def publish(self, run_id: str, newest: Newest, now_s: float, command: Command | None = None) -> None:
        """See ``ControlStore.publish``."""
        await self._lane(partial(self._store.publish, run_id, newest, now_s, command))

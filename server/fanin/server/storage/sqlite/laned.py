"""The async stores over SQLite: each method runs a synchronous one on the store lane.

The lane carries out one transaction at a time, so the event loop never waits for the database. The methods are those of
``storage.protocols``.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from sqlalchemy import Engine

from fanin.protos.chunks import Artifact
from fanin.protos.messages import (
    AcceptedDevices,
    BundleRef,
    Command,
    DevicesGone,
    LoggedEvent,
    Principal,
    Reclaim,
    RunRested,
    RunState,
    RunWarned,
    StartRun,
    UpdateHeader,
    Version,
    VersionEvaluation,
    VersionPublished,
)
from fanin.protos.plans import CohortPlan
from fanin.server.storage.lanes import Lane
from fanin.server.storage.origins import recorded_grid, recorded_state
from fanin.server.storage.records import (
    CommittedUpdate,
    Contributors,
    EnrolledDevice,
    Lease,
    Newest,
    OuterState,
    Role,
    RoundRecord,
    RoundSummary,
    RunRecord,
)
from fanin.server.storage.sqlite.commands import SqliteCommands
from fanin.server.storage.sqlite.devices import SqliteDevices
from fanin.server.storage.sqlite.rounds import SqliteRounds
from fanin.server.storage.sqlite.runs import SqliteEvaluations, SqliteRuns
from fanin.server.storage.sqlite.writer import Candidate, GroupCommit, SqliteLeases, SqliteWriter, commit_all


class LanedDevices:
    """``DeviceStore`` over SQLite. Reads are answered from memory, so only enrolling needs the lane."""

    def __init__(self, store: SqliteDevices, lane: Lane) -> None:
        self._store = store
        self._lane = lane

    @property
    def num_devices(self) -> int:
        """See ``DeviceDirectory.num_devices``."""
        return self._store.num_devices

    def find(self, device_id: str) -> EnrolledDevice | None:
        """See ``DeviceDirectory.find``."""
        return self._store.find(device_id)

    def has_token(self, sha256: str, role: Role) -> bool:
        """See ``DeviceDirectory.has_token``."""
        return self._store.has_token(sha256, role)

    def add_token(self, sha256: str, role: Role, now_s: float) -> None:
        """See ``DeviceDirectory.add_token``."""
        self._store.add_token(sha256, role, now_s)

    async def enroll(self, devices: Iterable[EnrolledDevice], now_s: float) -> None:
        """See ``DeviceStore.enroll``."""
        await self._lane(partial(self._store.enroll, devices, now_s))


class LanedRuns:
    """``RunRecords`` over SQLite."""

    def __init__(self, store: SqliteRuns, lane: Lane) -> None:
        self._store = store
        self._lane = lane

    async def add_bundle(self, bundle: BundleRef) -> None:
        """See ``BundleStore.add_bundle``."""
        await self._lane(partial(self._store.add_bundle, bundle))

    async def bundle(self, sha256: str) -> BundleRef | None:
        """See ``BundleStore.bundle``."""
        return await self._lane(partial(self._store.bundle, sha256))

    async def bundles(self) -> tuple[BundleRef, ...]:
        """See ``BundleStore.bundles``."""
        return await self._lane(self._store.bundles)

    async def artifact_page(self, after: int) -> tuple[tuple[Artifact, ...], int | None]:
        """See ``BundleStore.artifact_page``."""
        return await self._lane(partial(self._store.artifact_page, after))

    async def run_key(self, run_id: str, epoch: int, new_key: bytes, now_s: float) -> bytes:
        """See ``RunStore.run_key``."""
        return await self._lane(partial(self._store.run_key, run_id, epoch, new_key, now_s))

    async def remove_unused_keys(self, before_s: float) -> int:
        """See ``RunStore.remove_unused_keys``."""
        return await self._lane(partial(self._store.remove_unused_keys, before_s))

    async def add_run(self, start: StartRun, now_s: float, by: Principal | None = None) -> None:
        """See ``RunStore.add_run``."""
        await self._lane(partial(self._store.add_run, start, now_s, by))

    async def run_ids(self) -> tuple[str, ...]:
        """See ``RunStore.run_ids``."""
        return await self._lane(self._store.run_ids)

    async def run(self, run_id: str) -> RunRecord | None:
        """See ``RunStore.run``."""
        return await self._lane(partial(self._store.run, run_id))

    async def run_state(self, run_id: str) -> RunState:
        """See ``RunStore.run_state``."""
        return await self._lane(partial(self._store.run_state, run_id))

    async def version(self, run_id: str, number: int | None = None) -> Version | None:
        """See ``VersionStore.version``."""
        return await self._lane(partial(self._store.version, run_id, number))

    async def newest_version(self, run_id: str) -> Version:
        """See ``VersionStore.newest_version``."""
        newest = await self.version(run_id)
        assert newest is not None, "a run has at least version 0"
        return newest

    async def lineage_start(self, run_id: str) -> int:
        """See ``VersionStore.lineage_start``."""
        return await self._lane(partial(self._store.lineage_start, run_id))

    async def publication(self, run_id: str, number: int) -> VersionPublished | None:
        """See ``VersionStore.publication``."""
        return await self._lane(partial(self._store.publication, run_id, number))

    async def event_page(self, run_id: str, from_sequence: int) -> tuple[LoggedEvent, ...]:
        """See ``EventStore.event_page``."""
        return await self._lane(partial(self._store.event_page, run_id, from_sequence))

    async def warnings(self, run_id: str) -> tuple[RunWarned, ...]:
        """See ``EventStore.warnings``."""
        return await self._lane(partial(self._store.warnings, run_id))


class LanedRounds:
    """``RoundRecords`` over SQLite."""

    def __init__(self, store: SqliteRounds, runs: SqliteRuns, lane: Lane) -> None:
        self._store = store
        self._runs = runs
        self._lane = lane

    async def last(self, run_id: str) -> RoundRecord | None:
        """See ``RoundStore.last``."""
        return await self._lane(partial(self._store.last, run_id))

    async def unfinished(self, run_id: str) -> RoundRecord | None:
        """See ``RoundStore.unfinished``."""
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

    async def contributors(self, run_id: str) -> Contributors:
        """See ``RoundStore.contributors``."""
        return await self._lane(partial(self._store.contributors, run_id))

    async def update(self, run_id: str, made_for: int, device_id: str) -> CommittedUpdate | None:
        """See ``CommittedUpdates.update``."""
        return await self._lane(partial(self._store.update, run_id, made_for, device_id))

    async def updates(self, run_id: str, round_number: int) -> tuple[CommittedUpdate, ...]:
        """See ``CommittedUpdates.updates``."""
        return await self._lane(partial(self._store.updates, run_id, round_number))

    async def updates_of(self, run_id: str, round_number: int, devices: Sequence[str]) -> tuple[CommittedUpdate, ...]:
        """See ``CommittedUpdates.updates_of``."""
        return await self._lane(partial(self._store.updates_of, run_id, round_number, devices))

    async def headers_made_for(self, run_id: str, round_number: int) -> dict[str, UpdateHeader]:
        """See ``CommittedUpdates.headers_made_for``."""
        return await self._lane(partial(self._store.headers_made_for, run_id, round_number))

    async def last_folded(self, run_id: str, device_id: str, *, lineage: int) -> int:
        """See ``CommittedUpdates.last_folded``."""
        return await self._lane(partial(self._store.last_folded, run_id, device_id, lineage=lineage))

    async def accepted_devices(self, run_id: str, round_number: int, from_index: int) -> AcceptedDevices | None:
        """See ``RoundStore.accepted_devices``."""
        return await self._lane(partial(self._store.accepted_devices, run_id, round_number, from_index))

    async def recorded_grid(self, base: Version) -> tuple[int, ...] | None:
        """See ``OriginStore.recorded_grid``."""
        return await self._lane(partial(recorded_grid, base, self._runs, self._store))

    async def recorded_state(self, base: Version) -> OuterState:
        """See ``OriginStore.recorded_state``."""
        return await self._lane(partial(recorded_state, base, self._runs, self._store))


class LanedEvaluations:
    """``EvaluationStore`` over SQLite."""

    def __init__(self, store: SqliteEvaluations, lane: Lane) -> None:
        self._store = store
        self._lane = lane

    async def add_evaluation(self, run_id: str, evaluation: VersionEvaluation, score: float | None) -> None:
        """See ``EvaluationStore.add_evaluation``."""
        await self._lane(partial(self._store.add_evaluation, run_id, evaluation, score))

    async def unevaluated(self, run_id: str, above: int) -> frozenset[int]:
        """See ``EvaluationStore.unevaluated``."""
        return await self._lane(partial(self._store.unevaluated, run_id, above))

    async def evaluation_page(self, run_id: str, from_version: int) -> tuple[VersionEvaluation, ...]:
        """See ``EvaluationStore.evaluation_page``."""
        return await self._lane(partial(self._store.evaluation_page, run_id, from_version))

    async def newest_evaluation(self, run_id: str) -> VersionEvaluation | None:
        """See ``EvaluationStore.newest_evaluation``."""
        return await self._lane(partial(self._store.newest_evaluation, run_id))

    async def best_evaluation(self, run_id: str) -> VersionEvaluation | None:
        """See ``EvaluationStore.best_evaluation``."""
        return await self._lane(partial(self._store.best_evaluation, run_id))


class LanedLeases:
    """``LeaseStore`` over SQLite. Updates that arrive together are committed in one transaction, of whichever Run."""

    def __init__(self, engine: Engine, lane: Lane) -> None:
        self._engine = engine
        self._store = SqliteLeases(engine)
        self._lane = lane
        self._commits = GroupCommit(partial(commit_all, engine), lane)

    async def take(self, run_id: str, holder: str, now_s: float) -> "LanedWriter":
        """See ``LeaseStore.take``."""
        lease = await self._lane(partial(self._store.take, run_id, holder, now_s))
        return LanedWriter(SqliteWriter(self._engine, lease), self._commits, self._lane)

    async def lease(self, run_id: str) -> Lease | None:
        """See ``LeaseStore.lease``."""
        return await self._lane(partial(self._store.lease, run_id))


class LanedWriter:
    """``RunWriter`` over SQLite."""

    def __init__(self, writer: SqliteWriter, commits: GroupCommit, lane: Lane) -> None:
        self._writer = writer
        self._commits = commits
        self._lane = lane

    @property
    def lease(self) -> Lease:
        """See ``RunWriter.lease``."""
        return self._writer.lease

    async def open(self, record: RoundRecord) -> bool:
        """See ``RoundWriter.open``."""
        return await self._lane(partial(self._writer.open, record))

    async def set_deadline(self, round_number: int, deadline_at_s: float, now_s: float) -> None:
        """See ``RoundWriter.set_deadline``."""
        await self._lane(partial(self._writer.set_deadline, round_number, deadline_at_s, now_s))

    async def commit(self, update: CommittedUpdate, *, buffer: int) -> CommittedUpdate | None:
        """See ``RoundWriter.commit``."""
        return await self._commits.commit(Candidate(update=update, buffer=buffer, lease=self.lease))

    async def close(
        self, round_number: int, *, cohort: CohortPlan, now_s: float, cause: str = "", others_wait: bool = False
    ) -> RoundRecord:
        """See ``RoundWriter.close``."""
        close = partial(self._writer.close, cohort=cohort, now_s=now_s, cause=cause, others_wait=others_wait)
        return await self._lane(partial(close, round_number))

    async def publish(
        self,
        version: Version,
        event: VersionPublished,
        *,
        next_grid: Sequence[int],
        outer_state: OuterState,
        now_s: float,
    ) -> RoundRecord:
        """See ``RoundWriter.publish``."""
        publish = partial(self._writer.publish, next_grid=next_grid, outer_state=outer_state, now_s=now_s)
        return await self._lane(partial(publish, version, event))

    async def fail(self, round_number: int, *, reason: str, now_s: float) -> RoundRecord:
        """See ``RoundWriter.fail``."""
        return await self._lane(partial(self._writer.fail, round_number, reason=reason, now_s=now_s))

    async def rest(self, rested: RunRested, now_s: float, *, next_sequence: int) -> bool:
        """See ``RunWriter.rest``."""
        return await self._lane(partial(self._writer.rest, rested, now_s, next_sequence=next_sequence))

    async def warn(self, warnings: Sequence[RunWarned], now_s: float) -> None:
        """See ``RunWriter.warn``."""
        await self._lane(partial(self._writer.warn, warnings, now_s))

    async def note(self, event: DevicesGone, now_s: float) -> None:
        """See ``RunWriter.note``."""
        await self._lane(partial(self._writer.note, event, now_s))


class LanedCommands:
    """``CommandStore`` over SQLite."""

    def __init__(self, store: SqliteCommands, lane: Lane) -> None:
        self._store = store
        self._lane = lane

    async def is_done(self, command: Command) -> bool:
        """See ``CommandStore.is_done``."""
        return await self._lane(partial(self._store.is_done, command))

    async def pause(self, command: Command, now_s: float) -> None:
        """See ``CommandStore.pause``."""
        await self._lane(partial(self._store.pause, command, now_s))

    async def resume(self, command: Command, num_rounds: int, now_s: float) -> None:
        """See ``CommandStore.resume``."""
        await self._lane(partial(self._store.resume, command, num_rounds, now_s))

    async def stop(self, command: Command, now_s: float, *, is_stuck: bool = False) -> None:
        """See ``CommandStore.stop``."""
        await self._lane(partial(self._store.stop, command, now_s, is_stuck=is_stuck))

    async def publish(self, run_id: str, newest: Newest, now_s: float, command: Command | None = None) -> None:
        """See ``CommandStore.publish``."""
        await self._lane(partial(self._store.publish, run_id, newest, now_s, command))

    async def reclaim(self, reclaim: Reclaim, event: VersionPublished, now_s: float) -> None:
        """See ``CommandStore.reclaim``."""
        await self._lane(partial(self._store.reclaim, reclaim, event, now_s))

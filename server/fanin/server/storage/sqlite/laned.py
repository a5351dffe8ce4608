"""The async stores over SQLite: each method runs a synchronous one on the store lane.

The lane carries out one transaction at a time, so the event loop never waits for the database. The methods are those of
``storage.protocols``.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Concatenate, Generic, ParamSpec, TypeVar

from sqlalchemy import Engine

from fanin.protos.errors import Superseded
from fanin.protos.messages import NewToken, TokenInfo, Version
from fanin.server.storage.lanes import Lane
from fanin.server.storage.origins import recorded_grid, recorded_state, recorded_steps
from fanin.server.storage.records import (
    CommittedUpdate,
    EnrolledDevice,
    Lease,
    OuterState,
    RoundMessage,
    RoundRecord,
)
from fanin.server.storage.sqlite.administration import SqliteAudit, SqliteTokens
from fanin.server.storage.sqlite.care import SqliteRetention
from fanin.server.storage.sqlite.commands import SqliteCommands
from fanin.server.storage.sqlite.devices import SqliteDevices
from fanin.server.storage.sqlite.history import SqliteEvaluations, SqliteHistory
from fanin.server.storage.sqlite.ledger.rows import SqliteLedger
from fanin.server.storage.sqlite.messages import SqliteMessages
from fanin.server.storage.sqlite.rounds import SqliteRounds
from fanin.server.storage.sqlite.runs import SqliteRuns
from fanin.server.storage.sqlite.writer import (
    AnyCandidate,
    Candidate,
    MessageCandidate,
    SqliteLeases,
    SqliteWriter,
    Verdict,
    commit_all,
)

StoreT = TypeVar("StoreT")
ResultT = TypeVar("ResultT")
P = ParamSpec("P")


class _Laned(Generic[StoreT]):
    """A synchronous store, and the lane on which its methods run."""

    def __init__(self, store: StoreT, lane: Lane) -> None:
        self._store = store
        self._lane = lane


def laned(
    method: Callable[Concatenate[StoreT, P], ResultT],
) -> Callable[Concatenate[_Laned[StoreT], P], Coroutine[object, object, ResultT]]:
    """Return the async method that runs a method of the synchronous store on the lane."""

    async def call(self: _Laned[StoreT], /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        return await self._lane(partial(method, self._store, *args, **kwargs))

    return call


class GroupCommit:
    """Commits all waiting Updates and messages, of all Runs, in one transaction.

    Updates that arrive while a transaction is being synced share the next one. A sync takes the disk milliseconds, for
    one row as for a hundred. Without groups, devices that finish together would wait for one sync each. A device is
    answered only after the transaction with its own row is durable.

    Args:
        commit_all: Commits Updates in one transaction (``commit_all``).
        store_lane: The lane of the database.
    """

    def __init__(self, commit_all: Callable[[Sequence[AnyCandidate]], list[Verdict]], store_lane: Lane) -> None:
        self._commit_together = commit_all
        self._store_lane = store_lane
        self._waiting: list[tuple[AnyCandidate, asyncio.Future[CommittedUpdate | RoundMessage | None]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def commit(self, candidate: Candidate) -> CommittedUpdate | None:
        """Commit one Update together with others. See ``RoundWriter.commit``."""
        recorded = await self._commit(candidate)
        assert not isinstance(recorded, RoundMessage)
        return recorded

    async def add_message(self, candidate: MessageCandidate) -> RoundMessage | None:
        """Record one message together with others. See ``RoundWriter.add_message``."""
        recorded = await self._commit(candidate)
        assert not isinstance(recorded, CommittedUpdate)
        return recorded

    async def _commit(self, candidate: AnyCandidate) -> CommittedUpdate | RoundMessage | None:
        answer: asyncio.Future[CommittedUpdate | RoundMessage | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((candidate, answer))
        if self._worker is None:
            self._worker = asyncio.create_task(self._commit_all(), name="group commit")
        return await answer

    async def _commit_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            candidates = [candidate for candidate, _ in group]
            outcome = asyncio.ensure_future(self._store_lane(partial(self._commit_together, candidates)))
            await asyncio.wait({outcome})
            # Every waiting caller must receive the error.
            problem = outcome.exception()
            for index, (_, answer) in enumerate(group):
                if answer.done():
                    continue
                if problem is not None:
                    answer.set_exception(problem)
                    continue
                verdict = outcome.result()[index]
                if isinstance(verdict, Superseded):
                    answer.set_exception(verdict)
                else:
                    answer.set_result(verdict)
        self._worker = None


class LanedDevices(_Laned[SqliteDevices]):
    """``DeviceStore`` over SQLite. Reads of callers are answered from memory."""

    @property
    def num_devices(self) -> int:
        """See ``DeviceDirectory.num_devices``."""
        return self._store.num_devices

    @property
    def num_banned(self) -> int:
        """See ``DeviceDirectory.num_banned``."""
        return self._store.num_banned

    def find(self, device_id: str) -> EnrolledDevice | None:
        """See ``DeviceDirectory.find``."""
        return self._store.find(device_id)

    def banned_at(self, device_id: str) -> float | None:
        """See ``DeviceDirectory.banned_at``."""
        return self._store.banned_at(device_id)

    def is_removed(self, device_id: str) -> bool:
        """See ``DeviceDirectory.is_removed``."""
        return self._store.is_removed(device_id)

    def find_token(self, sha256: str) -> TokenInfo | None:
        """See ``DeviceDirectory.find_token``."""
        return self._store.find_token(sha256)

    def add_token(self, new: NewToken, now_s: float) -> None:
        """See ``DeviceDirectory.add_token``."""
        self._store.add_token(new, now_s)

    enroll = laned(SqliteDevices.enroll)
    device = laned(SqliteDevices.device)
    device_page = laned(SqliteDevices.device_page)
    change = laned(SqliteDevices.change)
    note = laned(SqliteDevices.note)


class LanedTokens(_Laned[SqliteTokens]):
    """``TokenStore`` over SQLite."""

    named = laned(SqliteTokens.named)
    token_page = laned(SqliteTokens.token_page)
    create = laned(SqliteTokens.create)
    rotate = laned(SqliteTokens.rotate)
    revoke = laned(SqliteTokens.revoke)


class LanedAudit(_Laned[SqliteAudit]):
    """``AuditStore`` over SQLite."""

    append = laned(SqliteAudit.append)
    audit_page = laned(SqliteAudit.audit_page)


class LanedRuns(_Laned[SqliteRuns]):
    """``RunRecords`` over SQLite."""

    add_bundle = laned(SqliteRuns.add_bundle)
    bundle = laned(SqliteRuns.bundle)
    bundles = laned(SqliteRuns.bundles)
    artifact_page = laned(SqliteRuns.artifact_page)
    run_key = laned(SqliteRuns.run_key)
    remove_unused_keys = laned(SqliteRuns.remove_unused_keys)
    add_run = laned(SqliteRuns.add_run)
    run_ids = laned(SqliteRuns.run_ids)
    run = laned(SqliteRuns.run)
    run_state = laned(SqliteRuns.run_state)
    version = laned(SqliteRuns.version)

    async def newest_version(self, run_id: str) -> Version:
        """See ``VersionStore.newest_version``."""
        newest = await self.version(run_id)
        assert newest is not None, "a run has at least version 0"
        return newest

    lineage_start = laned(SqliteRuns.lineage_start)
    publication = laned(SqliteRuns.publication)
    event_page = laned(SqliteRuns.event_page)
    newest_sequence = laned(SqliteRuns.newest_sequence)
    warnings = laned(SqliteRuns.warnings)


class LanedRounds(_Laned[SqliteRounds]):
    """``RoundRecords`` over SQLite."""

    def __init__(self, store: SqliteRounds, runs: SqliteRuns, lane: Lane) -> None:
        super().__init__(store, lane)
        self._runs = runs

    last = laned(SqliteRounds.last)

    async def unfinished(self, run_id: str) -> RoundRecord | None:
        """See ``RoundStore.unfinished``."""
        last = await self.last(run_id)
        return None if last is None or last.mark.is_final else last

    latest = laned(SqliteRounds.latest)
    since = laned(SqliteRounds.since)
    num_published = laned(SqliteRounds.num_published)
    contributors = laned(SqliteRounds.contributors)
    update = laned(SqliteRounds.update)
    updates = laned(SqliteRounds.updates)
    updates_of = laned(SqliteRounds.updates_of)
    headers_made_for = laned(SqliteRounds.headers_made_for)
    last_folded = laned(SqliteRounds.last_folded)
    accepted_devices = laned(SqliteRounds.accepted_devices)

    async def recorded_grid(self, base: Version) -> tuple[int, ...] | None:
        """See ``OriginStore.recorded_grid``."""
        return await self._lane(partial(recorded_grid, base, self._runs, self._store))

    async def recorded_state(self, base: Version) -> OuterState:
        """See ``OriginStore.recorded_state``."""
        return await self._lane(partial(recorded_state, base, self._runs, self._store))

    async def recorded_steps(self, base: Version) -> int:
        """See ``OriginStore.recorded_steps``."""
        return await self._lane(partial(recorded_steps, base, self._runs))


class LanedMessages(_Laned[SqliteMessages]):
    """``MessageStore`` over SQLite."""

    message = laned(SqliteMessages.message)
    messages = laned(SqliteMessages.messages)
    senders = laned(SqliteMessages.senders)
    rosters = laned(SqliteMessages.rosters)


class LanedEvaluations(_Laned[SqliteEvaluations]):
    """``EvaluationStore`` over SQLite."""

    add_evaluation = laned(SqliteEvaluations.add_evaluation)
    unevaluated = laned(SqliteEvaluations.unevaluated)
    evaluation_page = laned(SqliteEvaluations.evaluation_page)
    newest_evaluation = laned(SqliteEvaluations.newest_evaluation)
    best_evaluation = laned(SqliteEvaluations.best_evaluation)


class LanedHistory(_Laned[SqliteHistory]):
    """``HistoryStore`` over SQLite."""

    feed = laned(SqliteHistory.feed)
    feed_after = laned(SqliteHistory.feed_after)
    rounds_before = laned(SqliteHistory.rounds_before)
    versions_before = laned(SqliteHistory.versions_before)
    publications = laned(SqliteHistory.publications)
    evaluations_of = laned(SqliteHistory.evaluations_of)


class LanedRetention(_Laned[SqliteRetention]):
    """``RetentionStore`` over SQLite."""

    facts = laned(SqliteRetention.facts)
    contents = laned(SqliteRetention.contents)
    remove = laned(SqliteRetention.remove)
    pending_rounds = laned(SqliteRetention.pending_rounds)
    pending_versions = laned(SqliteRetention.pending_versions)
    finish = laned(SqliteRetention.finish)
    forget = laned(SqliteRetention.forget)
    give_back = laned(SqliteRetention.give_back)
    removed = laned(SqliteRetention.removed)


class LanedLedger(_Laned[SqliteLedger]):
    """``LedgerStore`` over SQLite."""

    populations = laned(SqliteLedger.populations)
    population = laned(SqliteLedger.population)
    counts = laned(SqliteLedger.counts)
    ledger_page = laned(SqliteLedger.ledger_page)
    charged = laned(SqliteLedger.charged)
    charge = laned(SqliteLedger.charge)


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


class LanedWriter(_Laned[SqliteWriter]):
    """``RunWriter`` over SQLite."""

    def __init__(self, writer: SqliteWriter, commits: GroupCommit, lane: Lane) -> None:
        super().__init__(writer, lane)
        self._commits = commits

    @property
    def lease(self) -> Lease:
        """See ``RunWriter.lease``."""
        return self._store.lease

    open = laned(SqliteWriter.open)
    set_deadline = laned(SqliteWriter.set_deadline)

    async def commit(self, update: CommittedUpdate, *, buffer: int) -> CommittedUpdate | None:
        """See ``RoundWriter.commit``."""
        return await self._commits.commit(Candidate(update=update, buffer=buffer, lease=self.lease))

    async def add_message(self, message: RoundMessage) -> RoundMessage | None:
        """See ``RoundWriter.add_message``."""
        return await self._commits.add_message(MessageCandidate(message=message, lease=self.lease))

    freeze = laned(SqliteWriter.freeze)
    close = laned(SqliteWriter.close)
    publish = laned(SqliteWriter.publish)
    fail = laned(SqliteWriter.fail)
    keep_ranges = laned(SqliteWriter.keep_ranges)
    rest = laned(SqliteWriter.rest)
    warn = laned(SqliteWriter.warn)
    note = laned(SqliteWriter.note)


class LanedCommands(_Laned[SqliteCommands]):
    """``CommandStore`` over SQLite."""

    is_done = laned(SqliteCommands.is_done)
    pause = laned(SqliteCommands.pause)
    resume = laned(SqliteCommands.resume)
    stop = laned(SqliteCommands.stop)
    publish = laned(SqliteCommands.publish)
    reclaim = laned(SqliteCommands.reclaim)

"""The removal of what a Run no longer needs, in memory."""

from dataclasses import replace

from fanin.protos.messages import DevicesGone, RoundClosed, RoundOpened
from fanin.protos.plans import RetentionPlan
from fanin.server.storage.memory.database import MemoryDatabase, RunRows
from fanin.server.storage.protocols.retention import PendingRound, PendingVersion, Removed
from fanin.server.storage.records import ForgottenSet, RoundMark, set_sha256
from fanin.server.storage.retention import Removable, RemovedKind, RoundFact, RunFacts, VersionFact, removable


class MemoryRetention:
    """``RetentionStore`` in memory."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database

    async def facts(self, run_id: str) -> RunFacts:
        """See ``RetentionStore.facts``."""
        return _facts(self._database, run_id)

    async def contents(
        self, run_id: str, what: Removable
    ) -> tuple[tuple[PendingVersion, ...], tuple[PendingRound, ...], int]:
        """See ``RetentionStore.contents``."""
        rows = self._database.runs[run_id]
        versions = tuple(_version(rows, run_id, number) for number in what.versions)
        rounds = tuple(_round(rows, run_id, number) for number in what.rounds)
        return versions, rounds, len(_old_events(rows, what.events_before_s))

    async def remove(self, run_id: str, retention: RetentionPlan, now_s: float) -> Removable:
        """See ``RetentionStore.remove``."""
        rows, what = self._database.runs[run_id], removable(await self.facts(run_id), retention, now_s)
        rows.removals |= {(RemovedKind.PARAMETERS, number): now_s for number in what.versions}
        rows.removals |= {(RemovedKind.UPDATES, number): now_s for number in what.rounds}
        rows.unfinished |= {(RemovedKind.PARAMETERS, number) for number in what.versions}
        rows.unfinished |= {(RemovedKind.UPDATES, number) for number in what.rounds}
        for number in what.rounds:
            rows.messages.pop(number, None)
        rows.erase_seeds(what.rounds)
        old = _old_events(rows, what.events_before_s)
        rows.events = [logged for logged in rows.events if logged.sequence not in old]
        return what

    async def pending_rounds(self) -> tuple[PendingRound, ...]:
        """See ``RetentionStore.pending_rounds``."""
        return tuple(
            _round(rows, run_id, number)
            for run_id, rows in self._database.runs.items()
            for kind, number in sorted(rows.unfinished, key=lambda each: each[1])
            if kind is RemovedKind.UPDATES
        )

    async def pending_versions(self) -> tuple[PendingVersion, ...]:
        """See ``RetentionStore.pending_versions``."""
        return tuple(
            _version(rows, run_id, number)
            for run_id, rows in self._database.runs.items()
            for kind, number in sorted(rows.unfinished, key=lambda each: each[1])
            if kind is RemovedKind.PARAMETERS
        )

    async def finish(self, pending: PendingRound | PendingVersion, now_s: float) -> None:
        """See ``RetentionStore.finish``."""
        unfinished = self._database.runs[pending.run_id].unfinished
        if isinstance(pending, PendingRound):
            unfinished.discard((RemovedKind.UPDATES, pending.round))
        else:
            unfinished.discard((RemovedKind.PARAMETERS, pending.number))

    async def forget(self, run_id: str) -> int:
        """See ``RetentionStore.forget``."""
        rows = self._database.runs[run_id]
        gone = {number for kind, number in rows.removals if kind is RemovedKind.UPDATES}
        finished = gone - {number for kind, number in rows.unfinished if kind is RemovedKind.UPDATES}
        below = rows.newest.number - rows.record.start.plan.aggregation.max_staleness
        ended = [
            number
            for number, record in rows.rounds.items()
            if record.forgotten is None
            and record.base_version < below
            and (number in finished or (record.mark is RoundMark.FAILED and number < max(gone, default=0)))
        ]
        for number in ended:
            _forget(rows, number)
        return len(ended)

    async def give_back(self) -> bool:
        """See ``RetentionStore.give_back``."""
        return False

    async def removed(self, run_id: str) -> Removed:
        """See ``RetentionStore.removed``."""
        return self._database.runs[run_id].removed


def _forget(rows: RunRows, number: int) -> None:
    record, committed = rows.rounds[number], tuple(rows.updates.pop(number, {}).values())
    for update in committed:
        del rows.updates_by_assigned_round[update.header.round][update.device_id]
        if record.mark is RoundMark.PUBLISHED:
            before, _, _ = rows.contributions.get(update.device_id, (0, 0, 0))
            rows.contributions[update.device_id] = (before + 1, number, update.header.round)
    forgotten = ForgottenSet(num_updates=len(committed), sha256=set_sha256(committed))
    rows.rounds[number] = replace(record, accepted=(), forgotten=forgotten)
    rows.events = [
        logged for logged in rows.events if not (isinstance(logged.event, RoundClosed) and logged.event.round == number)
    ]


def _facts(database: MemoryDatabase, run_id: str) -> RunFacts:
    rows = database.runs[run_id]
    removed, by_round = rows.removed, {number: version for version, number in rows.round_by_version.items() if number}
    unfinished = [each.base_version for each in rows.rounds.values() if not each.mark.is_final]
    scored = [(number, score) for number, (_, score) in rows.evaluations.items() if score is not None]
    adopters = {number for number, event in rows.publications.items() if event.adopted_run_id}
    sources = {
        event.adopted_number
        for other in database.runs.values()
        for event in other.publications.values()
        if event.adopted_run_id == run_id
    }
    best = {max(scored, key=lambda each: (each[1], -each[0]))[0]} if scored else set()
    max_staleness = rows.record.start.plan.aggregation.max_staleness
    return RunFacts(
        versions={
            number: VersionFact(round=round_number, published_at_s=rows.published_at_s[number])
            for number, round_number in rows.round_by_version.items()
            if number not in removed.versions
        },
        rounds={
            number: RoundFact(
                bases=frozenset(
                    rows.rounds[update.header.round].base_version for update in rows.updates[number].values()
                )
                | {record.base_version},
                published_at_s=rows.published_at_s[by_round[number]],
            )
            for number, record in rows.rounds.items()
            if record.mark is RoundMark.PUBLISHED and number not in removed.rounds
        },
        needed=max(min(unfinished) - max_staleness, 0) if unfinished else None,
        pinned=frozenset(adopters | sources | best),
    )


def _version(rows: RunRows, run_id: str, number: int) -> PendingVersion:
    state = rows.outer_states.get(rows.round_by_version[number], {})
    return PendingVersion(run_id=run_id, number=number, artifacts=(*rows.versions[number].artifacts, *state.values()))


def _round(rows: RunRows, run_id: str, number: int) -> PendingRound:
    updates = tuple((update.header, device) for device, update in rows.updates[number].items())
    return PendingRound(run_id=run_id, round=number, updates=updates)


def _old_events(rows: RunRows, before_s: float | None) -> frozenset[int]:
    if before_s is None:
        return frozenset()
    return frozenset(
        logged.sequence
        for logged in rows.events[:-1]
        if logged.time < before_s and isinstance(logged.event, RoundOpened | RoundClosed | DevicesGone)
    )

"""Bundles, Runs, Versions and events in memory."""

from bisect import bisect_left
from collections.abc import Collection, Iterator

from fanin.protos.chunks import Artifact
from fanin.protos.errors import Conflict
from fanin.protos.messages import (
    MAX_PAGE_EVALUATIONS,
    BundleRef,
    LoggedEvent,
    Principal,
    RunState,
    RunWarned,
    StartRun,
    Version,
    VersionEvaluation,
    VersionPublished,
)
from fanin.server.storage.decisions import check_new_key
from fanin.server.storage.memory.database import MemoryDatabase, RunRows
from fanin.server.storage.memory.ledger import begin_population
from fanin.server.storage.protocols.retention import Removed
from fanin.server.storage.protocols.runs import PAGE_EVENTS
from fanin.server.storage.records import RunRecord


class MemoryRunArchive:
    """``RunArchive`` in memory."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database

    def run(self, run_id: str) -> RunRecord | None:
        """See ``RunArchive.run``."""
        rows = self._database.runs.get(run_id)
        return None if rows is None else rows.record

    def bundle(self, sha256: str) -> BundleRef | None:
        """See ``RunArchive.bundle``."""
        return self._database.bundles.get(sha256)

    def version(self, run_id: str, number: int | None = None) -> Version | None:
        """See ``RunArchive.version``."""
        rows = self._database.runs.get(run_id)
        if rows is None:
            return None
        return rows.newest if number is None else rows.versions.get(number)

    def events(self, run_id: str) -> Iterator[LoggedEvent]:
        """See ``RunArchive.events``."""
        yield from tuple(self._database.runs[run_id].events)

    def round_by_version(self, run_id: str) -> dict[int, int]:
        """See ``RunArchive.round_by_version``."""
        return dict(self._database.runs[run_id].round_by_version)

    def lineage_start(self, run_id: str, until: int | None = None) -> int:
        """See ``RunArchive.lineage_start``."""
        rounds = self._database.runs[run_id].round_by_version
        return max(number for number in rounds if not rounds[number] and (until is None or number <= until))

    def removed(self, run_id: str) -> Removed:
        """See ``RunArchive.removed``."""
        return self._database.runs[run_id].removed

    def adopted(self, run_id: str, version: int) -> tuple[str, int] | None:
        """See ``RunArchive.adopted``."""
        event = self._database.runs[run_id].publication(version)
        return (event.adopted_run_id, event.adopted_number) if event is not None and event.adopted_run_id else None


class MemoryRuns:
    """``RunRecords`` in memory."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self._archive = MemoryRunArchive(database)

    async def add_bundle(self, bundle: BundleRef) -> None:
        """See ``BundleStore.add_bundle``."""
        self._database.bundles.setdefault(bundle.manifest.sha256, bundle)

    async def bundle(self, sha256: str) -> BundleRef | None:
        """See ``BundleStore.bundle``."""
        return self._archive.bundle(sha256)

    async def bundles(self) -> tuple[BundleRef, ...]:
        """See ``BundleStore.bundles``."""
        return tuple(self._database.bundles.values())

    async def artifact_page(self, after: int) -> tuple[tuple[Artifact, ...], int | None]:
        """See ``BundleStore.artifact_page``. There is one page."""
        rows = self._database.runs.values()
        stored = [(each, number) for each in rows for number in each.versions if number not in each.removed.versions]
        versions = [each.versions[number] for each, number in stored]
        states = [each.outer_states.get(each.round_by_version[number], {}) for each, number in stored]
        return (
            *(artifact for version in versions for artifact in version.artifacts),
            *(artifact for state in states for artifact in state.values()),
        ), None

    async def run_key(self, run_id: str, epoch: int, new_key: bytes, now_s: float) -> bytes:
        """See ``RunStore.run_key``."""
        if (run_id, epoch) not in self._database.run_keys:
            check_new_key(run_id, epoch, self._epoch(run_id))
        return self._database.run_keys.setdefault((run_id, epoch), (new_key, now_s))[0]

    async def remove_unused_keys(self, before_s: float) -> int:
        """See ``RunStore.remove_unused_keys``."""
        keys = self._database.run_keys
        unused = [
            (run_id, epoch)
            for (run_id, epoch), (_, prepared_s) in keys.items()
            if prepared_s < before_s and epoch != self._epoch(run_id)
        ]
        for name in unused:
            del keys[name]
        return len(unused)

    def _epoch(self, run_id: str) -> int:
        """Return the epoch of a Run, 0 if it is not recorded."""
        rows = self._database.runs.get(run_id)
        return 0 if rows is None else rows.record.delegation.epoch

    async def add_run(self, start: StartRun, now_s: float, by: Principal | None = None) -> None:
        """See ``RunStore.add_run``."""
        if start.run_id in self._database.runs:
            raise Conflict(
                f"the record already has this entry (run {start.run_id}); read the state again, then decide",
                code="FN-0509",
            )
        if start.plan.privacy:
            begin_population(self._database, start, by, now_s)
        max_rounds = start.plan.stop.max_rounds
        record = RunRecord(
            start=start, state=RunState.RUNNING, reason="", max_rounds=max_rounds, started_by=by, started_at_s=now_s
        )
        rows = RunRows(record=record)
        rows.add_version(start.version, None, now_s)
        self._database.runs[start.run_id] = rows

    async def run_ids(self, states: Collection[RunState] = ()) -> tuple[str, ...]:
        """See ``RunStore.run_ids``."""
        runs = self._database.runs
        return tuple(run_id for run_id, rows in runs.items() if not states or rows.record.state in states)

    async def run(self, run_id: str) -> RunRecord | None:
        """See ``RunStore.run``."""
        return self._archive.run(run_id)

    async def run_state(self, run_id: str) -> RunState:
        """See ``RunStore.run_state``."""
        return self._database.runs[run_id].record.state

    async def version(self, run_id: str, number: int | None = None) -> Version | None:
        """See ``VersionStore.version``."""
        return self._archive.version(run_id, number)

    async def newest_version(self, run_id: str) -> Version:
        """See ``VersionStore.newest_version``."""
        return self._database.runs[run_id].newest

    async def lineage_start(self, run_id: str, until: int | None = None) -> int:
        """See ``VersionStore.lineage_start``."""
        return self._archive.lineage_start(run_id, until)

    async def publication(self, run_id: str, number: int) -> VersionPublished | None:
        """See ``VersionStore.publication``."""
        return self._database.runs[run_id].publication(number)

    async def warnings(self, run_id: str) -> tuple[RunWarned, ...]:
        """See ``EventStore.warnings``."""
        return self._database.runs[run_id].warnings

    async def event_page(self, run_id: str, from_sequence: int) -> tuple[LoggedEvent, ...]:
        """See ``EventStore.event_page``."""
        rows = self._database.runs.get(run_id)
        if rows is None:
            return ()
        first = bisect_left(rows.events, from_sequence, key=lambda logged: logged.sequence)
        return tuple(rows.events[first : first + PAGE_EVENTS])

    async def newest_sequence(self, run_id: str) -> int:
        """See ``EventStore.newest_sequence``."""
        rows = self._database.runs.get(run_id)
        return rows.events[-1].sequence if rows is not None and rows.events else 0


class MemoryEvaluations:
    """``EvaluationStore`` in memory."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database

    async def add_evaluation(self, run_id: str, evaluation: VersionEvaluation, score: float | None) -> None:
        """See ``EvaluationStore.add_evaluation``."""
        if evaluation.version in await self.unevaluated(run_id, evaluation.version - 1):
            self._database.runs[run_id].evaluations[evaluation.version] = (evaluation, score)

    async def unevaluated(self, run_id: str, above: int) -> frozenset[int]:
        """See ``EvaluationStore.unevaluated``."""
        rows = self._database.runs[run_id]
        evaluated = {number for number, (_, score) in rows.evaluations.items() if score is not None}
        return frozenset(
            number
            for number in rows.versions
            if number > above and number not in evaluated and number not in rows.removed.versions
        )

    async def evaluation_page(self, run_id: str, from_version: int) -> tuple[VersionEvaluation, ...]:
        """See ``EvaluationStore.evaluation_page``."""
        rows = [evaluation for number, evaluation, _ in self._rows(run_id) if number >= from_version]
        return tuple(rows[:MAX_PAGE_EVALUATIONS])

    async def newest_evaluation(self, run_id: str) -> VersionEvaluation | None:
        """See ``EvaluationStore.newest_evaluation``."""
        rows = self._rows(run_id)
        return rows[-1][1] if rows else None

    async def best_evaluation(self, run_id: str) -> VersionEvaluation | None:
        """See ``EvaluationStore.best_evaluation``."""
        scored = [(score, -number, one) for number, one, score in self._rows(run_id) if score is not None]
        same = [row for row in scored if row[2].data_sha256 == scored[-1][2].data_sha256]
        return max(same, key=lambda row: row[:2])[2] if same else None

    def _rows(self, run_id: str) -> list[tuple[int, VersionEvaluation, float | None]]:
        """Return number, evaluation and score of each row, in the order of the Versions."""
        rows = self._database.runs.get(run_id)
        return [] if rows is None else [(number, *rows.evaluations[number]) for number in sorted(rows.evaluations)]

"""The record in pages, newest first, and evaluations of Versions on held-out data."""

from collections.abc import Collection, Iterator
from typing import Final

from sqlalchemy import Connection, Engine, Integer, Select, literal_column, select
from sqlalchemy.dialects.sqlite import insert as upsert

from fanin.protos.messages import MAX_PAGE_EVALUATIONS, LoggedEvent, Version, VersionEvaluation, VersionPublished
from fanin.protos.wire import to_proto
from fanin.server.storage.records import FeedEntry, RoundSummary, VersionRow
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.engine import writing
from fanin.server.storage.sqlite.rounds import summaries_before
from fanin.server.storage.sqlite.runs import is_removed, newest_sequence, recorded_event
from fanin.server.storage.sqlite.schema import decode
from fanin.v1 import control_pb2, fleet_pb2

PROBE_EVENTS: Final = 8
"""Events in one read for the next publication: a Round that publishes has three."""
MAX_PROBES: Final = 64
"""Reads for the next publication. After more than these events of Rounds that failed, none is returned."""
POSITION: Final = literal_column("rowid", Integer)
"""The order in which rows were added. It needs no index: it is the key of SQLite's table."""


class SqliteHistory:
    """The record in pages."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def feed(self, before: int | None, limit: int, run_id: str = "") -> tuple[FeedEntry, ...]:
        """See ``HistoryStore.feed``."""
        table = schema.events
        query = select(POSITION, table.c.run_id, table.c.event_proto)
        if before is not None:
            query = query.where(before > POSITION)
        if run_id:
            # The rows of one Run have ascending sequence numbers in the order of their positions.
            query = query.where(table.c.run_id == run_id).order_by(table.c.sequence.desc())
        else:
            query = query.order_by(POSITION.desc())
        with self._engine.connect() as connection:
            return tuple(_entry(*row) for row in connection.execute(query.limit(limit)))

    def feed_after(self, after: int, limit: int) -> tuple[FeedEntry, ...]:
        """See ``HistoryStore.feed_after``."""
        table = schema.events
        query = select(POSITION, table.c.run_id, table.c.event_proto).where(after < POSITION)
        with self._engine.connect() as connection:
            rows = connection.execute(query.order_by(POSITION).limit(limit))
            return tuple(_entry(*row) for row in rows)

    def rounds_before(self, run_id: str, before: int | None, limit: int) -> tuple[RoundSummary, ...]:
        """See ``HistoryStore.rounds_before``."""
        with self._engine.connect() as connection:
            return summaries_before(connection, run_id, before, limit)

    def versions_before(self, run_id: str, before: int | None, limit: int) -> tuple[VersionRow, ...]:
        """See ``HistoryStore.versions_before``."""
        table = schema.versions
        query = select(table.c.version_proto, table.c.round).where(table.c.run_id == run_id)
        if before is not None:
            query = query.where(table.c.number < before)
        with self._engine.connect() as connection:
            rows = connection.execute(query.order_by(table.c.number.desc()).limit(limit)).all()
            versions = [decode(f"run {run_id}, a version", Version, fleet_pb2.Version, data) for data, _ in rows]
            logged = _publications_from(connection, run_id, versions[-1].number) if versions else iter(())
            newest = versions[0].number if versions else 0
            events: dict[int, tuple[VersionPublished, float]] = {}
            for one in logged:
                if isinstance(one.event, VersionPublished):
                    events[one.event.number] = one.event, one.time
                    if one.event.number >= newest:
                        break
        return tuple(
            VersionRow(
                version=version,
                round=round_number,
                published=events[version.number][0] if version.number in events else None,
                time_s=events[version.number][1] if version.number in events else None,
            )
            for version, (_, round_number) in zip(versions, rows, strict=True)
        )

    def publications(self, run_id: str, limit: int) -> tuple[LoggedEvent, ...]:
        """See ``HistoryStore.publications``."""
        found: dict[int, LoggedEvent] = {}
        with self._engine.connect() as connection:
            last = newest_sequence(connection, run_id)
            if last <= limit:
                return tuple(_publications_after(connection, run_id, 1))
            newest = _newest_publication(connection, run_id, last)
            for index in range(limit - 1):
                logged = _next_publication(connection, run_id, 1 + index * last // limit)
                if logged is not None:
                    found[logged.sequence] = logged
            if newest is not None:
                found[newest.sequence] = newest
        return tuple(found[sequence] for sequence in sorted(found))

    def evaluations_of(self, run_id: str, versions: Collection[int]) -> tuple[VersionEvaluation, ...]:
        """See ``HistoryStore.evaluations_of``."""
        table = schema.version_evaluations
        query = select(table.c.evaluation_proto).where(table.c.run_id == run_id, table.c.number.in_(sorted(versions)))
        with self._engine.connect() as connection:
            rows = connection.execute(query.order_by(table.c.number)).scalars().all()
        what = f"run {run_id}, an evaluation"
        return tuple(decode(what, VersionEvaluation, control_pb2.VersionEvaluation, data) for data in rows)


def _entry(position: int, run_id: str, data: bytes) -> FeedEntry:
    return FeedEntry(position=position, run_id=run_id, logged=recorded_event(run_id, data))


def _publications_after(connection: Connection, run_id: str, sequence: int) -> Iterator[LoggedEvent]:
    """Yield the events that published Versions from a sequence number on. Other events are not decoded."""
    table = schema.events
    query = select(table.c.event_proto).where(table.c.run_id == run_id, table.c.sequence >= sequence)
    for data in connection.execute(query.order_by(table.c.sequence)).scalars():
        if _is_publication(data):
            yield recorded_event(run_id, data)


def _publications_from(connection: Connection, run_id: str, number: int) -> Iterator[LoggedEvent]:
    """Yield the events that published the Versions from a number on: numbers ascend with sequence numbers."""
    low, high = 1, newest_sequence(connection, run_id)
    while low < high:
        middle = (low + high) // 2
        logged = _next_publication(connection, run_id, middle)
        if logged is None or (isinstance(logged.event, VersionPublished) and logged.event.number >= number):
            high = middle
        else:
            low = logged.sequence + 1
    return _publications_after(connection, run_id, low)


def _next_publication(connection: Connection, run_id: str, sequence: int) -> LoggedEvent | None:
    table = schema.events
    for _ in range(MAX_PROBES):
        query = (
            select(table.c.event_proto)
            .where(table.c.run_id == run_id, table.c.sequence >= sequence)
            .order_by(table.c.sequence)
            .limit(PROBE_EVENTS)
        )
        rows = connection.execute(query).scalars().all()
        for data in rows:
            if _is_publication(data):
                return recorded_event(run_id, data)
        if len(rows) < PROBE_EVENTS:
            return None
        sequence += PROBE_EVENTS
    return None


def _newest_publication(connection: Connection, run_id: str, last: int) -> LoggedEvent | None:
    table = schema.events
    query = (
        select(table.c.event_proto)
        .where(table.c.run_id == run_id, table.c.sequence > last - PROBE_EVENTS * MAX_PROBES)
        .order_by(table.c.sequence.desc())
    )
    for data in connection.execute(query).scalars():
        if _is_publication(data):
            return recorded_event(run_id, data)
    return None


def _is_publication(data: bytes) -> bool:
    return control_pb2.Event.FromString(data).HasField("version_published")


class SqliteEvaluations:
    """Evaluations of Versions. The methods are those of ``EvaluationStore``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add_evaluation(self, run_id: str, evaluation: VersionEvaluation, score: float | None) -> None:
        """See ``EvaluationStore.add_evaluation``."""
        table = schema.version_evaluations
        values = {
            "data_sha256": evaluation.data_sha256,
            "score": score,
            "evaluation_proto": to_proto(evaluation, control_pb2.VersionEvaluation).SerializeToString(
                deterministic=True
            ),
        }
        row = upsert(table).values(run_id=run_id, number=evaluation.version, **values)
        keys = [table.c.run_id, table.c.number]
        with writing(self._engine) as connection:
            connection.execute(
                row.on_conflict_do_update(index_elements=keys, set_=values, where=table.c.score.is_(None))
            )

    def unevaluated(self, run_id: str, above: int) -> frozenset[int]:
        """See ``EvaluationStore.unevaluated``."""
        table, versions = schema.version_evaluations, schema.versions
        evaluated = select(table.c.number).where(
            table.c.run_id == run_id, table.c.number > above, table.c.score.is_not(None)
        )
        query = select(versions.c.number).where(
            versions.c.run_id == run_id, versions.c.number > above, versions.c.number.not_in(evaluated), ~is_removed()
        )
        with self._engine.connect() as connection:
            return frozenset(connection.execute(query).scalars())

    def evaluation_page(self, run_id: str, from_version: int) -> tuple[VersionEvaluation, ...]:
        """See ``EvaluationStore.evaluation_page``."""
        table = schema.version_evaluations
        query = self._query(run_id).where(table.c.number >= from_version).order_by(table.c.number)
        return self._read(run_id, query.limit(MAX_PAGE_EVALUATIONS))

    def newest_evaluation(self, run_id: str) -> VersionEvaluation | None:
        """See ``EvaluationStore.newest_evaluation``."""
        query = self._query(run_id).order_by(schema.version_evaluations.c.number.desc()).limit(1)
        return next(iter(self._read(run_id, query)), None)

    def best_evaluation(self, run_id: str) -> VersionEvaluation | None:
        """See ``EvaluationStore.best_evaluation``."""
        table = schema.version_evaluations
        has_score = (table.c.run_id == run_id) & table.c.score.is_not(None)
        newest = select(table.c.data_sha256).where(has_score).order_by(table.c.number.desc()).limit(1)
        query = self._query(run_id).where(has_score, table.c.data_sha256 == newest.scalar_subquery())
        best = query.order_by(table.c.score.desc(), table.c.number).limit(1)
        return next(iter(self._read(run_id, best)), None)

    def _query(self, run_id: str) -> Select[bytes]:
        table = schema.version_evaluations
        return select(table.c.evaluation_proto).where(table.c.run_id == run_id)

    def _read(self, run_id: str, query: Select[bytes]) -> tuple[VersionEvaluation, ...]:
        with self._engine.connect() as connection:
            rows = connection.execute(query).scalars().all()
        what = f"run {run_id}, an evaluation"
        return tuple(decode(what, VersionEvaluation, control_pb2.VersionEvaluation, data) for data in rows)

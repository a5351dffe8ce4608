"""Bundles, Runs, their Versions and events, and what retention removed of them."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    RowMapping,
    delete,
    exists,
    func,
    insert,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects.sqlite import insert as upsert

from fanin.protos.chunks import Artifact, short
from fanin.protos.errors import Corrupted, InvalidInput
from fanin.protos.messages import (
    BundleRef,
    Delegation,
    LoggedEvent,
    Principal,
    RunEvent,
    RunState,
    RunWarned,
    StartRun,
    Version,
    VersionPublished,
)
from fanin.protos.plans import MAX_TIMES
from fanin.protos.wire import to_proto
from fanin.server.storage.decisions import check_new_key
from fanin.server.storage.protocols.retention import Removed
from fanin.server.storage.protocols.runs import PAGE_EVENTS
from fanin.server.storage.records import RoundMark, RunRecord
from fanin.server.storage.retention import RemovedKind
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.engine import writing
from fanin.server.storage.sqlite.ledger.rows import begin_population
from fanin.server.storage.sqlite.schema import decode
from fanin.v1 import control_pb2, fleet_pb2

PAGE_ARTIFACTS: Final = 200
"""Rows in a page of Artifacts. Other work passes between two pages."""
_STATES: Final = frozenset(state.value for state in RunState)


class SqliteRuns:
    """Bundles, run keys, Runs, Versions, events."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add_bundle(self, bundle: BundleRef) -> None:
        """Record a Bundle. A known Bundle is not changed."""
        row = {
            "bundle_sha256": bundle.manifest.sha256,
            "bundle_proto": to_proto(bundle, fleet_pb2.BundleRef).SerializeToString(),
        }
        with writing(self._engine) as connection:
            connection.execute(upsert(schema.bundles).values(row).on_conflict_do_nothing())

    def bundle(self, sha256: str) -> BundleRef | None:
        """Return the Bundle of a digest, or None if it is not recorded."""
        query = select(schema.bundles.c.bundle_proto).where(schema.bundles.c.bundle_sha256 == sha256)
        with self._engine.connect() as connection:
            data = connection.execute(query).scalar()
        return None if data is None else decode(f"bundle {short(sha256)}", BundleRef, fleet_pb2.BundleRef, data)

    def bundles(self) -> tuple[BundleRef, ...]:
        """See ``BundleStore.bundles``."""
        query = select(schema.bundles.c.bundle_sha256, schema.bundles.c.bundle_proto)
        with self._engine.connect() as connection:
            rows = connection.execute(query).all()
        return tuple(decode(f"bundle {short(name)}", BundleRef, fleet_pb2.BundleRef, data) for name, data in rows)

    def artifact_page(self, after: int) -> tuple[tuple[Artifact, ...], int | None]:
        """See ``BundleStore.artifact_page``. Row ids increase, so a row that is added meanwhile comes last."""
        versions, states = schema.versions, schema.outer_states
        table = after % 2
        column = (versions.c.version_proto, states.c.artifact_proto)[table]
        row_id: ColumnElement[int] = literal_column(f"{column.table.name}.rowid")
        query = (
            select(row_id, column)
            .where(row_id > after // 2, ~(is_state_removed() if table else is_removed()))
            .limit(PAGE_ARTIFACTS)
        )
        with self._engine.connect() as connection:
            rows = connection.execute(query.order_by(row_id)).all()
        if not rows:
            return (), None if table else 1
        data = [row[1] for row in rows]
        following = 2 * rows[-1][0] + table
        if table:
            artifacts = [decode("an outer state", Artifact, fleet_pb2.Artifact, each) for each in data]
        else:
            decoded = [decode("a version", Version, fleet_pb2.Version, each) for each in data]
            artifacts = [artifact for version in decoded for artifact in version.artifacts]
        return tuple(artifacts), following

    def run_key(self, run_id: str, epoch: int, new_key: bytes, now_s: float) -> bytes:
        """See ``RunStore.run_key``."""
        keys = schema.run_keys
        is_key = (keys.c.run_id == run_id) & (keys.c.epoch == epoch)
        with writing(self._engine) as connection:
            key = connection.execute(select(keys.c.private_key).where(is_key)).scalar()
            if key is not None:
                return bytes(key)
            check_new_key(run_id, epoch, _epoch(connection, run_id))
            row = {"run_id": run_id, "epoch": epoch, "private_key": new_key, "prepared_at": now_s}
            connection.execute(insert(keys).values(row))
            return new_key

    def remove_unused_keys(self, before_s: float) -> int:
        """See ``RunStore.remove_unused_keys``."""
        keys = schema.run_keys
        query = select(keys.c.run_id, keys.c.epoch).where(keys.c.prepared_at < before_s)
        with writing(self._engine) as connection:
            rows = connection.execute(query).all()
            unused = [(run_id, epoch) for run_id, epoch in rows if epoch != _epoch(connection, run_id)]
            for run_id, epoch in unused:
                connection.execute(delete(keys).where(keys.c.run_id == run_id, keys.c.epoch == epoch))
        return len(unused)

    def add_run(self, start: StartRun, now_s: float, by: Principal | None = None) -> None:
        """See ``RunStore.add_run``."""
        with writing(self._engine) as connection:
            connection.execute(
                insert(schema.runs).values(
                    run_id=start.run_id,
                    start_proto=to_proto(start, control_pb2.StartRunRequest).SerializeToString(),
                    state=RunState.RUNNING.value,
                    reason="",
                    max_rounds=start.plan.stop.max_rounds,
                    started_at=now_s,
                    started_by=None if by is None else str(by),
                    population=start.plan.privacy.population or None,
                )
            )
            if start.plan.privacy:
                begin_population(connection, start, by, now_s)
            add_version(connection, start.version, None, now_s)

    def run_ids(self, states: Collection[RunState] = ()) -> tuple[str, ...]:
        """See ``RunStore.run_ids``."""
        query = select(schema.runs.c.run_id).order_by(schema.runs.c.started_at, schema.runs.c.run_id)
        if states:
            query = query.where(schema.runs.c.state.in_([state.value for state in states]))
        with self._engine.connect() as connection:
            return tuple(connection.execute(query).scalars())

    def run_state(self, run_id: str) -> RunState:
        """See ``RunStore.run_state``."""
        with self._engine.connect() as connection:
            return run_state(connection, run_id)

    def run(self, run_id: str) -> RunRecord | None:
        """Return the Run of an id, or None without one."""
        query = select(schema.runs).where(schema.runs.c.run_id == run_id)
        with self._engine.connect() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else _record(row)

    def version(self, run_id: str, number: int | None = None) -> Version | None:
        """Return a Version by number, or the newest one. None if there is no such Version."""
        with self._engine.connect() as connection:
            return find_version(connection, run_id, number)

    def round_by_version(self, run_id: str) -> dict[int, int]:
        """Return, for each Version's number, the Round that published it; 0 for a Version from outside."""
        table = schema.versions
        query = select(table.c.number, table.c.round).where(table.c.run_id == run_id)
        with self._engine.connect() as connection:
            return {int(number): int(round_number) for number, round_number in connection.execute(query)}

    def lineage_start(self, run_id: str, until: int | None = None) -> int:
        """See ``RunArchive.lineage_start``."""
        table = schema.versions
        query = select(func.max(table.c.number)).where(table.c.run_id == run_id, table.c.round == 0)
        if until is not None:
            query = query.where(table.c.number <= until)
        with self._engine.connect() as connection:
            return int(connection.execute(query).scalar_one())

    def removed(self, run_id: str) -> Removed:
        """See ``RunArchive.removed``."""
        with self._engine.connect() as connection:
            return find_removed(connection, run_id)

    def adopted(self, run_id: str, version: int) -> tuple[str, int] | None:
        """Return the source of a Version that a rollback or a promotion published, or None for any other Version.

        Returns:
            The Run and the number of the Version with the same parameters.
        """
        versions = schema.versions
        query = select(versions.c.adopted_run_id, versions.c.adopted_number).where(
            versions.c.run_id == run_id, versions.c.number == version, versions.c.adopted_run_id.is_not(None)
        )
        with self._engine.connect() as connection:
            row = connection.execute(query).first()
        return None if row is None else (row.adopted_run_id, row.adopted_number)

    def publication(self, run_id: str, number: int) -> VersionPublished | None:
        """Return the event that published a Version, or None without one (Version 0 has none)."""
        with self._engine.connect() as connection:
            return _publication(connection, run_id, number)

    def event_page(self, run_id: str, from_sequence: int) -> tuple[LoggedEvent, ...]:
        """Return up to ``PAGE_EVENTS`` events of a Run from a sequence number on, or none after the last event."""
        table = schema.events
        query = (
            select(table.c.event_proto)
            .where(table.c.run_id == run_id, table.c.sequence >= from_sequence)
            .order_by(table.c.sequence)
            .limit(PAGE_EVENTS)
        )
        with self._engine.connect() as connection:
            return tuple(recorded_event(run_id, data) for data in connection.execute(query).scalars())

    def newest_sequence(self, run_id: str) -> int:
        """See ``EventStore.newest_sequence``."""
        with self._engine.connect() as connection:
            return newest_sequence(connection, run_id)

    def warnings(self, run_id: str) -> tuple[RunWarned, ...]:
        """See ``EventStore.warnings``."""
        table, events = schema.warnings, schema.events
        query = (
            select(events.c.event_proto)
            .join(table, (table.c.run_id == events.c.run_id) & (table.c.sequence == events.c.sequence))
            .where(events.c.run_id == run_id)
            .order_by(events.c.sequence)
        )
        with self._engine.connect() as connection:
            logged = [recorded_event(run_id, data).event for data in connection.execute(query).scalars()]
        return tuple(event for event in logged if isinstance(event, RunWarned))

    def events(self, run_id: str) -> Iterator[LoggedEvent]:
        """Yield all events of a Run, read page by page."""
        sequence = 0
        while page := self.event_page(run_id, sequence):
            yield from page
            sequence = page[-1].sequence + 1


def run_state(connection: Connection, run_id: str) -> RunState:
    """Return the state of a recorded Run, within the caller's transaction.

    A damaged state is PAUSED: such a Run opens no Round, and an operator can stop it.
    """
    table = schema.runs
    text = connection.execute(select(table.c.state).where(table.c.run_id == run_id)).scalar_one()
    return RunState(text) if text in _STATES else RunState.PAUSED


def find_version(connection: Connection, run_id: str, number: int | None = None) -> Version | None:
    """Return a Version by number, or the newest one, within the caller's transaction. None without one."""
    table = schema.versions
    query = select(table.c.version_proto).where(table.c.run_id == run_id)
    query = query.order_by(table.c.number.desc()).limit(1) if number is None else query.where(table.c.number == number)
    data = connection.execute(query).scalar()
    return None if data is None else decode(f"run {run_id}, a version", Version, fleet_pb2.Version, data)


def set_run(connection: Connection, run_id: str, *, state: RunState, reason: str = "", more_rounds: int = 0) -> None:
    """Change a Run's state within the caller's transaction. It rests after ``more_rounds``; 0 keeps the number."""
    values: dict[str, object] = {"state": state.value, "reason": reason}
    if more_rounds:
        values["max_rounds"] = min(num_published(connection, run_id) + more_rounds, MAX_TIMES)
    connection.execute(update(schema.runs).where(schema.runs.c.run_id == run_id).values(values))


def num_published(connection: Connection, run_id: str) -> int:
    """Return the number of Rounds of a Run that published a Version, within the caller's transaction."""
    table = schema.rounds
    published = (table.c.run_id == run_id) & (table.c.state == RoundMark.PUBLISHED.value)
    return int(connection.execute(select(func.count()).select_from(table).where(published)).scalar_one())


def add_version(connection: Connection, version: Version, event: VersionPublished | None, now_s: float) -> None:
    """Insert a Version within the caller's transaction. A number that is taken fails the transaction.

    Args:
        connection: The transaction.
        version: The Version.
        event: The event that publishes it; None for Version 0.
        now_s: Wall time, in seconds.
    """
    source = None if event is None or not event.adopted_run_id else event
    connection.execute(
        insert(schema.versions).values(
            run_id=version.run_id,
            number=version.number,
            version_proto=to_proto(version, fleet_pb2.Version).SerializeToString(),
            round=0 if event is None else event.round,
            published_at=now_s,
            adopted_run_id=None if source is None else source.adopted_run_id,
            adopted_number=None if source is None else source.adopted_number,
        )
    )


def add_event(connection: Connection, run_id: str, event: RunEvent, now_s: float) -> None:
    """Append an event of a Run within the caller's transaction."""
    sequence = newest_sequence(connection, run_id) + 1
    data = to_proto(LoggedEvent(sequence=sequence, time=now_s, event=event), control_pb2.Event).SerializeToString()
    row = {"run_id": run_id, "sequence": sequence, "time": now_s, "event_proto": data}
    connection.execute(insert(schema.events).values(row))


def _publication(connection: Connection, run_id: str, number: int) -> VersionPublished | None:
    events = schema.events
    query = select(events.c.event_proto).where(events.c.run_id == run_id).order_by(events.c.sequence.desc())
    # The newest events first: callers ask for a Version that was published recently.
    for data in connection.execution_options(yield_per=64).execute(query).scalars():
        event = recorded_event(run_id, data).event
        if isinstance(event, VersionPublished) and event.number == number:
            return event
    return None


def newest_sequence(connection: Connection, run_id: str) -> int:
    """Return the sequence number of a Run's newest event, 0 without one, within the caller's transaction."""
    table = schema.events
    return connection.execute(select(func.max(table.c.sequence)).where(table.c.run_id == run_id)).scalar() or 0


def _epoch(connection: Connection, run_id: str) -> int:
    """Return the epoch of a Run, 0 if it is not recorded. Raises Corrupted."""
    row = connection.execute(select(schema.runs).where(schema.runs.c.run_id == run_id)).mappings().first()
    return 0 if row is None else _record(row).delegation.epoch


def recorded_event(run_id: str, data: bytes) -> LoggedEvent:
    """Return the event of a column. Raises Corrupted."""
    return decode(f"run {run_id}, an event", LoggedEvent, control_pb2.Event, data)


def _record(row: RowMapping) -> RunRecord:
    if row["state"] not in _STATES:
        raise _damaged(row["run_id"], f"its state is {row['state']!r}")
    return RunRecord(
        start=decode(f"run {row['run_id']}", StartRun, control_pb2.StartRunRequest, row["start_proto"]),
        state=RunState(row["state"]),
        reason=row["reason"],
        max_rounds=row["max_rounds"],
        started_by=None if row["started_by"] is None else _principal(row["run_id"], row["started_by"]),
        reclaimed=None
        if row["delegation_proto"] is None
        else decode(f"run {row['run_id']}", Delegation, fleet_pb2.Delegation, row["delegation_proto"]),
        restored_at_s=row["restored_at"],
        started_at_s=row["started_at"],
    )


def _principal(run_id: str, text: str) -> Principal:
    try:
        return Principal.parse(text)
    except InvalidInput as exc:
        raise _damaged(run_id, str(exc)) from exc


def _damaged(run_id: str, problem: str) -> Corrupted:
    return Corrupted(
        f"fanin.db: run {run_id}: the record is damaged ({problem}); restore a backup of the folder", code="FN-0508"
    )


def is_removed() -> ColumnElement[bool]:
    """Return the condition that the parameters of a row of ``versions`` were removed."""
    versions, removals = schema.versions, schema.removals
    is_row = (removals.c.run_id == versions.c.run_id) & (removals.c.number == versions.c.number)
    return exists().where(is_row, removals.c.kind == RemovedKind.PARAMETERS.value)


def is_state_removed() -> ColumnElement[bool]:
    """Return the condition that a row of ``outer_states`` belongs to a Version whose parameters were removed."""
    versions, removals, states = schema.versions, schema.removals, schema.outer_states
    is_row = (removals.c.run_id == versions.c.run_id) & (removals.c.number == versions.c.number)
    is_version = (versions.c.run_id == states.c.run_id) & (versions.c.round == states.c.round)
    return exists().where(is_version, is_row, removals.c.kind == RemovedKind.PARAMETERS.value)


def find_removed(connection: Connection, run_id: str) -> Removed:
    """Return what was removed of a Run, within the caller's transaction."""
    table = schema.removals
    query = select(table.c.kind, table.c.number, table.c.removed_at).where(table.c.run_id == run_id)
    times: dict[str, dict[int, float]] = defaultdict(dict)
    for kind, number, removed_at_s in connection.execute(query):
        times[kind][number] = removed_at_s
    return Removed(versions=times[RemovedKind.PARAMETERS.value], rounds=times[RemovedKind.UPDATES.value])

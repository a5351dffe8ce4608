"""What retention removes, and what a copy of the database names.

The decision of a removal and its record are one transaction. So a rollback, a promotion or a new Round either comes
before and is seen, or comes after and finds what was removed (``check_adoptable``).

Without ``forget`` the database grows with devices times Rounds. The rows of the Updates of a Round go once its Updates
are removed, their payloads are gone, and no later Round can count an Update that was made for it: the sum of its base
and ``max_staleness`` is below the newest Version. So no row goes that is needed to count each Update once. A row of
``contributions`` for each device keeps how many of its Updates were folded, and the last one.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, Connection, Engine, and_, delete, exists, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as adding_to

from fanin.edge.bundles.manifest_json import parse_manifest
from fanin.protos.chunks import Artifact
from fanin.protos.messages import StartRun, Version
from fanin.protos.plans import RetentionPlan
from fanin.server.storage.protocols.retention import PendingRound, PendingVersion, Removed
from fanin.server.storage.records import CommittedUpdate, RoundMark, set_sha256
from fanin.server.storage.retention import (
    Removable,
    RemovedKind,
    RoundFact,
    RunFacts,
    VersionFact,
    removable,
)
from fanin.server.storage.spool import payload_name
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.engine import truncate_log, writing
from fanin.server.storage.sqlite.ledger.seeds import erase_seeds
from fanin.server.storage.sqlite.rounds import SqliteRounds, find_updates, is_round, remove_messages
from fanin.server.storage.sqlite.runs import SqliteRuns, find_removed, is_removed
from fanin.server.storage.sqlite.schema import decode
from fanin.v1 import control_pb2, fleet_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file that a database names.

    Attributes:
        path: Its path in the folder of the coordinator.
        sha256: The digest of its content.
        size_bytes: Its size.
    """

    path: str
    sha256: str
    size_bytes: int


def named_files(engine: Engine, read: Callable[[Artifact], bytes]) -> Iterator[StoredFile]:
    """Yield every file that a database names, Chunks first. ``read`` returns the manifest of a Bundle.

    Raises:
        Corrupted: A record is damaged.
    """
    runs, rounds = SqliteRuns(engine), SqliteRounds(engine)
    known: set[str] = set()
    for artifact in _artifacts(runs, read):
        for ref in artifact.chunks:
            if ref.sha256 not in known:
                known.add(ref.sha256)
                yield StoredFile(path=blob_path(ref.sha256), sha256=ref.sha256, size_bytes=ref.size_bytes)
    for run_id, number in _stored_rounds(engine):
        for each in rounds.updates(run_id, number):
            payload = each.header.payload
            path = f"updates/{payload_name(each.header, each.device_id)}"
            yield StoredFile(path=path, sha256=payload.sha256, size_bytes=payload.size_bytes)


def blob_path(sha256: str) -> str:
    """Return the path of a Chunk in the folder of the coordinator."""
    return f"blobs/{sha256[:2]}/{sha256}"


def _artifacts(runs: SqliteRuns, read: Callable[[Artifact], bytes]) -> Iterator[Artifact]:
    for bundle in runs.bundles():
        yield bundle.manifest
        yield from parse_manifest(read(bundle.manifest)).artifacts.values()
    sequence: int | None = 0
    while sequence is not None:
        page, sequence = runs.artifact_page(sequence)
        yield from page


def _stored_rounds(engine: Engine) -> list[tuple[str, int]]:
    """Return the Rounds whose Updates are stored: neither failed, nor removed by retention."""
    rounds, removals = schema.rounds, schema.removals
    failed = rounds.c.state == RoundMark.FAILED.value
    gone = select(removals.c.run_id, removals.c.number).where(removals.c.kind == RemovedKind.UPDATES.value)
    with engine.connect() as connection:
        removed = {(run_id, number) for run_id, number in connection.execute(gone)}
        stored = connection.execute(select(rounds.c.run_id, rounds.c.round).where(~failed)).all()
    return [(run_id, number) for run_id, number in stored if (run_id, number) not in removed]


PAGE_ROUNDS: Final = 50
"""Rounds whose Updates are removed or forgotten together. Other work passes between two pages."""
PAGE_PAGES: Final = 1000
"""Pages of the file that are returned together, 4 MB."""
_PROGRESS: Final = frozenset({"round_opened", "round_closed", "devices_gone"})
"""Events that nothing is computed from. The other ones decide when a Run rests, or have the metrics of a Version."""


class SqliteRetention:
    """What retention removed, and what it may remove."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def facts(self, run_id: str) -> RunFacts:
        """See ``RetentionStore.facts``."""
        with self._engine.connect() as connection:
            return _facts(connection, run_id)

    def contents(
        self, run_id: str, what: Removable
    ) -> tuple[tuple[PendingVersion, ...], tuple[PendingRound, ...], int]:
        """See ``RetentionStore.contents``."""
        with self._engine.connect() as connection:
            return (
                tuple(_version(connection, run_id, number) for number in what.versions),
                tuple(_round(connection, run_id, number) for number in what.rounds),
                len(_old_events(connection, run_id, what.events_before_s)),
            )

    def remove(self, run_id: str, retention: RetentionPlan, now_s: float) -> Removable:
        """See ``RetentionStore.remove``."""
        table, events = schema.removals, schema.events
        with writing(self._engine) as connection:
            what = removable(_facts(connection, run_id), retention, now_s)
            for kind, numbers in ((RemovedKind.PARAMETERS, what.versions), (RemovedKind.UPDATES, what.rounds)):
                rows = [{"run_id": run_id, "kind": kind.value, "number": each, "removed_at": now_s} for each in numbers]
                if rows:
                    connection.execute(insert(table), rows)
            remove_messages(connection, run_id, what.rounds)
            erase_seeds(connection, run_id, what.rounds, now_s)
            for sequence in _old_events(connection, run_id, what.events_before_s):
                connection.execute(delete(events).where(events.c.run_id == run_id, events.c.sequence == sequence))
        return what

    def pending_rounds(self) -> tuple[PendingRound, ...]:
        """See ``RetentionStore.pending_rounds``."""
        with self._engine.connect() as connection:
            rows = _pending(connection, RemovedKind.UPDATES, PAGE_ROUNDS)
            return tuple(_round(connection, run_id, number) for run_id, number in rows)

    def pending_versions(self) -> tuple[PendingVersion, ...]:
        """See ``RetentionStore.pending_versions``."""
        with self._engine.connect() as connection:
            rows = _pending(connection, RemovedKind.PARAMETERS, None)
            return tuple(_version(connection, run_id, number) for run_id, number in rows)

    def finish(self, pending: PendingRound | PendingVersion, now_s: float) -> None:
        """See ``RetentionStore.finish``."""
        is_round = isinstance(pending, PendingRound)
        kind = RemovedKind.UPDATES if is_round else RemovedKind.PARAMETERS
        number = pending.round if isinstance(pending, PendingRound) else pending.number
        table = schema.removals
        row = (table.c.run_id == pending.run_id) & (table.c.kind == kind.value) & (table.c.number == number)
        if is_round and not truncate_log(self._engine) and self._had_seed(pending.run_id, number):
            # The log may have the seed of its noise. A later call empties it, when nobody reads the database.
            return
        with writing(self._engine) as connection:
            connection.execute(update(table).where(row).values(finished_at=now_s))

    def _had_seed(self, run_id: str, number: int) -> bool:
        """Return whether a Round was charged for noise."""
        table = schema.privacy_ledger
        query = select(exists().where((table.c.run_id == run_id) & (table.c["round"] == number)))
        with self._engine.connect() as connection:
            return bool(connection.execute(query).scalar())

    def forget(self, run_id: str) -> int:
        """See ``RetentionStore.forget``."""
        rounds = schema.rounds
        with writing(self._engine) as connection:
            ended = connection.execute(
                select(rounds.c.round, rounds.c.state, rounds.c.opened_at)
                .where(_is_forgettable(connection, run_id))
                .order_by(rounds.c.round)
                .limit(PAGE_ROUNDS)
            ).all()
            for number, state, _ in ended:
                _forget(connection, run_id, number, is_folded=state == RoundMark.PUBLISHED.value)
            if ended:
                _remove_lists(connection, run_id, {number for number, _, _ in ended}, ended[0].opened_at)
        return len(ended)

    def give_back(self) -> bool:
        """See ``RetentionStore.give_back``."""
        with writing(self._engine) as connection:
            file = connection.connection.driver_connection
            assert isinstance(file, sqlite3.Connection), "the engine opens SQLite"
            # It has no columns and still a step for each page, which SQLAlchemy does not make.
            file.execute(f"PRAGMA incremental_vacuum({PAGE_PAGES})").fetchall()
            return bool(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())

    def removed(self, run_id: str) -> Removed:
        """See ``RetentionStore.removed``."""
        with self._engine.connect() as connection:
            return find_removed(connection, run_id)


def _pending(connection: Connection, kind: RemovedKind, limit: int | None) -> list[tuple[str, int]]:
    table = schema.removals
    query = select(table.c.run_id, table.c.number).where(table.c.kind == kind.value, table.c.finished_at.is_(None))
    return [(run_id, number) for run_id, number in connection.execute(query.limit(limit))]


def _facts(connection: Connection, run_id: str) -> RunFacts:
    versions, rounds, removals = schema.versions, schema.rounds, schema.removals
    query = select(versions.c.number, versions.c.round, versions.c.published_at).where(
        versions.c.run_id == run_id, ~is_removed()
    )
    stored = {
        number: VersionFact(round=round_number, published_at_s=published_at_s or 0.0)
        for number, round_number, published_at_s in connection.execute(query)
    }
    gone = (removals.c.run_id == run_id) & (removals.c.number == rounds.c.round)
    folded = (
        select(rounds.c.round, rounds.c.base_version, versions.c.published_at)
        .join(versions, (versions.c.run_id == rounds.c.run_id) & (versions.c.round == rounds.c.round))
        .where(rounds.c.run_id == run_id, rounds.c.state == RoundMark.PUBLISHED.value)
        .where(~exists().where(gone, removals.c.kind == RemovedKind.UPDATES.value))
    )
    stale = _stale_bases(connection, run_id)
    return RunFacts(
        versions=stored,
        rounds={
            number: RoundFact(bases=frozenset({base, *stale.get(number, ())}), published_at_s=published_at_s or 0.0)
            for number, base, published_at_s in connection.execute(folded)
        },
        needed=_needed(connection, run_id),
        pinned=_pinned(connection, run_id),
    )


def _stale_bases(connection: Connection, run_id: str) -> dict[int, set[int]]:
    """Return the earlier Versions that the Updates of each Round were trained from."""
    updates, rounds = schema.updates, schema.rounds
    query = (
        select(updates.c.round, rounds.c.base_version)
        .join(rounds, (rounds.c.run_id == updates.c.run_id) & (rounds.c.round == updates.c.made_for))
        .where(updates.c.run_id == run_id, updates.c.made_for != updates.c.round)
        .distinct()
    )
    bases: dict[int, set[int]] = defaultdict(set)
    for number, base in connection.execute(query):
        bases[number].add(base)
    return bases


def _needed(connection: Connection, run_id: str) -> int | None:
    """Return the lowest Version that Updates of an unfinished Round may be trained from."""
    rounds, runs = schema.rounds, schema.runs
    unfinished = rounds.c.state.in_([RoundMark.OPEN.value, RoundMark.CLOSED.value])
    query = select(func.min(rounds.c.base_version)).where(rounds.c.run_id == run_id, unfinished)
    base = connection.execute(query).scalar()
    data = connection.execute(select(runs.c.start_proto).where(runs.c.run_id == run_id)).scalar_one()
    start = decode(f"run {run_id}", StartRun, control_pb2.StartRunRequest, data)
    return None if base is None else max(base - start.plan.aggregation.max_staleness, 0)


def _pinned(connection: Connection, run_id: str) -> frozenset[int]:
    versions, evaluations = schema.versions, schema.version_evaluations
    adopters = select(versions.c.number).where(versions.c.run_id == run_id, versions.c.adopted_run_id.is_not(None))
    sources = select(versions.c.adopted_number).where(versions.c.adopted_run_id == run_id)
    has_score = (evaluations.c.run_id == run_id) & evaluations.c.score.is_not(None)
    newest = select(evaluations.c.data_sha256).where(has_score).order_by(evaluations.c.number.desc()).limit(1)
    best = (
        select(evaluations.c.number)
        .where(has_score, evaluations.c.data_sha256 == newest.scalar_subquery())
        .order_by(evaluations.c.score.desc(), evaluations.c.number)
        .limit(1)
    )
    return frozenset(number for query in (adopters, sources, best) for number in connection.execute(query).scalars())


def _version(connection: Connection, run_id: str, number: int) -> PendingVersion:
    """Return the Artifacts of a Version and of the outer state after its Round."""
    versions, states = schema.versions, schema.outer_states
    is_version = (versions.c.run_id == run_id) & (versions.c.number == number)
    data, round_number = connection.execute(select(versions.c.version_proto, versions.c.round).where(is_version)).one()
    version = decode(f"run {run_id}, a version", Version, fleet_pb2.Version, data)
    query = select(states.c.artifact_proto).where(states.c.run_id == run_id, states.c.round == round_number)
    state = [
        decode("an outer state", Artifact, fleet_pb2.Artifact, each) for each in connection.execute(query).scalars()
    ]
    return PendingVersion(run_id=run_id, number=number, artifacts=(*version.artifacts, *state))


def _round(connection: Connection, run_id: str, number: int) -> PendingRound:
    rows = find_updates(connection, run_id, number)
    return PendingRound(run_id=run_id, round=number, updates=tuple((row.header, row.device_id) for row in rows))


def _old_events(connection: Connection, run_id: str, before_s: float | None) -> list[int]:
    """Return the numbers of the old events that only tell the progress of Rounds. The newest event stays."""
    if before_s is None:
        return []
    table = schema.events
    query = select(table.c.sequence, table.c.event_proto).where(table.c.run_id == run_id, table.c.time < before_s)
    newest = connection.execute(select(func.max(table.c.sequence)).where(table.c.run_id == run_id)).scalar()
    return [
        sequence
        for sequence, data in connection.execute(query)
        if sequence != newest and control_pb2.Event.FromString(data).WhichOneof("what") in _PROGRESS
    ]


def _is_forgettable(connection: Connection, run_id: str) -> ColumnElement[bool]:
    rounds, removals, versions, runs = schema.rounds, schema.removals, schema.versions, schema.runs
    newest = connection.execute(select(func.max(versions.c.number)).where(versions.c.run_id == run_id)).scalar_one()
    data = connection.execute(select(runs.c.start_proto).where(runs.c.run_id == run_id)).scalar_one()
    start = decode(f"run {run_id}", StartRun, control_pb2.StartRunRequest, data)
    gone = (removals.c.run_id == run_id) & (removals.c.kind == RemovedKind.UPDATES.value)
    is_removed = exists().where(gone, removals.c.number == rounds.c.round, removals.c.finished_at.is_not(None))
    # A failed Round has no Version that retention could name. It goes with the removed Rounds around it.
    last_removed = select(func.max(removals.c.number)).where(gone).scalar_subquery()
    is_failed = (rounds.c.state == RoundMark.FAILED.value) & (rounds.c.round < last_removed)
    return and_(
        (rounds.c.run_id == run_id)
        & rounds.c.accepted_sha256.is_(None)
        & (rounds.c.base_version < newest - start.plan.aggregation.max_staleness)
        & (((rounds.c.state == RoundMark.PUBLISHED.value) & is_removed) | is_failed)
    )


def _forget(connection: Connection, run_id: str, number: int, *, is_folded: bool) -> None:
    rounds, updates = schema.rounds, schema.updates
    committed = find_updates(connection, run_id, number)
    if is_folded and committed:
        _add_contributions(connection, run_id, committed)
    connection.execute(delete(updates).where(updates.c.run_id == run_id, updates.c.round == number))
    values = {"accepted": None, "num_accepted": len(committed), "accepted_sha256": set_sha256(committed)}
    connection.execute(update(rounds).where(is_round(run_id, number)).values(values))


def _add_contributions(connection: Connection, run_id: str, committed: tuple[CommittedUpdate, ...]) -> None:
    table = schema.contributions
    rows = [
        {
            "run_id": run_id,
            "device_id": each.device_id,
            "num_updates": 1,
            "last_round": each.round,
            "last_made_for": each.header.round,
        }
        for each in committed
    ]
    # Rounds are forgotten in order, so the last row is the newest one.
    adding = adding_to(table)
    adding = adding.on_conflict_do_update(
        index_elements=["run_id", "device_id"],
        set_={
            "num_updates": table.c.num_updates + 1,
            "last_round": adding.excluded.last_round,
            "last_made_for": adding.excluded.last_made_for,
        },
    )
    connection.execute(adding, rows)


def _remove_lists(connection: Connection, run_id: str, numbers: set[int], since_s: float) -> None:
    """Remove the events with the devices of these Rounds, the first of which opened at ``since_s``."""
    events = schema.events
    query = select(events.c.sequence, events.c.event_proto).where(events.c.run_id == run_id, events.c.time >= since_s)
    left = set(numbers)
    for sequence, data in connection.execute(query.order_by(events.c.sequence)):
        event = control_pb2.Event.FromString(data)
        if event.WhichOneof("what") == "round_closed" and event.round_closed.round in left:
            connection.execute(delete(events).where(events.c.run_id == run_id, events.c.sequence == sequence))
            left.discard(event.round_closed.round)
        if not left:
            break

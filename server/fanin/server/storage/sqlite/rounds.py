"""Rounds and their committed Updates: the record from which a Version can be recomputed.

The database decides which Updates are accepted. ``commit`` counts the places and inserts in one transaction, so a Round
never has more than ``buffer`` Updates. The rows of a Round are its set.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from sqlalchemy import ColumnElement, Connection, Engine, RowMapping, func, insert, select, update

from fanin.protos.control import RoundClosed, RoundFailed, RoundOpened, RunState, VersionPublished, round_closed
from fanin.protos.convert import header_from_proto, header_to_proto
from fanin.protos.messages import UpdateHeader, Version
from fanin.protos.plans import CohortPlan
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.outer_states import OuterState, add_outer_state, outer_state, outer_state_of_version
from fanin.server.storage.sqlite.records import decode
from fanin.server.storage.sqlite.runs import add_event, add_version, run_state
from fanin.v1 import fleet_pb2


class RoundMark(Enum):
    """The durable state of a Round. The phases of the round machine (``rounds.machine.RoundPhase``) are finer."""

    OPEN = "open"
    CLOSED = "closed"
    PUBLISHED = "published"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether the Round has ended. Then its record never changes."""
        return self in (RoundMark.PUBLISHED, RoundMark.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """The record of a Round.

    Attributes:
        run_id: The Run.
        round: The number of the Round.
        base_version: The number of the Version that devices train from.
        grid: An exponent for each block.
        mark: The durable state.
        opened_at_s: Wall time at which the Round was opened.
        deadline_at_s: Wall time of the deadline. None until as many devices as the quorum take part, and while the
            Run is paused.
        left_s: Seconds to the deadline when the Run was paused.
        accepted: The devices of the set, in the order of their commits.
        next_grid: The grid of the next Round.
    """

    run_id: str
    round: int
    base_version: int
    grid: tuple[int, ...]
    mark: RoundMark
    opened_at_s: float
    deadline_at_s: float | None = None
    left_s: float | None = None
    accepted: tuple[str, ...] = ()
    next_grid: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedUpdate:
    """A committed Update.

    Attributes:
        device_id: The device that made it.
        round: The Round that folds it.
        header: Its header. ``header.round`` is the Round that it was made for: the same, or an earlier one if the Plan
            allows staleness.
    """

    device_id: str
    round: int
    header: UpdateHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummary:
    """A Round, the number of its committed Updates, and the number of its Version, 0 without one."""

    record: RoundRecord
    num_updates: int
    version: int


class RoundStore:
    """Rounds and their committed Updates."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def open(self, record: RoundRecord) -> bool:
        """Record a new Round, if its Run is running. It may be repeated.

        Returns:
            Whether the Round is open.
        """
        with self._engine.begin() as connection:
            known = _round(connection, record.run_id, record.round)
            if known is not None:
                return known.mark is RoundMark.OPEN
            if run_state(connection, record.run_id) is not RunState.RUNNING:
                return False
            connection.execute(
                insert(schema.rounds).values(
                    run_id=record.run_id,
                    round=record.round,
                    base_version=record.base_version,
                    grid=json.dumps(record.grid),
                    state=RoundMark.OPEN.value,
                    opened_at=record.opened_at_s,
                )
            )
            opened = RoundOpened(round=record.round, base_version=record.base_version)
            add_event(connection, record.run_id, opened, record.opened_at_s)
            return True

    def set_deadline(self, run_id: str, round_number: int, deadline_at_s: float, now_s: float) -> None:
        """Record the wall time of the deadline. If the Run was paused meanwhile, record the seconds that are left."""
        with self._engine.begin() as connection:
            is_paused = run_state(connection, run_id) is RunState.PAUSED
            left_s = max(deadline_at_s - now_s, 0.0)
            values = {"left_s": left_s} if is_paused else {"deadline_at": deadline_at_s, "left_s": None}
            connection.execute(update(schema.rounds).where(_is(run_id, round_number)).values(values))

    def commit(self, candidates: Sequence[tuple[CommittedUpdate, int]]) -> list[CommittedUpdate | None]:
        """Accept Updates in one durable transaction: each if its Round is open and has a free place.

        Args:
            candidates: Pairs of an Update and the number of places of its Round.

        Returns:
            For each Update, the one that is recorded for its Assignment. It may be an earlier Update, which cannot be
            replaced. None if the Round does not accept the Update.
        """
        with self._engine.begin() as connection:
            return [_commit(connection, candidate, buffer) for candidate, buffer in candidates]

    def close(self, run_id: str, round_number: int, *, cohort: CohortPlan, now_s: float) -> RoundRecord:
        """Record the set: the Updates committed until now, in order. Without a quorum, record the failure.

        A Round that is not open stays as it is.

        Returns:
            The record after that.
        """
        with self._engine.begin() as connection:
            record = _round(connection, run_id, round_number)
            assert record is not None, "only a recorded round is closed"
            if record.mark is not RoundMark.OPEN:
                return record
            accepted = tuple(committed.device_id for committed in _updates(connection, run_id, round_number))
            event: RoundClosed | RoundFailed = round_closed(round_number, accepted)
            mark = RoundMark.CLOSED
            if len(accepted) < cohort.quorum:
                mark, event = RoundMark.FAILED, failure_of(round_number, len(accepted), cohort)
            connection.execute(
                update(schema.rounds)
                .where(_is(run_id, round_number))
                .values(state=mark.value, accepted=json.dumps(accepted))
            )
            add_event(connection, run_id, event, now_s)
            return replace(record, mark=mark, accepted=accepted)

    def publish(
        self,
        version: Version,
        event: VersionPublished,
        *,
        next_grid: Sequence[int],
        outer_state: OuterState,
        now_s: float,
    ) -> RoundRecord:
        """Record the Version of a Round, with the grid and the outer state after it.

        A Round that has ended stays as it is, so a commit that was reported as an error can be repeated.

        Returns:
            The record after that.
        """
        with self._engine.begin() as connection:
            record = _round(connection, version.run_id, event.round)
            assert record is not None, "only a recorded round is published"
            if record.mark.is_final:
                return record
            add_version(connection, version, round_number=event.round)
            add_outer_state(connection, version.run_id, event.round, outer_state)
            connection.execute(
                update(schema.rounds)
                .where(_is(version.run_id, event.round))
                .values(state=RoundMark.PUBLISHED.value, next_grid=json.dumps(list(next_grid)))
            )
            add_event(connection, version.run_id, event, now_s)
            return replace(record, mark=RoundMark.PUBLISHED, next_grid=tuple(next_grid))

    def fail(self, run_id: str, round_number: int, *, reason: str, now_s: float) -> RoundRecord:
        """Record the failure of a Round. A Round that has ended stays as it is. Return the record after that."""
        with self._engine.begin() as connection:
            record = _round(connection, run_id, round_number)
            assert record is not None, "only a recorded round fails"
            if record.mark.is_final:
                return record
            fail_round(connection, run_id, RoundFailed(round=round_number, reason=reason), now_s)
            return replace(record, mark=RoundMark.FAILED)

    def rounds(self, run_id: str) -> tuple[RoundRecord, ...]:
        """Return all Rounds of a Run, oldest first."""
        query = select(schema.rounds).where(schema.rounds.c.run_id == run_id).order_by(schema.rounds.c.round)
        with self._engine.connect() as connection:
            return tuple(_record(row) for row in connection.execute(query).mappings())

    def since(self, run_id: str, base_version: int) -> tuple[RoundRecord, ...]:
        """Return the Rounds of a Run on this Version or a later one, oldest first."""
        table = schema.rounds
        query = select(table).where(table.c.run_id == run_id, table.c.base_version >= base_version)
        with self._engine.connect() as connection:
            return tuple(_record(row) for row in connection.execute(query.order_by(table.c.round)).mappings())

    def last(self, run_id: str) -> RoundRecord | None:
        """Return the newest Round of a Run, or None without one."""
        table = schema.rounds
        query = select(table).where(table.c.run_id == run_id).order_by(table.c.round.desc()).limit(1)
        with self._engine.connect() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else _record(row)

    def latest(self, run_id: str, limit: int) -> tuple[RoundSummary, ...]:
        """Return the last ``limit`` Rounds of a Run, newest first."""
        rounds, updates, versions = schema.rounds, schema.updates, schema.versions
        count = (
            select(func.count())
            .select_from(updates)
            .where(updates.c.run_id == run_id, updates.c.round == rounds.c.round)
            .scalar_subquery()
        )
        number = (
            select(versions.c.number)
            .where(versions.c.run_id == run_id, versions.c.round == rounds.c.round)
            .scalar_subquery()
        )
        query = select(rounds, count.label("num_updates"), func.coalesce(number, 0).label("version"))
        query = query.where(rounds.c.run_id == run_id).order_by(rounds.c.round.desc()).limit(limit)
        with self._engine.connect() as connection:
            return tuple(
                RoundSummary(record=_record(row), num_updates=row["num_updates"], version=row["version"])
                for row in connection.execute(query).mappings()
            )

    def num_published(self, run_id: str) -> int:
        """Return the number of Rounds of a Run that published a Version."""
        table = schema.rounds
        published = (table.c.run_id == run_id) & (table.c.state == RoundMark.PUBLISHED.value)
        with self._engine.connect() as connection:
            return int(connection.execute(select(func.count()).select_from(table).where(published)).scalar_one())

    def outer_state(self, run_id: str, round_number: int) -> OuterState:
        """Return the state of the outer optimizer after a Round, empty if its optimizer has none."""
        return outer_state(self._engine, run_id, round_number)

    def outer_state_after(self, run_id: str, version: int) -> OuterState:
        """Return the outer state that belongs to a Version, empty without one."""
        return outer_state_of_version(self._engine, run_id, version)

    def grid_after(self, run_id: str, version: int) -> tuple[int, ...] | None:
        """Return the final grid of the Round that published a Version, or None if no Round published it."""
        rounds, versions = schema.rounds, schema.versions
        query = (
            select(rounds.c.next_grid)
            .join(versions, (versions.c.run_id == rounds.c.run_id) & (versions.c.round == rounds.c.round))
            .where(versions.c.run_id == run_id, versions.c.number == version)
        )
        with self._engine.connect() as connection:
            grid = connection.execute(query).scalar()
        return None if grid is None else tuple(json.loads(grid))

    def update(self, run_id: str, made_for: int, device_id: str) -> CommittedUpdate | None:
        """Return the accepted Update that a device made for a Round, or None without one."""
        with self._engine.connect() as connection:
            return _update(connection, run_id, made_for, device_id)

    def updates(self, run_id: str, round_number: int) -> tuple[CommittedUpdate, ...]:
        """Return the Updates of a Round, in the order of their commits."""
        with self._engine.connect() as connection:
            return _updates(connection, run_id, round_number)

    def headers_made_for(self, run_id: str, round_number: int) -> dict[str, UpdateHeader]:
        """Return the accepted Updates that were made for a Round, by device. Any Round may fold them.

        Updates in failed Rounds are left out, because no Version is ever computed from them.
        """
        table, rounds = schema.updates, schema.rounds
        folded_in = (rounds.c.run_id == table.c.run_id) & (rounds.c.round == table.c.round)
        query = (
            select(table.c.device_id, table.c.header_proto)
            .join(rounds, folded_in)
            .where(table.c.run_id == run_id, table.c.made_for == round_number)
            .where(rounds.c.state != RoundMark.FAILED.value)
        )
        with self._engine.connect() as connection:
            return {device: _header(data) for device, data in connection.execute(query)}


def fail_round(connection: Connection, run_id: str, failure: RoundFailed, now_s: float) -> None:
    """Record a failure within the caller's transaction."""
    round_ = _is(run_id, failure.round)
    connection.execute(update(schema.rounds).where(round_).values(state=RoundMark.FAILED.value))
    add_event(connection, run_id, failure, now_s)


def failure_of(round_number: int, num_updates: int, cohort: CohortPlan) -> RoundFailed:
    """Return the failure of a Round without a quorum."""
    reason = f"{num_updates} updates within {cohort.deadline_s:g} s, expected at least {cohort.quorum}"
    return RoundFailed(round=round_number, reason=reason)


def _is(run_id: str, round_number: int) -> ColumnElement[bool]:
    return (schema.rounds.c.run_id == run_id) & (schema.rounds.c.round == round_number)


def _update(connection: Connection, run_id: str, made_for: int, device_id: str) -> CommittedUpdate | None:
    table = schema.updates
    query = select(table.c.round, table.c.header_proto).where(
        table.c.run_id == run_id, table.c.made_for == made_for, table.c.device_id == device_id
    )
    row = connection.execute(query).first()
    return None if row is None else CommittedUpdate(device_id=device_id, round=row[0], header=_header(row[1]))


def _has_place(connection: Connection, candidate: CommittedUpdate, buffer: int) -> bool:
    table = schema.updates
    in_round = (table.c.run_id == candidate.header.run_id) & (table.c.round == candidate.round)
    count = select(func.count()).select_from(table).where(in_round)
    own = select(table.c.sequence).where(in_round, table.c.device_id == candidate.device_id)
    return connection.execute(count).scalar_one() < buffer and connection.execute(own).first() is None


def _commit(connection: Connection, candidate: CommittedUpdate, buffer: int) -> CommittedUpdate | None:
    header, number = candidate.header, candidate.round
    earlier = _update(connection, header.run_id, header.round, candidate.device_id)
    if earlier is not None:
        return earlier
    state = connection.execute(select(schema.rounds.c.state).where(_is(header.run_id, number))).scalar()
    if state != RoundMark.OPEN.value or not _has_place(connection, candidate, buffer):
        return None
    connection.execute(
        insert(schema.updates).values(
            run_id=header.run_id,
            round=number,
            made_for=header.round,
            device_id=candidate.device_id,
            header_proto=header_to_proto(header).SerializeToString(deterministic=True),
        )
    )
    return candidate


def _header(data: bytes) -> UpdateHeader:
    return decode("the header of an update", fleet_pb2.UpdateHeader, header_from_proto, data)


def _round(connection: Connection, run_id: str, round_number: int) -> RoundRecord | None:
    row = connection.execute(select(schema.rounds).where(_is(run_id, round_number))).mappings().first()
    return None if row is None else _record(row)


def _updates(connection: Connection, run_id: str, round_number: int) -> tuple[CommittedUpdate, ...]:
    table = schema.updates
    query = (
        select(table.c.device_id, table.c.header_proto)
        .where(table.c.run_id == run_id, table.c.round == round_number)
        .order_by(table.c.sequence)
    )
    return tuple(
        CommittedUpdate(device_id=device, round=round_number, header=_header(data))
        for device, data in connection.execute(query)
    )


def _record(row: RowMapping) -> RoundRecord:
    return RoundRecord(
        run_id=row["run_id"],
        round=row["round"],
        base_version=row["base_version"],
        grid=tuple(json.loads(row["grid"])),
        mark=RoundMark(row["state"]),
        opened_at_s=row["opened_at"],
        deadline_at_s=row["deadline_at"],
        left_s=row["left_s"],
        accepted=tuple(json.loads(row["accepted"] or "[]")),
        next_grid=tuple(json.loads(row["next_grid"] or "[]")),
    )

"""Rounds and committed Updates, as any process reads them: the record from which a Version can be recomputed.

The rows of the Updates of a Round are its set.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    RowMapping,
    Select,
    delete,
    func,
    insert,
    select,
    union_all,
    update,
)

from fanin.protos.chunks import Artifact
from fanin.protos.errors import Corrupted
from fanin.protos.messages import MAX_PAGE_DEVICES, AcceptedDevices, RoundFailed, UpdateHeader
from fanin.protos.wire import to_proto
from fanin.server.storage.records import (
    CommittedUpdate,
    Contributors,
    ForgottenSet,
    MeasuredRanges,
    OuterState,
    RoundMark,
    RoundRecord,
    RoundSummary,
)
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.ledger.seeds import erase_seeds, find_seed
from fanin.server.storage.sqlite.runs import add_event, num_published
from fanin.server.storage.sqlite.schema import decode
from fanin.v1 import fleet_pb2


class SqliteRounds:
    """Rounds and their results."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def rounds(self, run_id: str) -> tuple[RoundRecord, ...]:
        """Return all Rounds of a Run, oldest first."""
        query = select(schema.rounds).where(schema.rounds.c.run_id == run_id).order_by(schema.rounds.c.round)
        with self._engine.connect() as connection:
            return tuple(_record(row) for row in connection.execute(query).mappings())

    def round(self, run_id: str, number: int) -> RoundRecord | None:
        """See ``RoundArchive.round``."""
        with self._engine.connect() as connection:
            row = connection.execute(select(schema.rounds).where(is_round(run_id, number))).mappings().first()
        return None if row is None else _record(row)

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
        with self._engine.connect() as connection:
            return summaries_before(connection, run_id, None, limit)

    def num_published(self, run_id: str) -> int:
        """Return the number of Rounds of a Run that published a Version."""
        with self._engine.connect() as connection:
            return num_published(connection, run_id)

    def contributors(self, run_id: str) -> Contributors:
        """See ``RoundStore.contributors``."""
        rounds, updates, contributions = schema.rounds, schema.updates, schema.contributions
        kept = (
            select(updates.c.device_id, func.count().label("num_updates"))
            .join(rounds, (rounds.c.run_id == updates.c.run_id) & (rounds.c.round == updates.c.round))
            .where(updates.c.run_id == run_id, rounds.c.state == RoundMark.PUBLISHED.value)
            .group_by(updates.c.device_id)
        )
        forgotten = select(contributions.c.device_id, contributions.c.num_updates).where(
            contributions.c.run_id == run_id
        )
        both = union_all(kept, forgotten).subquery()
        query = select(func.coalesce(func.sum(both.c.num_updates), 0), func.count(both.c.device_id.distinct()))
        with self._engine.connect() as connection:
            num_updates, num_devices = connection.execute(query).one()
        return Contributors(num_updates=num_updates, num_devices=num_devices)

    def outer_state(self, run_id: str, round_number: int) -> OuterState:
        """Return the state of the outer optimizer after a Round, empty if its optimizer has none."""
        return _outer_state(self._engine, run_id, round_number)

    def outer_state_after(self, run_id: str, version: int) -> OuterState:
        """Return the outer state that belongs to a Version, empty without one."""
        return _outer_state_of_version(self._engine, run_id, version)

    def noise_seed(self, run_id: str, round_number: int) -> bytes | None:
        """See ``RoundArchive.noise_seed``."""
        with self._engine.connect() as connection:
            return find_seed(connection, run_id, round_number)

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
        """See ``CommittedUpdates.update``."""
        with self._engine.connect() as connection:
            return find_update(connection, run_id, made_for, device_id)

    def updates(self, run_id: str, round_number: int) -> tuple[CommittedUpdate, ...]:
        """See ``CommittedUpdates.updates``."""
        with self._engine.connect() as connection:
            return find_updates(connection, run_id, round_number)

    def updates_of(self, run_id: str, round_number: int, devices: Sequence[str]) -> tuple[CommittedUpdate, ...]:
        """See ``CommittedUpdates.updates_of``."""
        with self._engine.connect() as connection:
            return find_updates_of(connection, run_id, round_number, devices)

    def headers_made_for(self, run_id: str, round_number: int) -> dict[str, UpdateHeader]:
        """See ``CommittedUpdates.headers_made_for``."""
        with self._engine.connect() as connection:
            return find_headers(connection, run_id, round_number)

    def last_folded(self, run_id: str, device_id: str, *, lineage: int) -> int:
        """See ``CommittedUpdates.last_folded``."""
        with self._engine.connect() as connection:
            return find_last_folded(connection, run_id, device_id, lineage)

    def accepted_devices(self, run_id: str, round_number: int, from_index: int) -> AcceptedDevices | None:
        """See ``RoundStore.accepted_devices``."""
        query = select(schema.rounds.c.accepted, schema.rounds.c.num_accepted).where(is_round(run_id, round_number))
        with self._engine.connect() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        accepted = json.loads(row.accepted or "[]")
        page = accepted[from_index : from_index + MAX_PAGE_DEVICES]
        num_accepted = len(accepted) if row.num_accepted is None else row.num_accepted
        return AcceptedDevices(num_accepted=num_accepted, device_ids=tuple(page))


def find_round(connection: Connection, run_id: str, round_number: int) -> RoundRecord | None:
    """Return a Round within the caller's transaction, or None without one."""
    row = connection.execute(select(schema.rounds).where(is_round(run_id, round_number))).mappings().first()
    return None if row is None else _record(row)


def fail_round(connection: Connection, run_id: str, failure: RoundFailed, now_s: float) -> None:
    """Record a failure within the caller's transaction."""
    failed = is_round(run_id, failure.round)
    connection.execute(update(schema.rounds).where(failed).values(state=RoundMark.FAILED.value))
    # Nothing is computed from them any more.
    remove_messages(connection, run_id, (failure.round,))
    erase_seeds(connection, run_id, (failure.round,), now_s)
    add_event(connection, run_id, failure, now_s)


def remove_messages(connection: Connection, run_id: str, rounds: Sequence[int]) -> None:
    """Remove the messages of Rounds within the caller's transaction. Their rosters stay."""
    table = schema.messages
    for number in rounds:
        connection.execute(delete(table).where(table.c.run_id == run_id, table.c.round == number))


def summaries_before(connection: Connection, run_id: str, before: int | None, limit: int) -> tuple[RoundSummary, ...]:
    """Return Rounds of a Run with a number below ``before``, newest first, within the caller's transaction."""
    rounds, updates, versions = schema.rounds, schema.updates, schema.versions
    count = (
        select(func.count())
        .select_from(updates)
        .where(updates.c.run_id == run_id, updates.c.round == rounds.c.round)
        .scalar_subquery()
    )
    # A Round starts from the newest Version, and publishes the next one: no index on the Round is needed.
    number = (
        select(versions.c.number)
        .where(
            versions.c.run_id == run_id,
            versions.c.number == rounds.c.base_version + 1,
            versions.c.round == rounds.c.round,
        )
        .scalar_subquery()
    )
    num_updates = func.coalesce(rounds.c.num_accepted, count)
    query = select(rounds, num_updates.label("num_updates"), func.coalesce(number, 0).label("version"))
    query = query.where(rounds.c.run_id == run_id).order_by(rounds.c.round.desc()).limit(limit)
    if before is not None:
        query = query.where(rounds.c.round < before)
    return tuple(
        RoundSummary(record=_record(row), num_updates=row["num_updates"], version=row["version"])
        for row in connection.execute(query).mappings()
    )


def is_round(run_id: str, round_number: int) -> ColumnElement[bool]:
    """Return the condition that selects one Round."""
    return (schema.rounds.c.run_id == run_id) & (schema.rounds.c.round == round_number)


def measured_text(measured: MeasuredRanges) -> str:
    """Return the form of measured ranges in the record."""
    return json.dumps(asdict(measured) | {"values": base64.b64encode(measured.values).decode()})


def _measured(text: str) -> MeasuredRanges:
    row = json.loads(text)
    return MeasuredRanges(**row | {"values": base64.b64decode(row["values"])})


def _forgotten(row: RowMapping) -> ForgottenSet | None:
    sha256 = row["accepted_sha256"]
    return None if sha256 is None else ForgottenSet(num_updates=row["num_accepted"], sha256=sha256)


def _record(row: RowMapping) -> RoundRecord:
    try:
        return RoundRecord(
            run_id=row["run_id"],
            round=row["round"],
            base_version=row["base_version"],
            grid=tuple(json.loads(row["grid"])),
            mark=RoundMark(row["state"]),
            opened_at_s=row["opened_at"],
            deadline_at_s=row["deadline_at"],
            left_s=row["left_s"],
            deadline_rosters=row["deadline_rosters"] or 0,
            accepted=tuple(json.loads(row["accepted"] or "[]")),
            next_grid=tuple(json.loads(row["next_grid"] or "[]")),
            measured=None if row["measured"] is None else _measured(row["measured"]),
            forgotten=_forgotten(row),
        )
    except (ValueError, TypeError) as exc:
        raise Corrupted(
            f"fanin.db: run {row['run_id']}, round {row['round']}: the record is damaged ({exc}); restore a backup of "
            "the folder",
            code="FN-0508",
        ) from exc


def find_update(connection: Connection, run_id: str, made_for: int, device_id: str) -> CommittedUpdate | None:
    """Return the accepted Update of a device for a Round, or None without one."""
    table = schema.updates
    query = select(table.c.round, table.c.header_proto).where(
        table.c.run_id == run_id, table.c.made_for == made_for, table.c.device_id == device_id
    )
    row = connection.execute(query).first()
    return None if row is None else _update(device_id, *row)


def find_updates(connection: Connection, run_id: str, round_number: int) -> tuple[CommittedUpdate, ...]:
    """Return the Updates of a Round, in the order of their commits."""
    table = schema.updates
    query = (
        select(table.c.device_id, table.c.header_proto)
        .where(table.c.run_id == run_id, table.c.round == round_number)
        .order_by(table.c.sequence)
    )
    return tuple(_update(device, round_number, data) for device, data in connection.execute(query))


def find_updates_of(
    connection: Connection, run_id: str, round_number: int, devices: Sequence[str]
) -> tuple[CommittedUpdate, ...]:
    """Return the Updates of some devices in a Round."""
    table = schema.updates
    query = select(table.c.device_id, table.c.header_proto).where(
        table.c.run_id == run_id, table.c.round == round_number, table.c.device_id.in_(devices)
    )
    return tuple(_update(device, round_number, data) for device, data in connection.execute(query))


def find_headers(connection: Connection, run_id: str, made_for: int) -> dict[str, UpdateHeader]:
    """Return the accepted Updates for a Round, by device, without those in failed Rounds."""
    table, rounds = schema.updates, schema.rounds
    folded_in = (rounds.c.run_id == table.c.run_id) & (rounds.c.round == table.c.round)
    query = (
        select(table.c.device_id, table.c.header_proto)
        .join(rounds, folded_in)
        .where(table.c.run_id == run_id, table.c.made_for == made_for)
        .where(rounds.c.state != RoundMark.FAILED.value)
    )
    return {device: _header(data) for device, data in connection.execute(query)}


def find_last_folded(connection: Connection, run_id: str, device_id: str, lineage: int) -> int:
    """Return the Round that the last folded Update of a device in a lineage was made for, 0 without one."""
    table, rounds = schema.updates, schema.rounds
    folded_in = (rounds.c.run_id == table.c.run_id) & (rounds.c.round == table.c.round)
    query = (
        select(table.c.made_for)
        .join(rounds, folded_in)
        .where(table.c.run_id == run_id, table.c.device_id == device_id)
        .where(rounds.c.state == RoundMark.PUBLISHED.value, rounds.c.base_version >= lineage)
        .order_by(table.c.round.desc())
        .limit(1)
    )
    made_for = connection.execute(query).scalar()
    return _last_forgotten(connection, run_id, device_id, lineage) if made_for is None else int(made_for)


def _last_forgotten(connection: Connection, run_id: str, device_id: str, lineage: int) -> int:
    """Return the same of the Updates that retention removed, which are older."""
    table, rounds = schema.contributions, schema.rounds
    folded_in = (rounds.c.run_id == table.c.run_id) & (rounds.c.round == table.c.last_round)
    query = (
        select(table.c.last_made_for)
        .join(rounds, folded_in)
        .where(table.c.run_id == run_id, table.c.device_id == device_id, rounds.c.base_version >= lineage)
    )
    return int(connection.execute(query).scalar() or 0)


def _update(device_id: str, round_number: int, data: bytes) -> CommittedUpdate:
    return CommittedUpdate(device_id=device_id, round=round_number, header=_header(data), header_proto=data)


def _header(data: bytes) -> UpdateHeader:
    return decode("the header of an update", UpdateHeader, fleet_pb2.UpdateHeader, data)


def add_outer_state(connection: Connection, run_id: str, round_number: int, state: OuterState) -> None:
    """Record the state after a Round, within the caller's transaction."""
    for name, artifact in state.items():
        connection.execute(
            insert(schema.outer_states).values(
                run_id=run_id,
                round=round_number,
                name=name,
                artifact_proto=to_proto(artifact, fleet_pb2.Artifact).SerializeToString(deterministic=True),
            )
        )


def _outer_state(engine: Engine, run_id: str, round_number: int) -> OuterState:
    """Return the state after a Round, empty if its optimizer has none."""
    table = schema.outer_states
    query = select(table.c.name, table.c.artifact_proto).where(table.c.run_id == run_id, table.c.round == round_number)
    return _read_states(engine, query)


def _outer_state_of_version(engine: Engine, run_id: str, version: int) -> OuterState:
    """Return the state after the Round that published a Version, empty if no Round did or its optimizer has none."""
    table, versions = schema.outer_states, schema.versions
    query = (
        select(table.c.name, table.c.artifact_proto)
        .join(versions, (versions.c.run_id == table.c.run_id) & (versions.c.round == table.c.round))
        .where(versions.c.run_id == run_id, versions.c.number == version)
    )
    return _read_states(engine, query)


def _read_states(engine: Engine, query: Select[tuple[str, bytes]]) -> OuterState:
    with engine.connect() as connection:
        rows = connection.execute(query.order_by(schema.outer_states.c.name)).mappings().all()
    what = "the state of an outer optimizer"
    return {row["name"]: decode(what, Artifact, fleet_pb2.Artifact, row["artifact_proto"]) for row in rows}

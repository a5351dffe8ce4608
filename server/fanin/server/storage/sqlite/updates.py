"""Committed Updates, to read. The rows of a Round are its set."""

from collections.abc import Sequence

from sqlalchemy import Connection, select

from fanin.protos.messages import UpdateHeader
from fanin.server.storage.records import CommittedUpdate, RoundMark
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.columns import decode
from fanin.v1 import fleet_pb2


def find_update(connection: Connection, run_id: str, made_for: int, device_id: str) -> CommittedUpdate | None:
    """Return the accepted Update of a device for a Round, or None without one."""
    table = schema.updates
    query = select(table.c.round, table.c.header_proto).where(
        table.c.run_id == run_id, table.c.made_for == made_for, table.c.device_id == device_id
    )
    row = connection.execute(query).first()
    return None if row is None else CommittedUpdate(device_id=device_id, round=row[0], header=_header(row[1]))


def find_updates(connection: Connection, run_id: str, round_number: int) -> tuple[CommittedUpdate, ...]:
    """Return the Updates of a Round, in the order of their commits."""
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


def find_updates_of(
    connection: Connection, run_id: str, round_number: int, devices: Sequence[str]
) -> tuple[CommittedUpdate, ...]:
    """Return the Updates of some devices in a Round."""
    table = schema.updates
    query = select(table.c.device_id, table.c.header_proto).where(
        table.c.run_id == run_id, table.c.round == round_number, table.c.device_id.in_(devices)
    )
    return tuple(
        CommittedUpdate(device_id=device, round=round_number, header=_header(data))
        for device, data in connection.execute(query)
    )


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
    return int(connection.execute(query).scalar() or 0)


def _header(data: bytes) -> UpdateHeader:
    return decode("the header of an update", UpdateHeader, fleet_pb2.UpdateHeader, data)

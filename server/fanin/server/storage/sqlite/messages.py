"""The messages of the phases of Rounds, and their rosters.

A roster is recorded in the transaction that reads its messages, and a message in one that finds no roster. So the
roster names exactly the devices with a recorded message.
"""

import json

from sqlalchemy import ColumnElement, Connection, Engine, insert, select

from fanin.protos.errors import Corrupted
from fanin.server.storage.records import Roster, RoundMark, RoundMessage
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.rounds import is_round


class SqliteMessages:
    """Messages and rosters."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def message(self, run_id: str, round_number: int, phase: str, device_id: str) -> bytes | None:
        """See ``MessageStore.message``."""
        with self._engine.connect() as connection:
            return _find(connection, run_id, (round_number, phase, device_id))

    def messages(self, run_id: str, round_number: int) -> tuple[RoundMessage, ...]:
        """See ``MessageStore.messages``."""
        table = schema.messages
        query = select(table.c.phase, table.c.device_id, table.c.payload).where(_of_round(run_id, round_number))
        with self._engine.connect() as connection:
            return tuple(
                RoundMessage(round=round_number, phase=phase, device_id=device, payload=payload)
                for phase, device, payload in connection.execute(query.order_by(table.c.sequence))
            )

    def senders(self, run_id: str, round_number: int, phase: str) -> tuple[str, ...]:
        """See ``MessageStore.senders``."""
        with self._engine.connect() as connection:
            return find_senders(connection, run_id, round_number, phase)

    def rosters(self, run_id: str, round_number: int) -> tuple[Roster, ...]:
        """See ``MessageStore.rosters``."""
        with self._engine.connect() as connection:
            return _rosters(connection, run_id, round_number)


def add_message(connection: Connection, run_id: str, message: RoundMessage) -> RoundMessage | None:
    """Record a message within the caller's transaction. See ``RoundWriter.add_message``."""
    key = (message.round, message.phase, message.device_id)
    earlier = _find(connection, run_id, key)
    if earlier is not None:
        return RoundMessage(round=key[0], phase=key[1], device_id=key[2], payload=earlier)
    frozen = {roster.phase for roster in _rosters(connection, run_id, message.round)}
    if not _is_under_way(connection, run_id, message.round) or message.phase in frozen:
        return None
    row = {"phase": message.phase, "device_id": message.device_id, "payload": message.payload}
    connection.execute(insert(schema.messages).values(run_id=run_id, round=message.round, **row))
    return message


def find_roster(connection: Connection, run_id: str, round_number: int, phase: str) -> Roster | None:
    """Return the roster of a phase within the caller's transaction, or None without one."""
    return next((each for each in _rosters(connection, run_id, round_number) if each.phase == phase), None)


def add_roster(connection: Connection, run_id: str, round_number: int, roster: Roster) -> Roster:
    """Record a roster within the caller's transaction, and return it."""
    number = len(_rosters(connection, run_id, round_number))
    row = {"number": number, "phase": roster.phase, "devices": json.dumps(roster.devices)}
    connection.execute(insert(schema.rosters).values(run_id=run_id, round=round_number, **row))
    return roster


def _of_round(run_id: str, round_number: int) -> ColumnElement[bool]:
    return (schema.messages.c.run_id == run_id) & (schema.messages.c.round == round_number)


def _find(connection: Connection, run_id: str, key: tuple[int, str, str]) -> bytes | None:
    table, (round_number, phase, device_id) = schema.messages, key
    row = (table.c.phase == phase) & (table.c.device_id == device_id)
    payload: bytes | None = connection.execute(
        select(table.c.payload).where(_of_round(run_id, round_number) & row)
    ).scalar()
    return payload


def find_senders(connection: Connection, run_id: str, round_number: int, phase: str) -> tuple[str, ...]:
    """Return the devices with a message of a phase within the caller's transaction, in the order of the commits."""
    table = schema.messages
    query = select(table.c.device_id).where(_of_round(run_id, round_number), table.c.phase == phase)
    return tuple(connection.execute(query.order_by(table.c.sequence)).scalars())


def _rosters(connection: Connection, run_id: str, round_number: int) -> tuple[Roster, ...]:
    table = schema.rosters
    query = select(table.c.phase, table.c.devices).where(table.c.run_id == run_id, table.c.round == round_number)
    try:
        return tuple(
            Roster(phase=phase, devices=tuple(json.loads(devices)))
            for phase, devices in connection.execute(query.order_by(table.c.number))
        )
    except (ValueError, TypeError) as exc:
        raise Corrupted(
            f"fanin.db: run {run_id}, round {round_number}: a roster is damaged ({exc}); restore a backup of the "
            "folder",
            code="FN-0508",
        ) from exc


def _is_under_way(connection: Connection, run_id: str, round_number: int) -> bool:
    state = connection.execute(select(schema.rounds.c.state).where(is_round(run_id, round_number))).scalar()
    return state in (RoundMark.OPEN.value, RoundMark.CLOSED.value)

"""Protobuf messages in database columns, and the rows that retention removed.

SQLite verifies the structure of its file, not the content of a value. A damaged value therefore shows only when it is
parsed, and it must not end in the error of another library.
"""

from collections import defaultdict
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from sqlalchemy import ColumnElement, Connection, exists, select

from fanin.protos.errors import Corrupted, FaninError
from fanin.protos.wire import from_proto
from fanin.server.storage.protocols.retention import Removed
from fanin.server.storage.retention import RemovedKind, check_has_parameters
from fanin.server.storage.sqlite import schema

ValueT = TypeVar("ValueT")


def decode(what: str, kind: type[ValueT], message: type[Message], data: bytes) -> ValueT:
    """Return the value of a recorded message.

    Args:
        what: The record, for the error.
        kind: The class of the value.
        message: The class of the message.
        data: The bytes of the column.

    Raises:
        Corrupted: The bytes are not such a message, or its value is invalid.
    """
    try:
        return from_proto(kind, message.FromString(data))
    except (DecodeError, FaninError) as exc:
        raise Corrupted(
            f"fanin.db: {what}: the record is damaged ({exc}); restore a backup of the folder", code="FN-0508"
        ) from exc


def is_removed() -> ColumnElement[bool]:
    """Return the condition that the parameters of a row of ``versions`` were removed."""
    versions, removals = schema.versions, schema.removals
    is_row = (removals.c.run_id == versions.c.run_id) & (removals.c.number == versions.c.number)
    return exists().where(is_row, removals.c.kind == RemovedKind.PARAMETERS.value)


def is_state_removed() -> ColumnElement[bool]:
    """Return the condition that a row of ``outer_states`` belongs to a Version whose parameters were removed."""
    versions, states, removals = schema.versions, schema.outer_states, schema.removals
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


def check_adoptable(connection: Connection, run_id: str, number: int) -> None:
    """Raise Conflict if the parameters of a Version were removed, within the transaction that adopts it."""
    table = schema.removals
    query = select(table.c.removed_at).where(
        table.c.run_id == run_id, table.c.kind == RemovedKind.PARAMETERS.value, table.c.number == number
    )
    check_has_parameters(run_id, number, connection.execute(query).scalar())

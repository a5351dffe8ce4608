"""Protobuf messages in database columns.

SQLite verifies the structure of its file, not the content of a value. A damaged value therefore shows only when it is
parsed, and it must not end in the error of another library.
"""

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from fanin.protos.errors import Corrupted, FaninError
from fanin.protos.wire import from_proto

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

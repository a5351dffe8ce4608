"""Protobuf messages in database columns.

SQLite verifies the structure of its file, not the content of a value. A damaged value therefore shows only when it is
parsed, and it must not end in the error of another library.
"""

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from fanin.protos.errors import Corrupted, FaninError

MessageT = TypeVar("MessageT", bound=Message)
ValueT = TypeVar("ValueT")


def decode(what: str, message: type[MessageT], convert: Callable[[MessageT], ValueT], data: bytes) -> ValueT:
    """Parse and convert a recorded message.

    Args:
        what: The record, for the error.
        message: The class of the message.
        convert: From the message to its value, with all checks.
        data: The bytes of the column.

    Raises:
        Corrupted: The bytes are not such a message, or its value is invalid.
    """
    try:
        return convert(message.FromString(data))
    except (DecodeError, FaninError) as exc:
        raise Corrupted(f"fanin.db: {what}: the record is damaged ({exc}); restore a backup of the folder") from exc

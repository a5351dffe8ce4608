"""Annotations of the fields whose wire form differs from what their names and types say.

``fanin.protos.wire`` derives everything else. Example::

    public_key: Annotated[str, Mark.HEXADECIMAL]
"""

from dataclasses import dataclass
from enum import Enum, auto


class Mark(Enum):
    """How the wire form of a field differs.

    HEXADECIMAL: the text is the hexadecimal form of bytes.
    SPARSE: the field is not sent while it has its default.
    LOCAL: a message may lack the field, which is then not sent and read as its default.
    BESIDE: of a variant: the field is beside the ``oneof`` of the message around.
    WHOLE: of a variant: the field is the whole message of the variant.
    """

    HEXADECIMAL = auto()
    SPARSE = auto()
    LOCAL = auto()
    BESIDE = auto()
    WHOLE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOf:
    """Of a union: its variants are the only ``oneof`` of the message.

    A variant has the name of its field, or of its field's message. ``unknown`` is the error for a message with another
    variant, whose field or None replaces the braces.
    """

    unknown: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Otherwise:
    """Of an enum: the member for all numbers that this release does not know."""

    member: Enum

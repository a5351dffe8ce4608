"""Whether a TFLite file hangs together, told before a runtime follows its offsets.

A TFLite interpreter trusts its file: an offset that leads outside ends the process. A Bundle's digest protects
against accidents on the way, not against the mistake of whoever made the graph, so each offset that is followed is
checked here first. A FlatBuffer is a tree of tables (flatbuffers.dev, "FlatBuffer Internals")::

    table    i32 distance back to its vtable, then the fields
    vtable   u16 its own size, u16 the table's size, then for each field u16 its place in the table (0: absent)
    vector   u32 length, then the elements; one of tables holds u32 distances forward

``FIELDS`` is the part of TFLite's schema that an interpreter reads before it knows the operators; of an operator's
options, which are tables of numbers, only the size is checked.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import InvalidBundle

IDENTIFIER: Final = b"TFL3"
MAX_BYTES: Final = 2**31 - 1
"""Offsets are 32 bits, one of them signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """What a field holds: a number of ``size`` bytes, a vector of such, or a table or a vector of tables."""

    size: int = 0
    table: str = ""
    is_vector: bool = False


def _numbers(size: int) -> Field:
    return Field(size=size, is_vector=True)


def _tables(name: str) -> Field:
    return Field(table=name, is_vector=True)


TEXT: Final = _numbers(1)
OPTIONS: Final = Field(table="Options")
FIELDS: Final[Mapping[str, Mapping[int, Field]]] = {
    "Model": {
        0: Field(size=4),
        1: _tables("OperatorCode"),
        2: _tables("SubGraph"),
        3: TEXT,
        4: _tables("Buffer"),
        6: _tables("Metadata"),
        7: _tables("SignatureDef"),
    },
    "OperatorCode": {0: Field(size=1), 1: TEXT, 2: Field(size=4), 3: Field(size=4)},
    "SubGraph": {0: _tables("Tensor"), 1: _numbers(4), 2: _numbers(4), 3: _tables("Operator"), 4: TEXT},
    "Tensor": {
        0: _numbers(4),
        1: Field(size=1),
        2: Field(size=4),
        3: TEXT,
        4: Field(table="Quantization"),
        5: Field(size=1),
        7: _numbers(4),
    },
    "Quantization": {0: _numbers(4), 1: _numbers(4), 2: _numbers(4), 3: _numbers(8), 5: OPTIONS, 6: Field(size=4)},
    "Operator": {
        0: Field(size=4),
        1: _numbers(4),
        2: _numbers(4),
        3: Field(size=1),
        4: OPTIONS,
        5: _numbers(1),
        7: _numbers(1),
        8: _numbers(4),
        12: OPTIONS,
    },
    "Options": {},
    "Buffer": {0: _numbers(1)},
    "Metadata": {0: TEXT, 1: Field(size=4)},
    "SignatureDef": {0: _tables("TensorMap"), 1: _tables("TensorMap"), 2: TEXT, 4: Field(size=4)},
    "TensorMap": {0: TEXT, 1: Field(size=4)},
}


def check_file(data: bytes, what: str) -> None:
    """Raise InvalidBundle unless every offset in a TFLite file leads to something that lies within it."""
    if not 8 <= len(data) <= MAX_BYTES or data[4:8] != IDENTIFIER:
        raise InvalidBundle(f"{what}: got {len(data)} bytes that begin {data[:8].hex()}, expected a TFLite file")
    try:
        _Walk(data).table("Model", *struct.unpack_from("<I", data))
    except (struct.error, _Astray) as exc:
        raise InvalidBundle(
            f"{what}: the TFLite file is cut off or damaged ({exc}); get it again, or export it again"
        ) from exc


class _Astray(Exception):
    """Something lies outside the file."""


class _Walk:
    """The file from its root on."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def table(self, name: str, start: int) -> None:
        """Check a table and all that it holds."""
        vtable = start - self._number("<i", start)
        self._within(f"vtable of {name}", vtable, 4)
        num_bytes, size = struct.unpack_from("<HH", self._data, vtable)
        self._within(f"vtable of {name}", vtable, num_bytes)
        self._within(name, start, size)
        if num_bytes < 4 or num_bytes % 2 or size < 4:
            raise _Astray(f"{name} at {start} says that it takes {size} bytes")
        for index, field in FIELDS[name].items():
            if 4 + 2 * index < num_bytes:
                place = self._number("<H", vtable + 4 + 2 * index)
                if place + (field.size if field.size and not field.is_vector else 4) > size:
                    raise _Astray(f"field {index} of {name} at {start} lies behind it")
                if place:
                    self._field(f"field {index} of {name}", field, start + place)

    def _field(self, what: str, field: Field, place: int) -> None:
        if field.size and not field.is_vector:
            return
        target = place + self._number("<I", place)
        if not field.is_vector:
            self.table(field.table, target)
            return
        length = self._number("<I", target)
        self._within(what, target + 4, length * (field.size or 4))
        if field.table:
            for start in range(target + 4, target + 4 + 4 * length, 4):
                self.table(field.table, start + self._number("<I", start))

    def _number(self, form: str, place: int) -> int:
        self._within("a number", place, struct.calcsize(form))
        (found,) = struct.unpack_from(form, self._data, place)
        return int(found)

    def _within(self, what: str, start: int, size: int) -> None:
        if start < 0 or start + size > len(self._data):
            raise _Astray(f"{what} takes {size} bytes from {start} of {len(self._data)}")

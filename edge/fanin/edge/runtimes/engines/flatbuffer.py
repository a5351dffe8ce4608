"""Bounds check of a TFLite file, before an interpreter follows its offsets.

A TFLite interpreter trusts its file: an offset that points outside the file crashes the process. The digest in a
manifest protects against damage in transit, but not against a file that was exported wrongly. So every offset that the
interpreter follows is checked here first. A FlatBuffer is a tree of tables::

    table    i32 distance back to its vtable, then the fields
    vtable   u16 its own size, u16 the table's size, then for each field u16 its offset in the table (0: absent)
    vector   u32 length, then the elements; a vector of tables holds u32 distances forward

``FIELDS`` is the part of TFLite's schema that an interpreter reads before it prepares the operators. The options of an
operator are tables of numbers, and only their size is checked.

Reference:
    flatbuffers.dev, "FlatBuffer Internals".
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import InvalidBundle

IDENTIFIER: Final = b"TFL3"
MAX_BYTES: Final = 2**31 - 1
"""Offsets have 32 bits, and the distance to a vtable is signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Type of a field: a number of ``size`` bytes, a table, or a vector of either."""

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
    """Raise InvalidBundle unless every offset in a TFLite file points to data inside the file."""
    if not 8 <= len(data) <= MAX_BYTES or data[4:8] != IDENTIFIER:
        raise InvalidBundle(
            f"{what}: got {len(data)} bytes that begin {data[:8].hex()}, expected a TFLite file", code="FN-0330"
        )
    try:
        _Walk(data).table("Model", *struct.unpack_from("<I", data))
    except (struct.error, _OutOfBounds) as exc:
        raise InvalidBundle(
            f"{what}: the TFLite file is cut off or damaged ({exc}); download it again, or export it again",
            code="FN-0330",
        ) from exc


class _OutOfBounds(Exception):
    """An offset or a size points outside the file."""


class _Walk:
    """Depth-first walk over the tables of a file."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def table(self, name: str, start: int) -> None:
        """Check a table and everything that it references."""
        vtable = start - self._number("<i", start)
        self._within(f"vtable of {name}", vtable, 4)
        num_bytes, size = struct.unpack_from("<HH", self._data, vtable)
        self._within(f"vtable of {name}", vtable, num_bytes)
        self._within(name, start, size)
        if num_bytes < 4 or num_bytes % 2 or size < 4:
            raise _OutOfBounds(f"{name} at {start} has a size of {size} bytes")
        for index, field in FIELDS[name].items():
            if 4 + 2 * index < num_bytes:
                offset = self._number("<H", vtable + 4 + 2 * index)
                if offset + (field.size if field.size and not field.is_vector else 4) > size:
                    raise _OutOfBounds(f"field {index} of {name} at {start} is outside it")
                if offset:
                    self._field(f"field {index} of {name}", field, start + offset)

    def _field(self, what: str, field: Field, position: int) -> None:
        if field.size and not field.is_vector:
            return
        target = position + self._number("<I", position)
        if not field.is_vector:
            self.table(field.table, target)
            return
        length = self._number("<I", target)
        self._within(what, target + 4, length * (field.size or 4))
        if field.table:
            for start in range(target + 4, target + 4 + 4 * length, 4):
                self.table(field.table, start + self._number("<I", start))

    def _number(self, form: str, position: int) -> int:
        self._within("a number", position, struct.calcsize(form))
        (value,) = struct.unpack_from(form, self._data, position)
        return int(value)

    def _within(self, what: str, start: int, size: int) -> None:
        if start < 0 or start + size > len(self._data):
            raise _OutOfBounds(f"{what} has {size} bytes from {start} of {len(self._data)}")

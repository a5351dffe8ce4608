"""Named float32 tensors as one flat vector, and their canonical bytes.

Global parameters, updates and sums have the same layout: the tensors of a ``TensorTable`` in name order, raveled in C
order, end to end in one vector. So the codec, the fold, the outer step and the digest need one loop, and a tensor is a
view, never a copy.

Canonical bytes (the input of ``version_sha256``), little-endian::

    offset  size  field
    0       8     magic b"fanin-t2" (the digit is the format number)
    8       4     H: length of the header
    12      H     header: JSON [[name, [dim, ...]], ...] in name order, without spaces, UTF-8;
                  then the fewest spaces (0 to 63) that make 12+H a multiple of 64
    12+H    4*n   float32 values, C order, in the header's order

The values begin at a multiple of 64 bytes, the size of a cache line. CPython stores the content of bytes at a multiple
of 16. The decoded vector is a view of these bytes, so it is as aligned as numpy's own arrays. At an odd address an
addition takes almost twice as long, and a dot product several times as long.
"""

import hashlib
import json
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from fanin.protos.errors import InvalidInput
from fanin.protos.roles import PARAMETER, RoleKind, TensorRole

Float32s = npt.NDArray[np.float32]
"""A flat vector (num_values,) or any tensor of float32."""
Float64s = npt.NDArray[np.float64]
Int32s = npt.NDArray[np.int32]
"""Labels, or tokens."""
Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]
"""Pixels or characters, as files and sensors deliver them."""
Array = npt.NDArray[np.generic]
"""A tensor of any dtype."""

MAGIC: Final = b"fanin-t2"
_LENGTH: Final = struct.Struct("<I")
ALIGNMENT: Final = 64
"""The values begin at a multiple of this many bytes."""
MAX_HEADER_BYTES: Final = 1 << 24
"""Longest header that is parsed: about 200,000 tensors. It limits the memory that a peer can make us allocate."""
MAX_RANK: Final = 8
MAX_VALUES: Final = 1 << 40
"""4 TB of float32. Every product of dimensions stays far below the largest int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, shape and role of one float32 tensor.

    Canonical bytes have no roles, so two specs of one layout are equal. The roles of a Run are those of the signed
    manifest.
    """

    name: str
    shape: tuple[int, ...]
    role: TensorRole = field(default=PARAMETER, compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("tensor name: got an empty one")
        # JSON can spell half a surrogate pair, which no UTF-8 can hold: a UnicodeEncodeError, which is a ValueError.
        self.name.encode()
        # Without the dimensions that are 0: numpy refuses the product of the others even for an empty tensor.
        largest = prod(dim for dim in self.shape if dim)
        if len(self.shape) > MAX_RANK or any(dim < 0 for dim in self.shape) or largest > MAX_VALUES:
            raise ValueError(
                f"tensor {self.name!r}: got shape {self.shape}, expected at most {MAX_RANK} dimensions, none negative, "
                f"with a product of at most {MAX_VALUES}"
            )

    @property
    def num_values(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorTable:
    """The layout of a flat vector: specs in strictly rising name order."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    num_values: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.specs]
        if any(left >= right for left, right in pairwise(names)):
            raise ValueError("tensor table: names must be unique and in rising order")
        offsets, total = [], 0
        for spec in self.specs:
            offsets.append(total)
            total += spec.num_values
        if total > MAX_VALUES:
            raise ValueError(f"tensor table: got {total} values, expected at most {MAX_VALUES}")
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "num_values", total)

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]]) -> "TensorTable":
        """Return the table of these names and shapes, given in any order."""
        return cls(tuple(TensorSpec(name=name, shape=tuple(shapes[name])) for name in sorted(shapes)))

    def with_roles(self, roles: Mapping[str, TensorRole]) -> "TensorTable":
        """Return the table with these roles, by name. The other tensors keep theirs."""
        return TensorTable(tuple(replace(spec, role=roles.get(spec.name, spec.role)) for spec in self.specs))

    @property
    def roles(self) -> dict[str, TensorRole]:
        """The roles other than that of a parameter without a range, by name."""
        return {spec.name: spec.role for spec in self.specs if spec.role != PARAMETER}

    def check_values(self, flat: Float32s) -> None:
        """Check that each tensor has the values of its role: within its range, and whole for a counter.

        Args:
            flat: The values (num_values,).

        Raises:
            InvalidInput: A tensor has others. The text names it.
        """
        for spec, start in zip(self.specs, self.offsets, strict=True):
            values, role = flat[start : start + spec.num_values], spec.role
            if role == PARAMETER:
                continue
            is_wrong = outside(values, role) | ~np.isfinite(values)
            if role.role is RoleKind.COUNTER:
                is_wrong |= values != np.rint(values)
            if is_wrong.any():
                kind = "whole" if role.role is RoleKind.COUNTER else "finite"
                raise InvalidInput(
                    f"tensor {spec.name!r}: got {values[is_wrong][0]:g}, expected {kind} numbers"
                    f"{role.range and f' of {role.range}'}, because it is a {role.role}; correct its values",
                    code="FN-0356",
                )

    def joined(self, other: "TensorTable") -> "TensorTable":
        """Return the table of the tensors of both. Raises ValueError if they share a name."""
        return TensorTable(tuple(sorted((*self.specs, *other.specs), key=lambda spec: spec.name)))

    def views(self, flat: Float32s) -> dict[str, Float32s]:
        """Return the tensors as views of ``flat`` (num_values,), by name.

        Raises ValueError if the vector has another length.
        """
        if flat.shape != (self.num_values,):
            raise ValueError(f"flat vector: got shape {flat.shape}, expected ({self.num_values},)")
        return {
            spec.name: flat[start : start + spec.num_values].reshape(spec.shape)
            for spec, start in zip(self.specs, self.offsets, strict=True)
        }

    def flatten(self, tensors: Mapping[str, npt.NDArray[np.generic]]) -> Float32s:
        """Return these tensors as one flat float32 vector (num_values,).

        Raises ValueError if a name or a shape differs from the table's.
        """
        if set(tensors) != {spec.name for spec in self.specs}:
            raise ValueError(f"tensors: got names {sorted(tensors)}, expected {[spec.name for spec in self.specs]}")
        flat = np.empty(self.num_values, np.float32)
        for name, view in self.views(flat).items():
            if tensors[name].shape != view.shape:
                raise ValueError(f"tensor {name!r}: got shape {tensors[name].shape}, expected {view.shape}")
            view[...] = tensors[name]
        return flat

    def header(self) -> bytes:
        """Return magic, length and JSON header of the canonical bytes: a multiple of ``ALIGNMENT`` bytes."""
        rows = [[spec.name, list(spec.shape)] for spec in self.specs]
        text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(len(MAGIC) + _LENGTH.size + len(text)) % ALIGNMENT)
        return MAGIC + _LENGTH.pack(len(text)) + text


def outside(values: Float32s, role: TensorRole) -> npt.NDArray[np.bool_]:
    """Return which values (num_values,) are out of the range of a role, rounded to float32. NaN is in no range."""
    out = np.zeros(values.shape, np.bool_)
    if role.lowest is not None:
        out |= ~(values >= np.float32(role.lowest))
    if role.highest is not None:
        out |= ~(values <= np.float32(role.highest))
    return out


def encode_parameters(table: TensorTable, flat: Float32s) -> bytes:
    """Return the canonical bytes of parameters (num_values,)."""
    if flat.shape != (table.num_values,):
        raise ValueError(f"flat vector: got shape {flat.shape}, expected ({table.num_values},)")
    return table.header() + flat.astype("<f4", copy=False).tobytes()


def decode_parameters(data: bytes) -> tuple[TensorTable, Float32s]:
    """Decode canonical bytes.

    Only the canonical encoding of a value decodes. So two sets of parameters have equal digests exactly if they are
    equal.

    Returns:
        The table, and the flat vector (num_values,) as a read-only view of ``data``.

    Raises:
        InvalidInput: The bytes are not in canonical form.
    """
    start = len(MAGIC) + _LENGTH.size
    if data[: len(MAGIC)] != MAGIC:
        raise InvalidInput(f"parameters: got magic {data[: len(MAGIC)]!r}, expected {MAGIC!r}", code="FN-0355")
    if len(data) < start:
        raise InvalidInput(f"parameters: got {len(data)} bytes, expected at least {start}", code="FN-0355")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    if length > min(MAX_HEADER_BYTES, len(data) - start):
        raise InvalidInput(
            f"parameters: got a header of {length} bytes, expected at most {len(data) - start}", code="FN-0355"
        )
    table = _parse_header(data[start : start + length])
    if table.header() != data[: start + length]:
        raise InvalidInput("parameters: the header is not in canonical form", code="FN-0355")
    size, expected = len(data) - start - length, 4 * table.num_values
    if size != expected:
        raise InvalidInput(f"parameters: got {size} bytes of values, expected {expected}", code="FN-0355")
    return table, np.frombuffer(data, "<f4", offset=start + length)


def _parse_header(text: bytes) -> TensorTable:
    try:
        rows = json.loads(text)
        return TensorTable(tuple(TensorSpec(name=_name(row[0]), shape=_shape(row[1])) for row in rows))
    except (ValueError, TypeError, LookupError, RecursionError) as exc:
        raise InvalidInput(f"parameters: the header does not parse ({exc})", code="FN-0355") from exc


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"tensor name: got {type(value).__name__}, expected a string")
    return value


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(dim) is int for dim in value):
        raise TypeError("tensor shape: expected a list of integers")
    return tuple(value)


def sha256_hex(data: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 (FIPS 180-4) of ``data`` in lower-case hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def count_differences(
    unknown: Collection[object], wrong: Collection[object], missing: Collection[object], *, of: str = "another shape"
) -> str:
    """Return the numbers of tensors that differ, such as ``2 unknown, 1 missing``. A number of 0 is left out.

    Args:
        unknown: the tensors that the model does not have.
        wrong: the tensors that differ from the model's tensor of the same name.
        missing: the tensors that only the model has.
        of: how the ``wrong`` ones differ.
    """
    counts = {"unknown to the model": unknown, f"of {of}": wrong, "missing": missing}
    return ", ".join(f"{len(names)} {words}" for words, names in counts.items() if names)

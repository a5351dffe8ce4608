"""Codecs: an update as integers on the grid, and as bytes.

``fixed32`` keeps 32 bits a value: its error is at most half a (shifted) grid step, absolute. Others are the
same with fewer bits; ``CODECS`` is the seam. The payload is the table's layout in int32, little-endian.

A device encodes its *unweighted* update; weights are the server's (DESIGN decision 4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.errors import InvalidUpdate

Int32s = npt.NDArray[np.int32]
"""Encoded values (num_values,)."""

LIMIT: Final = (1 << 31) - 1
"""The ends are symmetric, so that a negated update encodes to negated values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An update on the grid.

    ``num_rounded`` values were not on the grid and moved to the nearest step; ``num_saturated`` lay beyond its
    ends and were cut.
    """

    payload: bytes
    shifts: tuple[int, ...]
    num_rounded: int
    num_saturated: int


class Codec(Protocol):
    """Between flat float32 updates and payloads."""

    def encode(self, table: TensorTable, update: Float32s, grid: Sequence[int], max_shift: int) -> Encoded:
        """Raises ValueError for NaN, infinity, or a vector or grid of another length."""
        ...

    def payload_bytes(self, table: TensorTable) -> int:
        """The exact size of every payload for this table."""
        ...

    def decode(self, payload: memoryview) -> Int32s:
        """The integers of a piece of payload that starts and ends between values; a view where possible."""
        ...


class Fixed32:
    """32-bit two's complement values."""

    def encode(self, table: TensorTable, update: Float32s, grid: Sequence[int], max_shift: int) -> Encoded:
        """Choose the smallest shift with which each block fits, then round to nearest, ties to even."""
        if not np.isfinite(update).all():
            raise ValueError("update: got NaN or infinity, expected finite values; the training diverged")
        if len(grid) != len(table.specs):
            raise ValueError(f"grid: got {len(grid)} blocks, expected {len(table.specs)}")
        values = np.empty(table.num_values, "<i4")
        shifts, num_rounded, num_saturated = [], 0, 0
        for view, start, exponent in zip(table.views(update).values(), table.offsets, grid, strict=True):
            # float64 holds every float32 times a power of two exactly, so only rint rounds.
            scaled = np.ldexp(view.ravel().astype(np.float64), -exponent)
            shift = _shift(float(np.abs(scaled).max(initial=0.0)), max_shift)
            scaled = np.ldexp(scaled, -shift)
            rounded = np.rint(scaled)
            num_rounded += int(np.count_nonzero(rounded != scaled))
            num_saturated += int(np.count_nonzero(np.abs(rounded) > LIMIT))
            values[start : start + view.size] = np.clip(rounded, -LIMIT, LIMIT).astype(np.int32)
            shifts.append(shift)
        return Encoded(
            payload=values.tobytes(), shifts=tuple(shifts), num_rounded=num_rounded, num_saturated=num_saturated
        )

    def payload_bytes(self, table: TensorTable) -> int:
        """Four bytes a value."""
        return 4 * table.num_values

    def decode(self, payload: memoryview) -> Int32s:
        """A view of the bytes."""
        if len(payload) % 4:
            raise InvalidUpdate(f"fixed32: got a payload of {len(payload)} bytes, expected a multiple of 4")
        return np.frombuffer(payload, "<i4")


CODECS: Final[Mapping[str, Codec]] = MappingProxyType({"fixed32": Fixed32()})


def codec_named(name: str) -> Codec:
    """The codec of this name. Raises InvalidUpdate for one that is unknown here."""
    codec = CODECS.get(name)
    if codec is None:
        raise InvalidUpdate(f"codec: got {name!r}, expected one of {sorted(CODECS)}")
    return codec


def _shift(largest: float, max_shift: int) -> int:
    shift = 0
    while shift < max_shift and np.rint(np.ldexp(largest, -shift)) > LIMIT:
        shift += 1
    return shift

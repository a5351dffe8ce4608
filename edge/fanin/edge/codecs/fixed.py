"""Codecs: an update as integers on the grid, and as bytes.

``fixed32`` keeps 32 bits a value and rounds to the nearest step: its error is at most half a (shifted) grid step,
absolute. ``int8`` is the same with 8 bits, and rounds by chance, up as often as the value is far above the step
below: its error is under one step, and zero on average. Rounding to nearest would lose, Round after Round, what
is always smaller than half a step; errors that are drawn anew cancel out over devices and Rounds, and need no
memory on the device (stochastic quantization: Alistarh et al. 2017, arXiv 1610.02132, section 3.1; what was
measured: docs/decisions/0006).

``CODECS`` is the seam for more. The payload is the table's layout in little-endian integers of that size.

A device encodes its *unweighted* update; weights are the server's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.errors import InvalidUpdate

BLOCK_VALUES: Final = 1 << 14
"""How many values are encoded at a time: what is computed on the way stays in a processor's second cache."""
LARGE: Final = 2.0**100
Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Integers = npt.NDArray[np.signedinteger]
"""Encoded values (num_values,)."""


def largest_value(bits: int) -> int:
    """The ends are symmetric, so that a negated update encodes to negated values."""
    return (1 << (bits - 1)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An update on the grid.

    ``num_rounded`` values were not on the grid and moved to a step beside them; ``num_saturated`` lay beyond its
    ends and were cut.
    """

    payload: bytes
    shifts: tuple[int, ...]
    num_rounded: int
    num_saturated: int


class Codec(Protocol):
    """Between flat float32 updates and payloads."""

    @property
    def bits(self) -> int:
        """The bits of one value, with its sign."""
        ...

    @property
    def by_chance(self) -> bool:
        """Whether rounding draws from the generator."""
        ...

    def encode(
        self, table: TensorTable, update: Float32s, grid: Sequence[int], max_shift: int, rng: np.random.Generator
    ) -> Encoded:
        """``rng`` draws what is left to chance. Raises ValueError for NaN, infinity, or a vector or grid of
        another length."""
        ...

    def payload_bytes(self, table: TensorTable) -> int:
        """The exact size of every payload for this table."""
        ...

    def decode(self, payload: memoryview) -> Integers:
        """The integers of a piece of payload that starts and ends between values; a view where possible."""
        ...


def round_to_nearest(scaled: Floats) -> Floats:
    """Ties to even; nothing is left to chance."""
    nearest: Floats = np.rint(scaled)
    return nearest


def round_by_chance(scaled: Floats, rng: np.random.Generator) -> Floats:
    """Away from zero with the probability that the fraction is, so that the mean of the outcomes is the value."""
    magnitude = np.abs(scaled)
    below = np.floor(magnitude)
    outcome: Floats = np.copysign(below + (rng.random(magnitude.size) < magnitude - below), scaled)
    return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TwosComplement:
    """Values as two's complement integers of a dtype, rounded to the nearest or by chance."""

    name: str
    dtype: np.dtype[np.signedinteger]
    by_chance: bool

    @property
    def bits(self) -> int:
        """All bits of the dtype."""
        return 8 * self.dtype.itemsize

    def encode(
        self, table: TensorTable, update: Float32s, grid: Sequence[int], max_shift: int, rng: np.random.Generator
    ) -> Encoded:
        """Choose the smallest shift with which each block fits, then round."""
        if len(grid) != len(table.specs):
            raise ValueError(f"grid: got {len(grid)} blocks, expected {len(table.specs)}")
        limit = largest_value(self.bits)
        values = np.empty(table.num_values, self.dtype)
        shifts, num_rounded, num_saturated = [], 0, 0
        for view, start, exponent in zip(table.views(update).values(), table.offsets, grid, strict=True):
            flat = view.ravel()
            largest = _largest(flat)
            # On the finest grids that an Assignment may have, large values are infinitely many steps: they are cut.
            with np.errstate(over="ignore", invalid="ignore"):
                shift = _shift(float(np.ldexp(largest, -exponent)), limit, max_shift)
                per_value = math.ldexp(1.0, -exponent - shift)
                is_cut = largest * per_value > limit
                # Nothing rounds but the rule: a float32 times a power of two is exact in float64, and in float32 too if
                # it becomes no smaller, stays below the limit, and float32 has that power.
                is_narrow = 1.0 <= per_value < LARGE and not is_cut and not self.by_chance
                exact = np.dtype(np.float32 if is_narrow else np.float64)
                for first in range(0, flat.size, BLOCK_VALUES):
                    scaled: Floats = np.multiply(flat[first : first + BLOCK_VALUES], per_value, dtype=exact)
                    rounded = round_by_chance(scaled, rng) if self.by_chance else round_to_nearest(scaled)
                    num_rounded += int(np.count_nonzero(rounded != scaled))
                    if is_cut:
                        num_saturated += int(np.count_nonzero(np.abs(rounded) > limit))
                        np.clip(rounded, -limit, limit, out=rounded)
                    values[start + first : start + first + rounded.size] = rounded
            shifts.append(shift)
        return Encoded(
            payload=values.tobytes(), shifts=tuple(shifts), num_rounded=num_rounded, num_saturated=num_saturated
        )

    def payload_bytes(self, table: TensorTable) -> int:
        """The dtype's bytes for each value."""
        return self.dtype.itemsize * table.num_values

    def decode(self, payload: memoryview) -> Integers:
        """A view of the bytes."""
        size = self.dtype.itemsize
        if len(payload) % size:
            raise InvalidUpdate(f"{self.name}: got a payload of {len(payload)} bytes, expected a multiple of {size}")
        return np.frombuffer(payload, self.dtype)


CODECS: Final[Mapping[str, Codec]] = MappingProxyType(
    {
        "fixed32": TwosComplement(name="fixed32", dtype=np.dtype("<i4"), by_chance=False),
        "int8": TwosComplement(name="int8", dtype=np.dtype("<i1"), by_chance=True),
    }
)


def codec_named(name: str) -> Codec:
    """The codec of this name. Raises InvalidUpdate for one that is unknown here."""
    codec = CODECS.get(name)
    if codec is None:
        raise InvalidUpdate(f"codec: got {name!r}, expected one of {sorted(CODECS)}")
    return codec


def _largest(values: Float32s) -> float:
    """The largest magnitude. Raises ValueError for NaN and infinity, which both ends of a range tell of."""
    highest, lowest = float(values.max(initial=0.0)), float(values.min(initial=0.0))
    if not (math.isfinite(highest) and math.isfinite(lowest)):
        raise ValueError("update: got NaN or infinity, expected finite values; the training diverged")
    return max(highest, -lowest)


def _shift(largest: float, limit: int, max_shift: int) -> int:
    shift = 0
    while shift < max_shift and math.ldexp(largest, -shift) > limit:
        shift += 1
    return shift

"""The codec ``topk``: of each slice of 16,384 values, the share with the largest magnitude; all others are zero.

A payload has a part for each slice of the vector, one after the other:

    [indices of the sent values: ``positions``] [sent values: ``bits`` each, lowest bit first] [zeros to a whole byte]

A slice of n values sends k = ceil(fraction * n) of them. So the part of each complete slice has the same number of
bytes, and a reader finds any slice without the others. Of equal magnitudes the first ones are sent. A sent value is an
integer on the Round's grid, like a value of ``int8``, and all values of a block have one shift:

    8 bits   the smallest shift with which all sent values of the block fit
    4 bits   the largest shift with a step of at most half the median magnitude of the block's sent values: -7 to 7
    2 bits   the largest shift with a step of at most the median magnitude: -1, 0 or 1

With few bits, a step for the largest value of a block would send most of the others as 0. With the median, the largest
values are cut, and error feedback sends the rest of them later.

A value of at least one step is rounded by chance: its expectation is the value. A smaller one is rounded to the
nearest of 0 and 1 step. So no value is sent with a larger error than if it were not sent at all: the condition under
which error feedback converges. And value - sent is exact in float32, so the residual has the rest to the bit, unless a
value is beyond the range by more than 2^23 steps. (A value m < 1/2 that chance rounds up to 1 leaves 1 - m, which is
not exact.)

Without the stage ``error_feedback`` all values that are not sent are lost, and the mean is biased.

Reference:
    Sarfi et al. 2025, Communication Efficient LLM Pre-training with SparseLoCo, arXiv 2508.15706: 1 to 3 % of the
    values of each chunk, few bits a value, and error feedback. Karimireddy et al. 2019, arXiv 1901.09847, assumption A:
    the contraction E ||C(x) - x||^2 <= (1 - delta) ||x||^2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Final

import numpy as np

from fanin.edge.codecs.fixed import (
    SLICE_VALUES,
    Encoded,
    Floats,
    Integers,
    largest_magnitude_of,
    largest_value,
    smallest_shift,
)
from fanin.edge.codecs.sparse.positions import (
    CODE,
    bits_integers,
    decode_positions,
    encode_positions,
    integer_bits,
    position_bits,
)
from fanin.edge.tensors import Float32s, Int64s, TensorTable
from fanin.protos.errors import InvalidPlan, InvalidUpdate
from fanin.protos.plans.keys import Key

STEPS_OF_MEDIAN: Final = MappingProxyType({2: 1, 4: 2})
"""Least steps of the median of a block's sent values, for the bits of values whose shift follows the median."""
VALUE_BITS: Final = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """A ``SparseCodec`` that sends the values of the largest magnitude.

    Attributes:
        fraction: The share of the values of each slice that is sent.
        bits: Bits of a sent value.
    """

    fraction: float
    bits: int
    is_stochastic: bool = True

    def encode(
        self, table: TensorTable, update: Float32s, grid: Sequence[int], max_shift: int, rng: np.random.Generator
    ) -> Encoded:
        """See ``Codec.encode``. ``num_rounded`` and ``num_saturated`` count sent values alone.

        It draws one number for each sent value, in the order of the vector. With 2 or 4 bits, a value counts as
        saturated only in a block with ``max_shift``: the others are beyond the range on purpose.
        """
        if len(grid) != len(table.specs) or update.shape != (table.num_values,):
            raise ValueError(
                f"update: got {update.shape} values and {len(grid)} blocks, expected ({table.num_values},) and "
                f"{len(table.specs)}"
            )
        largest_magnitude_of(update)
        positions = self._chosen(update)
        sent = np.empty(positions.size, np.int8)
        shifts, num_rounded, num_saturated = [], 0, 0
        for spec, start, exponent in zip(table.specs, table.offsets, grid, strict=True):
            first, last = np.searchsorted(positions, (start, start + spec.num_values))
            values = update[positions[first:last]].astype(np.float64)
            # On the finest grids that an Assignment may have, large values overflow to infinity and saturate.
            with np.errstate(over="ignore", invalid="ignore"):
                shift = self._shift(values, exponent, max_shift)
                scaled = np.ldexp(values, -exponent - shift)
                rounded = _rounded(scaled, rng)
            limit = largest_value(self.bits)
            num_rounded += int(np.count_nonzero(rounded != scaled))
            if shift == max_shift:
                num_saturated += int(np.count_nonzero(np.abs(rounded) > limit))
            sent[first:last] = np.clip(rounded, -limit, limit)
            shifts.append(shift)
        return Encoded(
            payload=self._packed(positions, sent, table.num_values),
            shifts=tuple(shifts),
            num_rounded=num_rounded,
            num_saturated=num_saturated,
        )

    def slice_bytes(self, num_values: int) -> int:
        """See ``SparseCodec.slice_bytes``."""
        num = self._num_sent(num_values)
        return -(-(position_bits(num, num_values) + num * self.bits) // 8)

    def decode_slice(self, payload: memoryview, num_values: int) -> Integers:
        """See ``SparseCodec.decode_slice``."""
        num, size = self._num_sent(num_values), self.slice_bytes(num_values)
        if len(payload) != size:
            raise InvalidUpdate(
                f"update: topk: got {len(payload)} bytes, expected {size} for a slice of {num_values} values",
                code="FN-0639",
            )
        bits = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little")
        first = position_bits(num, num_values)
        last = first + num * self.bits
        if bits[last:].any():
            raise InvalidUpdate(
                "update: topk: surplus bits after the values of a slice, expected zeros; encode it again", code=CODE
            )
        sent = bits_integers(bits[first:last], self.bits, num)
        values = np.zeros(num_values, np.int8)
        values[decode_positions(bits[:first], num, num_values)] = sent - ((sent >> (self.bits - 1)) << self.bits)
        return values

    def _num_sent(self, num_values: int) -> int:
        return math.ceil(self.fraction * num_values)

    def _chosen(self, update: Float32s) -> Int64s:
        """Return the positions of the sent values, in rising order."""
        chosen = [np.empty(0, np.int64)]
        for first in range(0, update.size, SLICE_VALUES):
            magnitudes = np.abs(update[first : first + SLICE_VALUES])
            num = self._num_sent(magnitudes.size)
            # A value, unlike the places of equal values, is the same whatever the algorithm.
            least = np.partition(magnitudes, magnitudes.size - num)[magnitudes.size - num]
            above = magnitudes > least
            ties = np.flatnonzero(magnitudes == least)[: num - int(np.count_nonzero(above))]
            above[ties] = True
            chosen.append(first + np.flatnonzero(above))
        return np.concatenate(chosen)

    def _shift(self, values: Floats, exponent: int, max_shift: int) -> int:
        """Return the shift of a block by its sent values."""
        magnitudes = np.abs(values)
        steps = STEPS_OF_MEDIAN.get(self.bits)
        if steps is None:
            largest = float(np.ldexp(magnitudes.max(initial=0.0), -exponent))
            return smallest_shift(largest, largest_value(self.bits), max_shift)
        nonzero = np.sort(magnitudes[magnitudes > 0])
        if not nonzero.size:
            return 0
        step = math.frexp(float(nonzero[nonzero.size // 2]) / steps)[1] - 1
        return min(max(step - exponent, 0), max_shift)

    def _packed(self, positions: Int64s, sent: Integers, num_values: int) -> bytes:
        """Return the payload of values at positions in rising order."""
        starts = range(0, num_values, SLICE_VALUES)
        cuts = np.searchsorted(positions, [*starts, num_values]).tolist()
        parts = []
        for start, (first, last) in zip(starts, pairwise(cuts), strict=True):
            size = min(SLICE_VALUES, num_values - start)
            bits = (encode_positions(positions[first:last] - start, size), integer_bits(sent[first:last], self.bits))
            parts.append(np.packbits(np.concatenate(bits), bitorder="little").tobytes())
        return b"".join(parts)


def _rounded(scaled: Floats, rng: np.random.Generator) -> Floats:
    """Round by chance from 1 on, and to the nearest below."""
    magnitude = np.abs(scaled)
    below = np.floor(magnitude)
    threshold = np.where(below > 0, rng.random(magnitude.size), 0.5)
    outcome: Floats = np.copysign(below + (threshold < magnitude - below), scaled)
    return outcome


def topk(
    *,
    fraction: Annotated[float, Key(text="The share of the values of each slice that is sent.", above=0, at_most=1)],
    bits: Annotated[int, Key(text="Bits of a sent value: 8, 4 or 2.", at_least=2, at_most=8)] = 8,
) -> TopK:
    """Return the codec ``topk``. Raises InvalidPlan for another number of bits than 2, 4 or 8."""
    if bits not in VALUE_BITS:
        raise InvalidPlan(f"plan: codec.options.bits: got {bits}, expected 2, 4 or 8; correct it", code="FN-0216")
    return TopK(fraction=fraction, bits=bits)

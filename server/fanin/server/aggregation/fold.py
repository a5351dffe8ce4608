"""The fold: an integer sum of Updates, exact in any order.

    sum += weight * (q << shift)        int64, per value

Integer addition is associative and commutative, so any order, interleaving or tree of partial sums is bit-identical.
The sum cannot overflow: Plan validation ensures |sum| < 2^62 (``protos.plans``).

An Update has a weight for each block, because the groups of a vector have weightings of their own
(``edge.codecs.vector``). The table is that of the complete vector, and its groups are further blocks.

An Update made for an earlier Round is on that Round's grid. A shift moves it to the grid of this Round. A shift below
zero rounds the values. A shift beyond the Plan's limit clips the largest values. Both are pure functions of the Update
alone, so the order still does not matter.

Laws (tests/laws): ``accept`` gives the same sum in any order. ``merge`` is associative and commutative, with ``begin``
as its zero.

``accept`` checks shifts and weight before it changes the sum. The length of streamed values is known only at the end:
after such an error the caller discards the sum.

``begin`` creates a sum, ``accept`` and ``merge`` add to their first argument in place and return it, and ``finish``
reads it. A model of 2 GB has a sum of 4 GB, so there is only one copy.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from fanin.edge.codecs.fixed import Integers
from fanin.edge.codecs.grid import Reaches, largest_magnitude, no_reaches, reach_column
from fanin.edge.rings import Adjustment
from fanin.edge.tensors import Float64s, Int64s, TensorTable
from fanin.protos.messages import SATURATED, RangeCounts
from fanin.server.aggregation.statistics import tail_counts

T = TypeVar("T")
MAX_SHIFT: Final = 62
"""Largest shift of an int64. It shifts out every bit of a 32-bit value."""
SCRATCH_VALUES: Final = 1 << 16
"""Values that are weighted and added at a time. One buffer of 512 KiB is reused for all values of an Update and stays
in the CPU cache between the two steps. Fewer values take longer, because the calls then outweigh the work."""


@dataclass(slots=True, kw_only=True)
class PartialSum:
    """The sum of some Updates.

    Attributes:
        values: Sums of the weighted values, an array of shape (num_values,).
        reaches: For each block, the number of Updates with each reach (``edge.codecs.grid``).
        total_weights: Sums of the fresh weights, for each block (num_blocks,).
        num_updates: Number of Updates.
        counts: Sums of the statistics, by name.
        tail: Sum of the tails of masked Updates; empty without them.
    """

    values: Int64s
    reaches: Reaches
    total_weights: Int64s
    num_updates: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    tail: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One Update, ready to be added.

    Attributes:
        weights: Factor of the values, for each block; at least 1.
        fresh_weights: The weights that a fresh Update would have. The mean of a block divides by the sum of these.
        shifts: The shift of each block.
        bits: Bits of an encoded value, including the sign.
        max_shift: Largest shift for which the Plan reserves headroom.
        counts: The statistics, by name.
        pieces: The encoded values (num_values,) in consecutive slices of any length.
        staleness: Versions between the Update's base Version and the one of the Round.
        read: Returns the encoded values from a first to a last position (exclusive), after ``pieces`` was read. Column
            rules need it; None for a sum alone.
        ranges: The ranges of the activations on the device's examples.
        tail: The tail of a masked Update, known once ``pieces`` was read; None for any other one. Its values move no
            grid: they are random.
    """

    weights: tuple[int, ...]
    fresh_weights: tuple[int, ...]
    shifts: tuple[int, ...]
    bits: int
    max_shift: int
    counts: Mapping[str, int]
    pieces: Iterable[Integers]
    staleness: int = 0
    read: Callable[[int, int], Integers] | None = None
    ranges: RangeCounts = field(default_factory=RangeCounts)
    tail: Int64s | None = None


def begin(table: TensorTable) -> PartialSum:
    """Return the sum of no Updates."""
    return PartialSum(
        values=np.zeros(table.num_values, np.int64),
        reaches=no_reaches(table),
        total_weights=np.zeros(len(table.specs), np.int64),
    )


def accept(state: PartialSum, table: TensorTable, update: Contribution) -> PartialSum:
    """Add one Update to a sum, in place.

    The result does not depend on the order of the calls.

    Args:
        state: The sum to add to.
        table: The layout of the values. A block is one tensor.
        update: The Update. The caller has validated its header and payload.

    Returns:
        ``state``.

    Raises:
        ValueError: The number of shifts or values, or a weight is wrong. ``state`` is unchanged, unless
            ``update.pieces`` is a stream: its length is known only at its end, and ``state`` must then be discarded.
    """
    addition = Addition(state, table, update)
    if isinstance(update.pieces, Sequence):
        _check_length(sum(piece.size for piece in update.pieces), table)
    for piece in update.pieces:
        addition.add(piece)
    return addition.finish()


class Addition:
    """The addition of one Update whose values are passed to ``add``: ``update.pieces`` is not read. See ``accept``."""

    def __init__(self, state: PartialSum, table: TensorTable, update: Contribution) -> None:
        if len(update.shifts) != len(table.specs):
            raise ValueError(f"shifts: got {len(update.shifts)}, expected {len(table.specs)}")
        if not len(update.weights) == len(update.fresh_weights) == len(table.specs):
            raise ValueError(f"weights: got {len(update.weights)}, expected {len(table.specs)}")
        for weight, fresh_weight in zip(update.weights, update.fresh_weights, strict=True):
            if not 1 <= weight <= fresh_weight:
                raise ValueError(
                    f"weight: got {weight} of {fresh_weight}, expected at least 1 and at most the second number, the "
                    "weight without staleness"
                )
        self._state, self._table, self._update = state, table, update
        self._position, self._num_clipped = 0, 0
        self._largest = [0] * len(table.specs)
        self._scratch = np.empty(min(SCRATCH_VALUES, table.num_values), np.int64)

    def add(self, piece: Integers) -> None:
        """Add the next encoded values."""
        position, largest = self._position, self._largest
        for start, stop, block in blocks_within(self._table, range(len(largest)), position, position + piece.size):
            for first in range(start, stop, SCRATCH_VALUES):
                last = min(first + SCRATCH_VALUES, stop)
                encoded = piece[first - position : last - position]
                largest[block] = max(largest[block], largest_magnitude(encoded))
                weighted = self._scratch[: last - first]
                self._num_clipped += _weigh(encoded, self._update, block, weighted)
                values = self._state.values[first:last]
                np.add(values, weighted, out=values)
        self._position += piece.size

    def finish(self) -> PartialSum:
        """Add the other facts of the Update, and return the sum. Raises ValueError for a wrong number of values."""
        state, update = self._state, self._update
        _check_length(self._position, self._table)
        if update.tail is not None:
            state.tail = update.tail + (state.tail if state.tail.size else 0)
        for block, shift in enumerate(update.shifts if update.tail is None else ()):
            state.reaches[block, reach_column(self._largest[block], shift)] += 1
        state.total_weights += np.array(update.fresh_weights, np.int64)
        state.num_updates += 1
        state.counts.update(update.counts)
        if self._num_clipped:
            state.counts[SATURATED] += self._num_clipped
        return state


class KeptUpdates:
    """Updates that are read again after the last one, by rules that are no sum.

    Args:
        table: The layout of the values.

    Attributes:
        reaches: For each block, the number of Updates with each reach.
        counts: Sums of the statistics, by name.
        updates: The Updates by device.
    """

    def __init__(self, table: TensorTable) -> None:
        self._table = table
        self.reaches = no_reaches(table)
        self.counts = Counter[str]()
        self.updates: dict[str, Contribution] = {}

    def add(self, device: str, update: Contribution) -> None:
        """Measure the reach of an Update. This also reads its payload once, which verifies it."""
        table, position = self._table, 0
        largest = [0] * len(table.specs)
        for piece in update.pieces:
            for start, stop, block in blocks_within(table, range(len(largest)), position, position + piece.size):
                largest[block] = max(largest[block], largest_magnitude(piece[start - position : stop - position]))
            position += piece.size
        if position != table.num_values or len(update.shifts) != len(table.specs):
            raise ValueError(f"update: got {position} values, {len(update.shifts)} shifts, expected those of the table")
        for block, shift in enumerate(update.shifts):
            if not 0 <= shift <= update.max_shift:
                raise ValueError(f"update: got shift {shift}, expected 0 to {update.max_shift}")
            self.reaches[block, reach_column(largest[block], shift)] += 1
        self.counts.update(update.counts)
        self.updates[device] = update


class RangeSum:
    """The sum of the counts of ranges over Updates: of integers, so it is exact in any order.

    It grows with the largest number of a cell, which the coordinator has checked before.
    """

    def __init__(self) -> None:
        self._sums: Int64s = np.zeros(0, np.int64)

    def add(self, ranges: RangeCounts) -> None:
        """Add the counts of one Update."""
        if ranges.cells:
            missing = ranges.cells[-1] + 1 - self._sums.size
            if missing > 0:
                self._sums = np.pad(self._sums, (0, missing))
            # A cell is there once.
            self._sums[np.array(ranges.cells)] += np.array(ranges.counts)

    def counts(self, num_cells: int) -> Int64s:
        """Return the sums of all cells (num_cells,)."""
        return np.pad(self._sums, (0, num_cells - self._sums.size))


def adjust(state: PartialSum, adjustment: Adjustment) -> None:
    """Apply an adjustment to a complete sum, in place and in slices.

    Integer addition wraps modulo 2^64, and the size of each ring divides it. So the result does not depend on the order
    of the Updates.
    """
    values, size = state.values, state.values.size
    for first in range(0, size, SCRATCH_VALUES):
        part = values[first : min(first + SCRATCH_VALUES, size)]
        if adjustment.correction is not None:
            part += adjustment.correction(first, first + part.size)
        if adjustment.ring is not None:
            part[:] = adjustment.ring.reduce(part)
    if adjustment.denominator is not None:
        state.total_weights[:] = adjustment.denominator
        # A sum of no Updates has noise, too.
        state.num_updates = max(state.num_updates, 1)
        # The reaches are facts about single Updates.
        state.reaches[:] = 0
    if adjustment.tail:
        if not state.tail.size:
            # There are no Updates, and the noise alone is released.
            state.tail = np.zeros(len(adjustment.tail), np.int64)
        if adjustment.correction is not None:
            state.tail += adjustment.correction(size, size + state.tail.size)
        state.counts = Counter(tail_counts(adjustment.tail, state.tail.tolist()))
        if adjustment.denominator is None:
            state.total_weights[:] = state.tail[0]


def merge(left: PartialSum, right: PartialSum) -> PartialSum:
    """Add ``right`` to ``left``, in place. Return ``left``."""
    if left.values.shape != right.values.shape:
        raise ValueError(f"merge: got {right.values.shape} values, expected {left.values.shape}")
    left.values += right.values
    left.reaches += right.reaches
    left.total_weights += right.total_weights
    left.num_updates += right.num_updates
    left.counts.update(right.counts)
    return left


def finish(state: PartialSum, table: TensorTable, grid: Sequence[int], part: tuple[int, int] | None = None) -> Float64s:
    """Return the weighted mean update: sum * step / total fresh weight of the block, in float64.

    Each operation is one IEEE 754 rounding, so the result is bit-identical on every machine and for every ``part``.

    Args:
        state: The sum.
        table: The layout of the values.
        grid: An exponent for each block.
        part: The first and the last position (exclusive) of the values to compute; by default all.

    Returns:
        An array of shape (num_values,), or of the length of ``part``.

    Raises:
        ValueError: The sum has no Updates.
    """
    if not state.num_updates:
        raise ValueError("finish: got no updates, expected at least one")
    first, last = part or (0, table.num_values)
    mean = state.values[first:last].astype(np.float64)
    for start, stop, number in blocks_within(table, range(len(grid)), first, last):
        block = mean[start - first : stop - first]
        np.ldexp(block, grid[number], out=block)
        block /= float(state.total_weights[number])
    return mean


def _weigh(encoded: Integers, update: Contribution, block: int, out: Int64s) -> int:
    """Write values of a block, on the Round's grid and times the weight, to ``out``. Return how many were clipped."""
    shift, weight = update.shifts[block], update.weights[block]
    if 0 <= shift <= update.max_shift:
        np.multiply(encoded, weight << shift, out=out, dtype=np.int64)
        return 0
    moved, num_clipped = _moved(encoded.astype(np.int64), shift, 1 << (update.bits - 1 + update.max_shift))
    np.multiply(moved, weight, out=out)
    return num_clipped


def _moved(values: Int64s, shift: int, limit: int) -> tuple[Int64s, int]:
    """Return values on another grid, halves rounded to even, and the number of values clipped to ``limit``."""
    if shift < 0:
        down = min(-shift, MAX_SHIFT)
        return (values + (1 << (down - 1)) - 1 + ((values >> down) & 1)) >> down, 0
    most = limit >> shift
    above, below = values > most, values < -most
    moved = np.clip(values, -most, most) << min(shift, MAX_SHIFT)
    moved[above], moved[below] = limit, -limit
    return moved, int(np.count_nonzero(above | below))


def blocks_within(table: TensorTable, per_block: Sequence[T], first: int, last: int) -> Iterator[tuple[int, int, T]]:
    """Yield (start, stop, value of ``per_block``) for each block, or part of a block, within [first, last)."""
    for spec, offset, value in zip(table.specs, table.offsets, per_block, strict=True):
        start, stop = max(first, offset), min(last, offset + spec.num_values)
        if start < stop:
            yield start, stop, value


def _check_length(num_values: int, table: TensorTable) -> None:
    if num_values != table.num_values:
        raise ValueError(f"update: got {num_values} values, expected {table.num_values}")

"""The fold: an integer sum of Updates, exact whatever the order.

    sum += weight * (q << shift)        int64, per value

Integer addition is associative and commutative, so any order, interleaving or tree of partial sums gives the
same bits. It cannot overflow: Plan validation holds |sum| < 2^62 (``protos.plans``).

An Update that was made for an earlier Round lies on that Round's grid. It is brought to this one's by a shift that
may be below zero, and then rounds, or beyond what the Plan allows, and then its largest values are cut: each a pure
function of the Update alone, so the order still does not matter.

Laws (tests/laws): accept in any order is the same; merge is associative and commutative with ``begin`` as
zero; accept raises before it changes anything.

``begin`` makes a sum, ``accept`` and ``merge`` add to the left one in place and hand it back (a model of 2 GB
has a sum of 4 GB; one is enough), ``finish`` reads it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fanin.edge.codecs.fixed import Integers
from fanin.edge.codecs.grid import Reaches, largest_magnitude, no_reaches, reach_column
from fanin.edge.tensors import Float64s, Int64s, TensorTable
from fanin.protos.messages import SATURATED

MAX_SHIFT: Final = 62
"""What an int64 can be shifted by; no value of 32 bits outlives it."""
SCRATCH_VALUES: Final = 1 << 16
"""Values that are weighted and added at a time. Their 512 KiB of int64 are one buffer for a whole Update, and stay in a
processor's cache between the two steps. Fewer values take longer: the calls then outweigh the work."""


@dataclass(slots=True, kw_only=True)
class PartialSum:
    """The sum of some Updates: weighted values (num_values,), total fresh weight, plain sums of the statistics, and how
    many Updates had each reach (``edge.grid``)."""

    values: Int64s
    reaches: Reaches
    total_weight: int = 0
    num_updates: int = 0
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One Update as the fold sees it.

    ``weight`` multiplies the values, the sum of ``fresh_weight`` divides them: what it would weigh were it not stale.
    ``shifts`` has one entry a block; the Plan's headroom is for values of ``bits``, sign included, and shifts from 0 to
    ``max_shift``. ``pieces`` are the encoded values (num_values,) in consecutive pieces of any length.
    """

    weight: int
    fresh_weight: int
    shifts: tuple[int, ...]
    bits: int
    max_shift: int
    counts: Mapping[str, int]
    pieces: Iterable[Integers]


def begin(table: TensorTable) -> PartialSum:
    """The sum of nothing."""
    return PartialSum(values=np.zeros(table.num_values, np.int64), reaches=no_reaches(table))


def accept(state: PartialSum, table: TensorTable, update: Contribution) -> PartialSum:
    """Add one Update.

    The caller has validated it: a payload of another length raises ValueError before anything is changed
    only if its pieces are a sequence; of a stream the length is known from its commit.
    """
    if len(update.shifts) != len(table.specs):
        raise ValueError(f"shifts: got {len(update.shifts)}, expected {len(table.specs)}")
    if not 1 <= update.weight <= update.fresh_weight:
        raise ValueError(f"weight: got {update.weight}, expected 1 to {update.fresh_weight}")
    if isinstance(update.pieces, Sequence):
        _check_length(sum(piece.size for piece in update.pieces), table)
    position, num_cut = 0, 0
    largest = [0] * len(table.specs)
    scratch = np.empty(min(SCRATCH_VALUES, table.num_values), np.int64)
    for piece in update.pieces:
        for start, stop, block in blocks_within(table, range(len(largest)), position, position + piece.size):
            for first in range(start, stop, SCRATCH_VALUES):
                last = min(first + SCRATCH_VALUES, stop)
                encoded = piece[first - position : last - position]
                largest[block] = max(largest[block], largest_magnitude(encoded))
                weighted = scratch[: last - first]
                num_cut += _weigh(encoded, update, update.shifts[block], weighted)
                values = state.values[first:last]
                np.add(values, weighted, out=values)
        position += piece.size
    _check_length(position, table)
    for block, shift in enumerate(update.shifts):
        state.reaches[block, reach_column(largest[block], shift)] += 1
    state.total_weight += update.fresh_weight
    state.num_updates += 1
    state.counts.update(update.counts)
    if num_cut:
        state.counts[SATURATED] += num_cut
    return state


def merge(left: PartialSum, right: PartialSum) -> PartialSum:
    """Add a partial sum to another one."""
    if left.values.shape != right.values.shape:
        raise ValueError(f"merge: got {right.values.shape} values, expected {left.values.shape}")
    left.values += right.values
    left.reaches += right.reaches
    left.total_weight += right.total_weight
    left.num_updates += right.num_updates
    left.counts.update(right.counts)
    return left


def finish(state: PartialSum, table: TensorTable, grid: Sequence[int]) -> Float64s:
    """The weighted mean update (num_values,): sum * step / total fresh weight, in float64."""
    return finish_part(state, table, grid, (0, table.num_values))


def finish_part(state: PartialSum, table: TensorTable, grid: Sequence[int], part: tuple[int, int]) -> Float64s:
    """The values from part[0] to part[1] of the weighted mean.

    Each operation is one IEEE 754 rounding, so the result is the same on every machine, however it is cut.
    """
    if not state.total_weight:
        raise ValueError("finish: got no updates, expected at least one")
    first, last = part
    mean = state.values[first:last].astype(np.float64)
    for start, stop, exponent in blocks_within(table, grid, first, last):
        block = mean[start - first : stop - first]
        np.ldexp(block, exponent, out=block)
    mean /= float(state.total_weight)
    return mean


def _weigh(encoded: Integers, update: Contribution, shift: int, out: Int64s) -> int:
    """Write encoded values (num_values,) times the Update's weight on the Round's grid; returns how many were cut."""
    if 0 <= shift <= update.max_shift:
        np.multiply(encoded, update.weight << shift, out=out, dtype=np.int64)
        return 0
    moved, num_cut = _moved(encoded.astype(np.int64), shift, 1 << (update.bits - 1 + update.max_shift))
    np.multiply(moved, update.weight, out=out)
    return num_cut


def _moved(values: Int64s, shift: int, limit: int) -> tuple[Int64s, int]:
    """Values on another grid, halves rounded to even, and how many were cut to ``limit``."""
    if shift < 0:
        down = min(-shift, MAX_SHIFT)
        return (values + (1 << (down - 1)) - 1 + ((values >> down) & 1)) >> down, 0
    most = limit >> shift
    above, below = values > most, values < -most
    moved = np.clip(values, -most, most) << min(shift, MAX_SHIFT)
    moved[above], moved[below] = limit, -limit
    return moved, int(np.count_nonzero(above | below))


def blocks_within(table: TensorTable, shifts: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, shift) of the parts of blocks that lie in [first, last)."""
    for spec, offset, shift in zip(table.specs, table.offsets, shifts, strict=True):
        start, stop = max(first, offset), min(last, offset + spec.num_values)
        if start < stop:
            yield start, stop, shift


def _check_length(got: int, table: TensorTable) -> None:
    if got != table.num_values:
        raise ValueError(f"update: got {got} values, expected {table.num_values}")

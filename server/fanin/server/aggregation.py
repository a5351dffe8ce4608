"""The fold: an integer sum of Updates, exact whatever the order.

    sum += weight * (q << shift)        int64, per value

Integer addition is associative and commutative, so any order, interleaving or tree of partial sums gives the
same bits. It cannot overflow: Plan validation holds |sum| < 2^62 (``protos.plans``).

Laws (tests/laws): accept in any order is the same; merge is associative and commutative with ``begin`` as
zero; accept raises before it changes anything.

``begin`` makes a sum, ``accept`` and ``merge`` add to the left one in place and hand it back (a model of 2 GB
has a sum of 4 GB; one is enough), ``finish`` reads it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fanin.edge.codecs import Integers
from fanin.edge.tensors import TensorTable

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class PartialSum:
    """The sum of some Updates: weighted values (num_values,), total weight, plain sums of the statistics."""

    values: Int64s
    total_weight: int = 0
    num_updates: int = 0
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One Update as the fold sees it.

    ``weight`` multiplies the values and is what FedAvg divides by the sum of; ``shifts`` has one entry a block.
    ``pieces`` are the encoded values (num_values,) in consecutive pieces of any length.
    """

    weight: int
    shifts: tuple[int, ...]
    counts: Mapping[str, int]
    pieces: Iterable[Integers]


def begin(table: TensorTable) -> PartialSum:
    """The sum of nothing."""
    return PartialSum(values=np.zeros(table.num_values, np.int64))


def accept(state: PartialSum, table: TensorTable, update: Contribution) -> PartialSum:
    """Add one Update.

    The caller has validated it: a payload of another length raises ValueError before anything is changed
    only if its pieces are a sequence; of a stream the length is known from its commit.
    """
    if len(update.shifts) != len(table.specs):
        raise ValueError(f"shifts: got {len(update.shifts)}, expected {len(table.specs)}")
    if update.weight < 1:
        raise ValueError(f"weight: got {update.weight}, expected at least 1")
    if isinstance(update.pieces, Sequence):
        _check_length(sum(piece.size for piece in update.pieces), table)
    position = 0
    for piece in update.pieces:
        for start, stop, shift in _blocks_within(table, update.shifts, position, position + piece.size):
            values = state.values[start:stop]
            values += piece[start - position : stop - position].astype(np.int64) * (update.weight << shift)
        position += piece.size
    _check_length(position, table)
    state.total_weight += update.weight
    state.num_updates += 1
    state.counts.update(update.counts)
    return state


def merge(left: PartialSum, right: PartialSum) -> PartialSum:
    """Add a partial sum to another one."""
    if left.values.shape != right.values.shape:
        raise ValueError(f"merge: got {right.values.shape} values, expected {left.values.shape}")
    left.values += right.values
    left.total_weight += right.total_weight
    left.num_updates += right.num_updates
    left.counts.update(right.counts)
    return left


def finish(state: PartialSum, table: TensorTable, grid: Sequence[int]) -> Float64s:
    """The weighted mean update (num_values,): sum * step / total weight, in float64.

    Each operation is one IEEE 754 rounding, so the result is the same on every machine.
    """
    if not state.total_weight:
        raise ValueError("finish: got no updates, expected at least one")
    mean = state.values.astype(np.float64)
    for spec, start, exponent in zip(table.specs, table.offsets, grid, strict=True):
        block = mean[start : start + spec.num_values]
        np.ldexp(block, exponent, out=block)
    mean /= float(state.total_weight)
    return mean


def _blocks_within(table: TensorTable, shifts: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, shift) of the parts of blocks that lie in [first, last)."""
    for spec, offset, shift in zip(table.specs, table.offsets, shifts, strict=True):
        start, stop = max(first, offset), min(last, offset + spec.num_values)
        if start < stop:
            yield start, stop, shift


def _check_length(got: int, table: TensorTable) -> None:
    if got != table.num_values:
        raise ValueError(f"update: got {got} values, expected {table.num_values}")

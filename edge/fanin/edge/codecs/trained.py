"""The two parts of a vector: the trained parameters, and the statistics and counters between them.

Rules, outer optimizers and stages work on the trained values alone. They see these without gaps, as a shorter vector
with a table of its own, and need no code for roles. The averaged values bypass them. The sums of a statistics Run are
trained values: its rule sums them up.

    vector   [a: parameter] [b: statistic] [c: parameter] [d: counter]
    trained  [a] [c]
    averaged [b] [d]
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fanin.edge.tensors import TensorTable
from fanin.protos.roles import RoleKind

T = TypeVar("T")
Numbers = TypeVar("Numbers", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive values of one part: from ``first`` to ``last`` (exclusive) in the vector.

    ``offset`` is the number of values of the same part before them.
    """

    first: int
    last: int
    is_trained: bool
    offset: int


class TrainedPart:
    """The trained values of a vector, by the roles of its table.

    Args:
        table: The layout of the vector.
    """

    def __init__(self, table: TensorTable) -> None:
        self._is_trained = tuple(spec.role.role in (RoleKind.PARAMETER, RoleKind.SUM) for spec in table.specs)
        self.trained = TensorTable(tuple(self.of_trained(table.specs)))
        self.averaged = TensorTable(tuple(self.of_averaged(table.specs)))
        self._runs = tuple(_runs(table, self._is_trained))
        self._firsts = [run.first for run in self._runs]
        self._trained_runs = [run for run in self._runs if run.is_trained]
        self._num_values = table.num_values

    @property
    def is_all(self) -> bool:
        """Whether all values are trained."""
        return all(self._is_trained)

    def of_trained(self, per_block: Sequence[T]) -> tuple[T, ...]:
        """Return the items of the trained blocks."""
        return tuple(each for each, is_ours in zip(per_block, self._is_trained, strict=True) if is_ours)

    def of_averaged(self, per_block: Sequence[T]) -> tuple[T, ...]:
        """Return the items of the other blocks."""
        return tuple(each for each, is_ours in zip(per_block, self._is_trained, strict=True) if not is_ours)

    def per_block(self, averaged: Sequence[T], trained: T) -> tuple[T, ...]:
        """Return an item for each block: ``trained``, and the items of the other blocks in order."""
        items = iter(averaged)
        return tuple(trained if is_trained else next(items) for is_trained in self._is_trained)

    def merge(self, trained: npt.NDArray[Numbers], averaged: npt.NDArray[Numbers]) -> npt.NDArray[Numbers]:
        """Return one array with a row for each block (num_blocks, ...), from those of both parts."""
        rows = np.empty((len(self._is_trained), *trained.shape[1:]), trained.dtype)
        is_trained = np.array(self._is_trained, np.bool_)
        rows[is_trained], rows[~is_trained] = trained, averaged
        return rows

    def within(self, first: int, last: int) -> Iterator[tuple[slice, bool]]:
        """Yield the runs within [first, last): positions relative to ``first``, and whether they are trained."""
        for run in self._runs[max(bisect_right(self._firsts, first) - 1, 0) :]:
            if run.first >= last:
                return
            start, stop = max(run.first, first), min(run.last, last)
            if start < stop:
                yield slice(start - first, stop - first), run.is_trained

    def split(self, values: npt.NDArray[Numbers], first: int) -> tuple[npt.NDArray[Numbers], npt.NDArray[Numbers]]:
        """Return the trained and the averaged values of a slice of the vector that begins at ``first``."""
        parts: dict[bool, list[npt.NDArray[Numbers]]] = {True: [], False: []}
        for span, is_trained in self.within(first, first + values.size):
            parts[is_trained].append(values[span])
        return _joined(parts[True], values), _joined(parts[False], values)

    def join(self, trained: npt.NDArray[Numbers], averaged: npt.NDArray[Numbers], first: int) -> npt.NDArray[Numbers]:
        """Return the slice of the vector that begins at ``first``: undo ``split``."""
        if not averaged.size:
            return trained
        values = np.empty(trained.size + averaged.size, trained.dtype)
        positions = {True: 0, False: 0}
        for span, is_trained in self.within(first, first + values.size):
            source, position = trained if is_trained else averaged, positions[is_trained]
            positions[is_trained] = position + span.stop - span.start
            values[span] = source[position : positions[is_trained]]
        return values

    def rank(self, position: int) -> int:
        """Return the number of trained values before a position of the vector."""
        index = bisect_right(self._firsts, position) - 1
        if index < 0:
            return 0
        run = self._runs[index]
        if run.is_trained:
            return run.offset + min(position, run.last) - run.first
        return run.first - run.offset

    def position(self, rank: int) -> int:
        """Return the position in the vector of a trained value, by the number of trained values before it."""
        index = bisect_right([run.offset for run in self._trained_runs], rank) - 1
        run = self._trained_runs[index]
        return run.first + rank - run.offset


def _runs(table: TensorTable, is_trained: Sequence[bool]) -> Iterator[Run]:
    sizes = [spec.num_values for spec in table.specs]
    ends = list(accumulate(sizes))
    offsets = {True: 0, False: 0}
    blocks = (block for block in range(len(sizes)) if sizes[block])
    for kind, group in groupby(blocks, key=lambda block: is_trained[block]):
        members = list(group)
        first, last = ends[members[0]] - sizes[members[0]], ends[members[-1]]
        yield Run(first=first, last=last, is_trained=kind, offset=offsets[kind])
        offsets[kind] += last - first


def _joined(parts: list[npt.NDArray[Numbers]], like: npt.NDArray[Numbers]) -> npt.NDArray[Numbers]:
    """Return the parts end to end. A single part is no copy."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else like[:0]

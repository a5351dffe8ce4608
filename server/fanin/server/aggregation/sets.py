"""The fold of a closed set of Updates by the rule of the Plan. The coordinator and ``fanin verify`` use the same fold.

A sum needs each Update once, so the coordinator adds an Update right after its commit. A column rule needs all Updates
side by side. It reads them again in slices, so that its memory does not grow with the model. The values of a slice need
``COLUMN_BYTES``, for any number of Updates.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fanin.edge.codecs.fixed import Integers
from fanin.edge.codecs.grid import Reaches, largest_magnitude, no_reaches, reach_column
from fanin.edge.tensors import Float64s, Int64s, TensorTable
from fanin.server.aggregation.checked import CheckedColumnRule, CheckedRule
from fanin.server.aggregation.fold import Contribution, blocks_within
from fanin.server.aggregation.rules import ColumnRule, Rule

COLUMN_BYTES: Final = 4 << 20
"""Bytes of the values that a column rule sees at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A committed Update, ready to be folded.

    Attributes:
        update: The Update, with its values as a stream.
        read: Returns the encoded values from a first to a last position (exclusive).
    """

    update: Contribution
    read: Callable[[int, int], Integers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """The result of a rule for a closed set of Updates.

    Attributes:
        part: Returns the change of the vector's values from a first to a last position (exclusive).
        reaches: The reaches of the Updates (``edge.codecs.grid``).
        counts: Sums of the statistics, by name.
    """

    part: Callable[[int, int], Float64s]
    reaches: Reaches
    counts: Mapping[str, int]


class SetFold:
    """The fold of one Round's Updates.

    Args:
        rule: The rule of the Plan.
        table: The layout of the vector: the blocks of all groups.
        grid: The Round's grid: an exponent for each block.
        source: Returns the Update of a device with a scale of the weights (``weights``).
        column_bytes: Bytes of the values that a column rule sees at a time. They change nothing in the result.
    """

    def __init__(
        self,
        rule: Rule | ColumnRule,
        table: TensorTable,
        grid: Sequence[int],
        source: Callable[[str, int], Submission],
        column_bytes: int = COLUMN_BYTES,
    ) -> None:
        self._rule = rule
        self._column_bytes = column_bytes
        self._table = table
        self._grid = grid
        self._source = source
        self._added: set[str] = set()
        # Begun with the first Update: the sum of the Round before may still be in memory until then.
        self._fold: _SumFold | _ColumnFold | None = None
        self._scale = 0

    @property
    def added(self) -> frozenset[str]:
        """The devices whose Updates are folded."""
        return frozenset(self._added)

    def add(self, device: str) -> None:
        """Fold the Update of a device, unless that was done before.

        Raises:
            Any error of ``source`` or of the rule. Half of the Update may be folded then, so the fold starts again:
            ``complete`` folds the Updates that are missing.
        """
        if device in self._added:
            return
        if self._fold is None:
            self._fold = self._begin()
        try:
            self._fold.add(device, self._source(device, self._scale))
        except BaseException:
            self.release()
            raise
        self._added.add(device)

    def weigh(self, scale: int) -> None:
        """Set the scale of the weights. If it changes, a sum starts again without Updates. Column rules have none."""
        if scale != self._scale:
            self._scale = scale
            if not isinstance(self._rule, ColumnRule):
                self.release()

    def complete(self, accepted: Sequence[str]) -> Aggregate:
        """Return the aggregate of exactly these devices' Updates. Raises like ``add``."""
        for device in accepted:
            self.add(device)
        assert self._fold is not None and self._added == set(accepted), f"folded {self._added}, expected {accepted}"
        return self._fold.aggregate(accepted)

    def release(self) -> None:
        """Free the memory of the fold. The next call folds the Updates again."""
        self._added, self._fold = set(), None

    def _begin(self) -> "_SumFold | _ColumnFold":
        if isinstance(self._rule, ColumnRule):
            return _ColumnFold(self._rule, self._table, self._grid, self._column_bytes)
        return _SumFold(self._rule, self._table, self._grid)


class _SumFold:
    def __init__(self, rule: Rule, table: TensorTable, grid: Sequence[int]) -> None:
        self._rule = CheckedRule(rule)
        self._table = table
        self._grid = grid
        self._sum = self._rule.begin(table)

    def add(self, _device: str, submission: Submission) -> None:
        self._sum = self._rule.accept(self._sum, self._table, submission.update)

    def aggregate(self, _accepted: Sequence[str]) -> Aggregate:
        def part(first: int, last: int) -> Float64s:
            return self._rule.finish(self._sum, self._table, self._grid, (first, last))

        return Aggregate(
            part=part,
            reaches=self._sum.reaches,
            counts=dict(self._sum.counts),
        )


class _ColumnFold:
    def __init__(self, rule: ColumnRule, table: TensorTable, grid: Sequence[int], column_bytes: int) -> None:
        self._rule = CheckedColumnRule(rule)
        self._column_bytes = column_bytes
        self._table = table
        self._grid = grid
        self._reaches = no_reaches(table)
        self._counts = Counter[str]()
        self._submissions: dict[str, Submission] = {}

    def add(self, device: str, submission: Submission) -> None:
        """Measure the reach of an Update. This also reads its payload once, which verifies it."""
        update, table, position = submission.update, self._table, 0
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
            self._reaches[block, reach_column(largest[block], shift)] += 1
        self._counts.update(update.counts)
        self._submissions[device] = submission

    def aggregate(self, accepted: Sequence[str]) -> Aggregate:
        submissions, rule = [self._submissions[device] for device in accepted], self._rule
        state = rule.begin(len(submissions))
        for number in range(rule.num_passes - 1):
            for first, last in self._parts(0, self._table.num_values, len(submissions)):
                state = rule.look(state, self._columns(submissions, first, last), number)

        def part(first: int, last: int) -> Float64s:
            mean = np.empty(last - first, np.float64)
            for start, stop in self._parts(first, last, len(submissions)):
                mean[start - first : stop - first] = rule.reduce(state, self._columns(submissions, start, stop))
            for start, stop, exponent in blocks_within(self._table, self._grid, first, last):
                block = mean[start - first : stop - first]
                np.ldexp(block, exponent, out=block)
            return mean

        return Aggregate(part=part, reaches=self._reaches, counts=dict(self._counts))

    def _parts(self, first: int, last: int, num_updates: int) -> Iterator[tuple[int, int]]:
        size = max(self._column_bytes // (8 * num_updates), 1)
        return ((start, min(start + size, last)) for start in range(first, last, size))

    def _columns(self, submissions: Sequence[Submission], first: int, last: int) -> Int64s:
        """Return the Updates' values from ``first`` to ``last``, in steps of the Round's grid (last - first, n)."""
        columns = np.empty((last - first, len(submissions)), np.int64)
        for index, one in enumerate(submissions):
            values = one.read(first, last)
            for start, stop, shift in blocks_within(self._table, one.update.shifts, first, last):
                rows = slice(start - first, stop - first)
                np.left_shift(values[rows], shift, out=columns[rows, index], dtype=np.int64)
        return columns

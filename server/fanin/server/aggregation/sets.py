"""The fold of a closed set of Updates by the rule of the Plan. The coordinator and ``fanin verify`` use the same fold.

A sum needs each Update once, so the coordinator adds an Update right after its commit. A column rule needs all Updates
side by side. It reads them again in slices, so that its memory does not grow with the model. The values of a slice need
``COLUMN_BYTES``, for any number of Updates. A strategy reads the Updates again one after another, as arrays.

A rule aggregates the trained parameters alone. Statistics and counters get the weighted mean under every rule: the
values of one device's statistics, chosen value by value, would fit no device's parameters.

    next value = sum(weight * (base + change)) / sum(weight)      base: of the Version that the device trained

It is a mean of the values of the devices, so it leaves no range that all of them keep. A mean of changes would not do
that: changes of stale Updates are relative to different Versions. The aggregate has the mean of the changes, and the
share of each earlier Version, whose values the outer step reads.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.codecs.fixed import Integers
from fanin.edge.codecs.grid import Reaches
from fanin.edge.codecs.trained import TrainedPart
from fanin.edge.rings import Adjustment
from fanin.edge.runtimes.evaluations import METRIC_UNIT, OF_TRAINING, OF_VALIDATION
from fanin.edge.tensors import Float32s, Float64s, Int64s, TensorTable
from fanin.protos.messages import EVAL_EXAMPLES, EXAMPLES
from fanin.server.aggregation import fold
from fanin.server.aggregation.fold import Contribution, KeptUpdates, RangeSum, blocks_within
from fanin.server.aggregation.robust import Columns
from fanin.server.aggregation.rules import (
    ColumnRule,
    DistanceRule,
    Metrics,
    Reply,
    Rule,
    StrategyResult,
    StrategyRule,
    StrategyTask,
    config_in,
)

SLICE_VALUES: Final = 1 << 18
"""Values of an Update that are decoded for a strategy at a time."""
COLUMN_BYTES: Final = 4 << 20
"""Bytes of the values that a column rule sees at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """The result of a rule for a closed set of Updates.

    Attributes:
        part: Returns the change of the vector's values from a first to a last position (exclusive).
        reaches: The reaches of the Updates (``edge.codecs.grid``).
        counts: Sums of the statistics, by name.
        shifts: The coarsest shift of an Update, for each block; at least 0.
        stale_shares: The share of the weights that stale Updates have, by staleness: one for each block of the
            statistics and counters. Empty without such blocks, or without such Updates.
        strategy: The result of a strategy, whose parameters ``part`` returns; None for a rule.
        ranges: The sum of the counts of ranges. Each Update counts, whatever the rule makes of its values.
        sums: Returns the adjusted integer sum from a first to a last position (exclusive); None without one.
        num_updates: Number of Updates.
    """

    part: Callable[[int, int], Float64s]
    reaches: Reaches
    counts: Mapping[str, int]
    shifts: Sequence[int]
    stale_shares: Mapping[int, Sequence[float]] = field(default_factory=lambda: MappingProxyType({}))
    strategy: StrategyResult | None = None
    ranges: RangeSum = field(default_factory=RangeSum)
    sums: Callable[[int, int], Int64s] | None = None
    num_updates: int = 0


class SetFold:
    """The fold of one Round's Updates.

    Args:
        rule: The rule of the Plan, or its strategy in this Round.
        table: The layout of the vector: the blocks of all groups.
        grid: The Round's grid: an exponent for each block.
        source: Returns the Update of a device with a scale of the weights (``weights``).
        column_bytes: Bytes of the values that a column rule sees at a time. They change nothing in the result.
    """

    def __init__(
        self,
        rule: Rule | ColumnRule | StrategyRule,
        table: TensorTable,
        grid: Sequence[int],
        source: Callable[[str, int], Contribution],
        column_bytes: int = COLUMN_BYTES,
    ) -> None:
        self._rule = rule
        self._column_bytes = column_bytes
        self._table = table
        self._grid = grid
        self._source = source
        self._trained = TrainedPart(table)
        self._added: set[str] = set()
        self._shifts: Int64s = np.zeros(len(table.specs), np.int64)
        # Begun with the first Update: the sum of the Round before may still be in memory until then.
        self._fold: _Fold | _DividedFold | None = None
        self._ranges = RangeSum()
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
        self._fold = self._fold or self._begin()
        try:
            update = self._source(device, self._scale)
            self._fold.add(device, update)
        except BaseException:
            self.release()
            raise
        self._shifts = np.maximum(self._shifts, np.array(update.shifts, np.int64))
        self._ranges.add(update.ranges)
        self._added.add(device)

    def weigh(self, scale: int) -> None:
        """Set the scale of the weights. If it changes, a sum starts again without Updates. Other rules have none."""
        if scale != self._scale:
            self._scale = scale
            if not isinstance(self._fold, _ColumnFold | _StrategyFold):
                self.release()

    def complete(self, accepted: Sequence[str], adjustment: Adjustment | None = None) -> Aggregate:
        """Return the aggregate of exactly these devices' Updates. Raises like ``add``.

        Args:
            accepted: The devices; none if the adjustment is noise.
            adjustment: What is added to their sum. Only a rule that is a sum may have one.
        """
        self._fold = self._fold or self._begin()
        for device in accepted:
            self.add(device)
        assert self._added == set(accepted), f"folded {self._added}, expected {accepted}"
        if adjustment is not None:
            assert isinstance(self._fold, _SumFold), "a protocol that adjusts the sum has a rule that is a sum"
            try:
                self._fold.adjust(adjustment)
            except BaseException:
                # Half of the sum may be adjusted.
                self.release()
                raise
        aggregate = self._fold.aggregate(accepted, tuple(self._shifts.tolist()))
        return replace(aggregate, ranges=self._ranges, num_updates=len(accepted))

    def release(self) -> None:
        """Free the memory of the fold. The next call folds the Updates again."""
        self._added, self._fold, self._shifts = set(), None, np.zeros_like(self._shifts)
        self._ranges = RangeSum()

    def _begin(self) -> "_Fold | _DividedFold":
        table, grid = self._trained.trained, self._trained.of_trained(self._grid)
        if isinstance(self._rule, StrategyRule):
            by_rule: _Fold = _StrategyFold(self._rule, table, grid)
        elif isinstance(self._rule, ColumnRule):
            by_rule = _ColumnFold(self._rule, table, grid, self._column_bytes)
        else:
            by_rule = _SumFold(self._rule, table, grid)
        return by_rule if self._trained.is_all else _DividedFold(by_rule, self._trained, self._grid)


class _SumFold:
    def __init__(self, rule: Rule, table: TensorTable, grid: Sequence[int]) -> None:
        self._rule = rule
        self._table = table
        self._grid = grid
        self._sum = self._rule.begin(table)
        self._is_adjusted = False

    def adjust(self, adjustment: Adjustment) -> None:
        """Adjust the complete sum, once."""
        if not self._is_adjusted:
            fold.adjust(self._sum, adjustment)
            self._is_adjusted = True

    def add(self, _device: str, update: Contribution) -> None:
        self._sum = self._rule.accept(self._sum, self._table, update)

    def aggregate(self, _accepted: Sequence[str], shifts: Sequence[int]) -> Aggregate:
        def part(first: int, last: int) -> Float64s:
            return self._rule.finish(self._sum, self._table, self._grid, (first, last))

        def sums(first: int, last: int) -> Int64s:
            return self._sum.values[first:last]

        reaches, counts = self._sum.reaches, dict(self._sum.counts)
        return Aggregate(part=part, reaches=reaches, counts=counts, shifts=shifts, sums=sums)


class _ColumnFold:
    def __init__(self, rule: ColumnRule, table: TensorTable, grid: Sequence[int], column_bytes: int) -> None:
        self._rule = rule
        self._column_bytes = column_bytes
        self._table = table
        self._grid = grid
        self._kept = KeptUpdates(table)

    def add(self, device: str, update: Contribution) -> None:
        self._kept.add(device, update)

    def aggregate(self, accepted: Sequence[str], shifts: Sequence[int]) -> Aggregate:
        """See ``SetFold.complete``. The columns are in the order of the devices' ids, whatever the order of uploads."""
        kept, rule = self._kept, self._rule
        columns = Columns([kept.updates[device] for device in sorted(accepted)], self._table, self._column_bytes)
        state = rule.begin(len(accepted))
        if isinstance(rule, DistanceRule):
            state = rule.measure(state, columns.squared_distances(self._grid))
        for number in range(rule.num_passes - 1):
            for _, _, values in columns.slices(0, self._table.num_values):
                state = rule.look(state, values, number)

        def part(first: int, last: int) -> Float64s:
            mean = np.empty(last - first, np.float64)
            for start, stop, values in columns.slices(first, last):
                mean[start - first : stop - first] = rule.reduce(state, values)
            for start, stop, exponent in blocks_within(self._table, self._grid, first, last):
                block = mean[start - first : stop - first]
                np.ldexp(block, exponent, out=block)
            return mean

        return Aggregate(part=part, reaches=kept.reaches, counts=dict(kept.counts), shifts=shifts)


class _StrategyFold:
    def __init__(self, rule: StrategyRule, table: TensorTable, grid: Sequence[int]) -> None:
        self._rule = rule
        self._table = table
        self._grid = grid
        self._kept = KeptUpdates(table)

    def add(self, device: str, update: Contribution) -> None:
        self._kept.add(device, update)

    def aggregate(self, accepted: Sequence[str], shifts: Sequence[int]) -> Aggregate:
        kept, result = self._kept, self._result(accepted)

        def part(first: int, last: int) -> Float64s:
            return result.parameters[first:last].astype(np.float64)

        return Aggregate(part=part, reaches=kept.reaches, counts=dict(kept.counts), shifts=shifts, strategy=result)

    def _result(self, accepted: Sequence[str]) -> StrategyResult:
        """Run the strategy over the Updates of these devices. Raises like ``StrategyRunner.run``.

        The replies are in the order of the devices' ids, so that the order of the uploads changes nothing.
        """
        rule, updates = self._rule, [self._kept.updates[device] for device in sorted(accepted)]
        base = np.empty(self._table.num_values, np.float32)
        part, position, stop = TrainedPart(rule.table), 0, 0
        for values in rule.base():
            trained, _ = part.split(values, position)
            base[stop : stop + trained.size] = trained
            position, stop = position + values.size, stop + trained.size
        task = StrategyTask(
            round=rule.round,
            config=config_in(rule.plan, rule.round),
            table=self._table,
            parameters=base,
            state=rule.state(),
            num_replies=len(updates),
            evaluations=() if rule.is_first else tuple(self._evaluations(updates)),
        )
        result = rule.runner.run(task, (self._reply(update, base) for update in updates))
        assert result.parameters.shape == base.shape, "a runner returns the parameters of the table"
        return result

    def _reply(self, update: Contribution, base: Float32s) -> Reply:
        assert update.read is not None, "an Update for a strategy can be read again"
        after = np.empty_like(base)
        exponents = [exponent + shift for exponent, shift in zip(self._grid, update.shifts, strict=True)]
        for first in range(0, base.size, SLICE_VALUES):
            last = min(first + SLICE_VALUES, base.size)
            change = update.read(first, last).astype(np.float64)
            for start, stop, exponent in blocks_within(self._table, exponents, first, last):
                block = change[start - first : stop - first]
                np.ldexp(block, exponent, out=block)
            # A value beyond float32 becomes infinite, and the strategy sees what the device would have sent.
            with np.errstate(over="ignore"):
                after[first:last] = base[first:last] + change
        return Reply(parameters=after, metrics=_metrics(update, OF_TRAINING, update.counts[EXAMPLES]))

    def _evaluations(self, updates: Sequence[Contribution]) -> Iterator[Metrics]:
        for update in updates:
            if num_examples := update.counts.get(EVAL_EXAMPLES, 0):
                yield _metrics(update, OF_VALIDATION, num_examples)


_Fold = _SumFold | _ColumnFold | _StrategyFold


class _DividedFold:
    """The fold of vectors with averaged blocks: the rule folds the trained values, and a sum the others."""

    def __init__(self, by_rule: _Fold, part: TrainedPart, grid: Sequence[int]) -> None:
        self._by_rule = by_rule
        self._part = part
        self._grid = part.of_averaged(grid)
        self._mean = fold.begin(part.averaged)
        # By staleness: the sum of the weights of each averaged block.
        self._stale_weights: dict[int, Int64s] = {}

    def add(self, device: str, update: Contribution) -> None:
        part = self._part
        # Divided by the sum of the weights themselves: a mean of values has no damping.
        ours = _of_blocks(replace(update, fresh_weights=update.weights), part.of_averaged, counts={})
        addition = fold.Addition(self._mean, part.averaged, ours)

        def pieces() -> Iterator[Integers]:
            position = 0
            for piece in update.pieces:
                trained, averaged = part.split(piece, position)
                addition.add(averaged)
                position += piece.size
                yield trained

        def read(first: int, last: int) -> Integers:
            assert update.read is not None, "an Update for a column rule can be read again"
            start, stop = part.position(first), part.position(last - 1) + 1
            return part.split(update.read(start, stop), start)[0]

        trained = replace(_of_blocks(update, part.of_trained, counts=update.counts), pieces=pieces(), read=read)
        self._by_rule.add(device, trained)
        addition.finish()
        if update.staleness:
            weights = self._stale_weights.setdefault(update.staleness, np.zeros(len(ours.weights), np.int64))
            weights += np.array(ours.weights, np.int64)

    def aggregate(self, accepted: Sequence[str], shifts: Sequence[int]) -> Aggregate:
        by_rule, part, mean = self._by_rule.aggregate(accepted, shifts), self._part, self._mean
        counts = Counter(by_rule.counts)
        counts.update(mean.counts)

        def merged(first: int, last: int) -> Float64s:
            start, stop = part.rank(first), part.rank(last)
            trained = by_rule.part(start, stop) if start < stop else np.empty(0, np.float64)
            averaged = fold.finish(mean, part.averaged, self._grid, (first - start, last - stop))
            return part.join(trained, averaged, first)

        return Aggregate(
            part=merged,
            reaches=part.merge(by_rule.reaches, mean.reaches),
            counts=dict(counts),
            shifts=shifts,
            stale_shares={
                staleness: (weights / mean.total_weights).tolist() for staleness, weights in self._stale_weights.items()
            },
            strategy=by_rule.strategy,
        )


def _of_blocks(
    update: Contribution, choose: Callable[[tuple[int, ...]], tuple[int, ...]], counts: Mapping[str, int]
) -> Contribution:
    """Return an Update of some of its blocks, without its values."""
    return replace(
        update,
        weights=choose(update.weights),
        fresh_weights=choose(update.fresh_weights),
        shifts=choose(update.shifts),
        counts=counts,
        pieces=(),
    )


def _metrics(update: Contribution, prefix: str, num_examples: int) -> Metrics:
    """Return the declared metrics of one message: the sums of an Update divided by its number of examples."""
    means = {
        name.removeprefix(prefix): count / METRIC_UNIT / num_examples
        for name, count in update.counts.items()
        if name.startswith(prefix)
    }
    return {"num-examples": num_examples, **means}

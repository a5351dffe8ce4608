"""The statistics in the parameters of a Version: exact integers, and what follows from them.

mean      low + step * sum u / n
variance  step^2 * (n sum u^2 - (sum u)^2) / n^2        of the population, as an exact fraction until the last rounding
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction

from fanin.edge.queries.brackets import Bracket, Counts, brackets_of, cell_count, counts_of
from fanin.edge.queries.digits import WITHHELD, join
from fanin.edge.queries.query import INSIDE, OUTSIDE, FeatureGroup, StatisticsQuery, tensor
from fanin.edge.tensors import Float32s


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantile:
    """A quantile: the value is from ``low`` to ``high``, and both are equal if it is exact.

    Attributes:
        quantile: Its number.
        low: The lowest value that it may have; None without values in the range, or if their number is withheld.
        high: The highest one.
        has_changed: Whether examples of a device changed before a later Version, so that it was narrowed no further.
    """

    quantile: float
    low: float | None
    high: float | None
    has_changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStatistics:
    """The statistics of one feature. A number that is withheld is None.

    Attributes:
        input: Its input.
        name: Its name.
        by: What a feature of the input is.
        devices: Devices with values in the range.
        count: Values in the range.
        sum_points: The sum of their points on the lattice, an exact integer.
        sum_squares: The sum of the squares of these.
        mean: Their mean.
        variance: Their variance.
        std: Its square root.
        below: Values below the range.
        above: Values above it.
        missing: Values that are no numbers.
        edges: The lowest value of each bin, and the highest one of the last bin.
        histogram: The number of values of each bin.
        quantiles: The quantiles.
    """

    input: str
    name: str
    by: str
    devices: int | None
    count: int | None
    sum_points: int | None
    sum_squares: int | None
    mean: float | None
    variance: float | None
    std: float | None
    below: int | None
    above: int | None
    missing: int | None
    edges: tuple[float, ...]
    histogram: tuple[int | None, ...]
    quantiles: tuple[Quantile, ...]

    @property
    def num_withheld(self) -> int:
        """Cells of this feature that are withheld."""
        return sum(each is None for each in (self.count, self.below, self.above, self.missing, *self.histogram))

    def row(self) -> dict[str, object]:
        """Return the statistics as an object of JSON."""
        return asdict(self)


def statistics_of(query: StatisticsQuery, parameters: Float32s) -> tuple[FeatureStatistics, ...]:
    """Return the statistics of all features.

    Args:
        query: The query of the Run's Bundle.
        parameters: The parameters of a Version of the Run (num_values,).
    """
    views = query.table.views(parameters)
    return tuple(
        _feature(query, index, row, views, brackets[row])
        for index, group in enumerate(query.groups)
        for brackets in [brackets_of(query, index, views)]
        for row in range(len(group.names))
    )


def _feature(
    query: StatisticsQuery, index: int, row: int, views: Mapping[str, Float32s], brackets: list[Bracket]
) -> FeatureStatistics:
    group, bits = query.groups[index], query.bits
    cell = views[tensor(index, INSIDE)][row]
    below, above, missing = counts_of(views[tensor(index, OUTSIDE)][row], bits)
    histogram: Counts = counts_of(views[tensor(index, group.histogram)][row], bits)[: group.num_parts]
    count_digits, sum_digits, _ = query.widths(group)
    is_withheld, has_sums = cell[0] == WITHHELD, WITHHELD not in (cell[0], cell[1 + count_digits])
    count = cell_count(cell[: 1 + count_digits], bits)
    points = join(cell[1 + count_digits : 1 + count_digits + sum_digits], bits) if has_sums else None
    squares = join(cell[1 + count_digits + sum_digits :], bits) if has_sums else None
    mean = variance = None
    if count and points is not None and squares is not None:
        mean = float(Fraction(group.low) + Fraction(group.step) * points / count)
        variance = float(Fraction(group.step) ** 2 * Fraction(count * squares - points * points, count * count))
    starts = [group.value(part * group.bin_width) for part in range(group.num_parts)]
    return FeatureStatistics(
        input=group.input,
        name=group.names[row],
        by=group.by,
        devices=None if is_withheld else int(cell[0]),
        count=count,
        sum_points=points,
        sum_squares=squares,
        mean=mean,
        variance=variance,
        std=None if variance is None else math.sqrt(max(variance, 0.0)),
        below=below,
        above=above,
        missing=missing,
        edges=(*starts, group.high),
        histogram=tuple(histogram),
        quantiles=tuple(map(_quantile, [group] * len(brackets), group.quantiles, brackets)),
    )


def _quantile(group: FeatureGroup, quantile: float, bracket: Bracket) -> Quantile:
    if bracket.count is None or not bracket.count:
        return Quantile(quantile=quantile, low=None, high=None)
    low, high = group.value(bracket.first), group.value(bracket.last - 1)
    return Quantile(quantile=quantile, low=low, high=high, has_changed=bracket.has_changed)

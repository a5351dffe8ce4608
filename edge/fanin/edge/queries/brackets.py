"""Brackets: the interval of the lattice that certainly has a quantile, from the counts of the Versions so far.

The q-quantile of n values in the range is the value of rank r = max(1, ceil(q n)) in rising order (numpy's
``inverted_cdf``). A Version has the counts of the parts of a bracket. Their sum is known, so the *hidden* count of all
withheld parts is known, too, and how they share it is not::

    lower(j) = published counts up to part j + the hidden count, if every withheld part is among them
    upper(j) = published counts up to part j + the hidden count, if any withheld part is among them

The quantile is in the parts from the first j with upper(j) >= r to the first j with lower(j) >= r. If this is one
published part of more than one point, the next Version narrows it: the rank in it is from r - upper(j - 1) to
r - lower(j - 1). Otherwise the interval is the answer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from fanin.edge.queries.digits import WITHHELD, join
from fanin.edge.queries.query import INSIDE, NARROW, OUTSIDE, StatisticsQuery, tensor
from fanin.edge.tensors import Float32s

Counts = Sequence[int | None]
"""The counts of cells; None for one that is withheld."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """The interval of one quantile.

    Attributes:
        first: Its first point.
        last: The point after its last one.
        count: The values in it; None if too few devices have the feature.
        ranks: The lowest and the highest rank that the quantile may have in it.
        is_open: Whether the next Version narrows it.
        has_changed: Whether the devices of a later Version had other values than those of an earlier one.
    """

    first: int
    last: int
    count: int | None
    ranks: tuple[int, int] = (1, 1)
    is_open: bool
    has_changed: bool = False

    def part_width(self, num_parts: int) -> int:
        """Return the points of one part. The last parts may have fewer, or none."""
        return -(-(self.last - self.first) // num_parts)


def next_version(query: StatisticsQuery, views: Mapping[str, Float32s]) -> int:
    """Return the number of the next tensors to fill: 0 for the first ones, ``query.num_versions`` after the last."""
    groups = range(len(query.groups))
    if not any(views[tensor(index, kind)].any() for index in groups for kind in (INSIDE, OUTSIDE)):
        return 0
    for number in range(1, query.num_versions):
        names = [narrow_tensor(index, number) for index in groups]
        if not any(views[name].any() for name in names if name in views):
            return number
    return query.num_versions


def narrow_tensor(index: int, number: int) -> str:
    """Return the name of the tensor with which a Version narrows the quantiles of a group."""
    return tensor(index, f"{NARROW}.{number:02}")


def brackets_of(query: StatisticsQuery, index: int, views: Mapping[str, Float32s]) -> list[list[Bracket]]:
    """Return the brackets of a group (num_features, num_quantiles) after all Versions so far."""
    group, done = query.groups[index], next_version(query, views)
    inside, bins = views[tensor(index, INSIDE)], views[tensor(index, group.histogram)]
    brackets = []
    for row in range(len(group.names)):
        total = cell_count(inside[row, : 1 + query.widths(group)[0]], query.bits)
        ours = []
        for number, quantile in enumerate(group.quantiles):
            bracket = Bracket(first=0, last=group.num_points, count=total, is_open=bool(total))
            if total:
                rank = max(1, math.ceil(Fraction(repr(quantile)) * total))
                counts = counts_of(bins[row], query.bits)
                bracket = narrowed(replace(bracket, ranks=(rank, rank)), counts)
            for version in range(1, min(done, group.num_versions)):
                if bracket.is_open:
                    cells = views[narrow_tensor(index, version)][row * len(group.quantiles) + number]
                    bracket = narrowed(bracket, counts_of(cells, query.bits))
            ours.append(bracket)
        brackets.append(ours)
    return brackets


def counts_of(cells: Float32s, bits: int) -> Counts:
    """Return the counts of cells (num_cells, 1 + count digits)."""
    return [cell_count(cell, bits) for cell in cells]


def cell_count(cell: Float32s, bits: int) -> int | None:
    """Return the count of a cell (1 + count digits,); None if it is withheld."""
    return None if cell[0] == WITHHELD else join(cell[1:], bits)


def narrowed(bracket: Bracket, counts: Counts) -> Bracket:
    """Return a bracket after the counts of its parts. One that cannot be narrowed is closed."""
    assert bracket.count is not None, "an open bracket has values"
    num_withheld = sum(each is None for each in counts)
    hidden = bracket.count - sum(each or 0 for each in counts)
    if hidden < 0 or (not num_withheld and hidden):
        return replace(bracket, is_open=False, has_changed=True)
    bounds = [(0, 0)]
    published, seen = 0, 0
    for count in counts:
        published, seen = published + (count or 0), seen + (count is None)
        upper = published + (hidden if seen else 0)
        bounds.append((published + (hidden if seen == num_withheld else 0), upper))
    least, most = bracket.ranks
    low = next(part for part in range(len(counts)) if bounds[part + 1][1] >= least)
    high = next(part for part in range(len(counts)) if bounds[part + 1][0] >= most)
    width, count = bracket.part_width(len(counts)), counts[low] if low == high else None
    first = bracket.first + low * width
    last = min(bracket.first + (high + 1) * width, bracket.last)
    ranks = bracket.ranks
    if count is not None:
        lower, upper = bounds[low]
        ranks = max(1, least - upper), min(count, most - lower)
    return replace(
        bracket,
        first=first,
        last=max(last, first + 1),
        count=count if count is not None else bracket.count,
        ranks=ranks,
        is_open=count is not None and last - first > 1,
    )

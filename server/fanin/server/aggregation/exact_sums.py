"""The rule of a statistics Run: exact integer sums, in which cells of few devices are withheld.

    sum_c = sum over devices of the integers of cell c        exact: no mean, no rounding
    n_c   = number of devices with values in cell c           the first digit of each cell

A cell with 0 < n_c < k is *withheld*: the Version has -1 devices in it and no digits. The total of a row may be
known, so the sum of its withheld cells follows by subtraction. Therefore one more cell is withheld in such a row, the
published one with the fewest devices. The sum that follows then covers at least k devices (primary and secondary cell
suppression: Hundepool et al. 2012, Statistical Disclosure Control, chapter 4). A cell of no device is published as 0.

    row of a feature           its values inside, below and above the range, and those that are no numbers
    row of its histogram       its bins, whose total is the number inside; all are withheld if that is. If bins are
                               points, sum and sum of squares are two more equations: they are withheld with a bin
    row of a narrower bracket  its parts, whose total is a published cell of the Version before

Without masks, each integer of an Update is limited to its digits, so one device moves a cell by at most what a device
may have. Under masks nobody can limit it, and a sum out of its range is set to its end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Final

import numpy as np

from fanin.edge.codecs.fixed import Integers
from fanin.edge.queries.digits import EXACT_BITS, MAX_DEVICES, WITHHELD, digit_bits
from fanin.edge.queries.query import BINS, INSIDE, LEAST_DEVICES, OUTSIDE, POINTS
from fanin.edge.tensors import Float64s, Int64s, TensorTable
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import Plan
from fanin.protos.plans.keys import Key, shown
from fanin.server.aggregation import fold
from fanin.server.aggregation.fold import Contribution, PartialSum

STATISTICS_RULE: Final = "statistics"
CANNOT: Final = "FN-1864"


class ExactSums:
    """A ``Rule`` that adds up the integers of a query.

    Args:
        min_devices: k, the fewest devices of a cell that is published.
        num_devices: The most devices of a Round.
    """

    def __init__(self, min_devices: int, num_devices: int) -> None:
        self._min_devices = min_devices
        self._num_devices = num_devices
        self._largest_digit = (1 << digit_bits(num_devices)) - 1

    def begin(self, table: TensorTable) -> PartialSum:
        """See ``Rule.begin``."""
        return fold.begin(table)

    def accept(self, state: PartialSum, table: TensorTable, update: Contribution) -> PartialSum:
        """See ``Rule.accept``."""
        if update.tail is None:
            update = replace(update, pieces=self._limited(table, update))
        return fold.accept(state, table, update)

    def _limited(self, table: TensorTable, update: Contribution) -> Iterator[Integers]:
        highest, first = self._highest(table), 0
        for piece in update.pieces:
            last = first + piece.size
            yield np.clip(piece, 0, highest[first:last]).astype(piece.dtype, copy=False)
            first = last

    def _highest(self, table: TensorTable) -> Int64s:
        """Return the largest integer of one device at each position (num_values,)."""
        highest = np.full(table.num_values, self._largest_digit, np.int64)
        for spec, start in zip(table.specs, table.offsets, strict=True):
            highest[start : start + spec.num_values : spec.shape[-1]] = 1
        return highest

    def merge(self, left: PartialSum, right: PartialSum) -> PartialSum:
        """See ``Rule.merge``."""
        return fold.merge(left, right)

    def finish(self, state: PartialSum, table: TensorTable, grid: Sequence[int], part: tuple[int, int]) -> Float64s:
        """Return the sums with withheld cells. See ``Rule.finish``."""
        del grid  # Its steps are 1: the tensors are sums.
        first, last = part
        change = np.empty(last - first, np.float64)
        views = {
            spec.name: state.values[start : start + spec.num_values].reshape(spec.shape)
            for spec, start in zip(table.specs, table.offsets, strict=True)
        }
        for spec, start in zip(table.specs, table.offsets, strict=True):
            begin, end = max(start, first), min(start + spec.num_values, last)
            if begin < end:
                released = self._released(spec.name, views).reshape(-1)
                change[begin - first : end - first] = released[begin - start : end - start]
        return change

    def _released(self, name: str, views: Mapping[str, Int64s]) -> Int64s:
        """Return the sums of a tensor with its withheld cells (..., digits)."""
        group, _, kind = name.partition(".")
        cells = self._bounded(views[name])
        devices = cells[..., 0]
        if kind in (INSIDE, OUTSIDE, BINS, POINTS):
            inside = self._bounded(views[f"{group}.{INSIDE}"])[..., :1]
            outside = self._bounded(views[f"{group}.{OUTSIDE}"])[..., 0]
            of_feature = withheld(np.concatenate([inside, outside], axis=1), self._min_devices)
            if kind == INSIDE:
                hidden = of_feature[:, 0]
            elif kind == OUTSIDE:
                hidden = of_feature[:, 1:]
            else:
                hidden = withheld(devices, self._min_devices) | of_feature[:, :1]
        else:
            hidden = withheld(devices, self._min_devices)
        released = np.where(hidden[..., np.newaxis], 0, cells)
        released[..., 0] = np.where(hidden, WITHHELD, devices)
        if kind == INSIDE and (points := views.get(f"{group}.{POINTS}")) is not None:
            has_hidden = withheld(self._bounded(points)[..., 0], self._min_devices).any(axis=1)
            first_sum = views[f"{group}.{OUTSIDE}"].shape[-1]
            released[has_hidden, first_sum:] = 0
            released[has_hidden, first_sum] = WITHHELD
        return released

    def _bounded(self, cells: Int64s) -> Int64s:
        bounded = np.clip(cells, 0, (1 << EXACT_BITS) - 1)
        bounded[..., 0] = np.minimum(bounded[..., 0], self._num_devices)
        return bounded


def withheld(devices: Int64s, min_devices: int) -> np.ndarray:
    """Return which cells of each row are withheld (num_rows, num_cells).

    Args:
        devices: The number of devices of each cell (num_rows, num_cells).
        min_devices: k, the fewest devices of a cell that is published.
    """
    is_small = (devices > 0) & (devices < min_devices)
    others = np.where((devices > 0) & ~is_small, devices, MAX_DEVICES + 1)
    rows, next_smallest = np.arange(len(devices)), others.argmin(axis=1)
    hidden: np.ndarray = is_small.copy()
    has_other = others[rows, next_smallest] <= MAX_DEVICES
    hidden[rows, next_smallest] |= is_small.any(axis=1) & has_other
    return hidden


def exact_sums(
    plan: Plan,
    *,
    min_devices: Annotated[
        int,
        Key(
            text="A cell to which fewer devices contribute is withheld: that of the query, whose Bundle the Run has.",
            unit="devices",
            at_least=LEAST_DEVICES,
            at_most=MAX_DEVICES,
        ),
    ],
) -> ExactSums:
    """Return the rule of a statistics Run. Raises InvalidPlan for a Plan with which the sums would not be exact."""
    cohort, ours = plan.cohort, plan.aggregation
    if not min_devices <= cohort.quorum <= cohort.buffer <= MAX_DEVICES:
        raise InvalidPlan(
            f"plan: got aggregation.rule_options.min_devices {min_devices} with cohort.quorum {cohort.quorum} and "
            f"cohort.buffer {cohort.buffer}, expected a quorum of at least min_devices, and a buffer of at most "
            f"{MAX_DEVICES}; raise the quorum: a smaller Round would publish nothing",
            code=CANNOT,
        )
    wrong = {
        "codec": (plan.codec.name, plan.codec.max_shift) != ("fixed32", 0),
        "stages": bool(plan.stages),
        "statistics": bool(plan.statistics),
        "aggregation.max_examples": ours.max_examples != 1,
        "aggregation.outer_optimizer": ours.outer_optimizer != "fedavg" or bool(ours.outer_options),
        "aggregation.max_staleness": ours.max_staleness > 0,
    }
    if keys := [key for key, is_wrong in wrong.items() if is_wrong]:
        raise InvalidPlan(
            f"plan: got the rule {shown(STATISTICS_RULE)} with {', '.join(keys)}, expected fixed32 with max_shift 0, "
            "max_examples 1, fedavg without options, and no stages, statistics or staleness: each device counts once, "
            "and the sums are exact; use the plan of fanin stats",
            code=CANNOT,
        )
    return ExactSums(min_devices, cohort.buffer)

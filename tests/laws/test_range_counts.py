"""Laws of the counts of ranges: equal weights, sums in any order, and no range that one device in ten decides."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fanin.edge.codecs.statistics import range_counts_of
from fanin.edge.ranges import BINS_PER_OCTAVE, NUM_BINS
from fanin.edge.tensors import Int64s
from fanin.protos import messages as m
from fanin.server.aggregation.auxiliary import limited
from fanin.server.aggregation.fold import RangeSum

NUM = 2
"""Activations."""
CELLS = 2 * NUM * NUM_BINS
BINS = st.integers(0, NUM_BINS - 1)


@st.composite
def histograms(draw: st.DrawFn) -> Int64s:
    """Draw the histograms of a device: the same number of examples on both sides, 0 for an unknown activation."""
    result = np.zeros((NUM, 2, NUM_BINS), np.int64)
    for activation in range(NUM):
        num = draw(st.integers(0, m.RANGE_EXAMPLES))
        for side in range(2):
            bins = draw(st.lists(BINS, min_size=1, max_size=3))
            np.add.at(result[activation, side], [bins[index % len(bins)] for index in range(num)], 1)
    return result


def sides(counts: m.RangeCounts) -> Int64s:
    """Return the sum of the counts of each side (NUM, 2)."""
    total = RangeSum()
    total.add(counts)
    return total.counts(CELLS).reshape(NUM, 2, NUM_BINS).sum(axis=2)


@given(histograms())
def test_each_device_has_the_same_weight_on_each_side_of_an_activation_that_it_measured(counts: Int64s) -> None:
    weighted = range_counts_of(counts, np.arange(NUM))
    np.testing.assert_array_equal(sides(weighted), np.where(counts.sum(axis=2) > 0, m.RANGE_WEIGHT, 0))
    measured = {
        index * NUM_BINS + at for index in range(2 * NUM) for at in np.nonzero(counts.reshape(-1, NUM_BINS)[index])[0]
    }
    assert set(weighted.cells) <= measured


@given(st.lists(histograms(), min_size=1, max_size=6))
def test_the_sum_of_ranges_does_not_depend_on_the_order(drawn: list[Int64s]) -> None:
    updates = [range_counts_of(counts, np.arange(NUM)) for counts in drawn]
    total, backwards = RangeSum(), RangeSum()
    for update in updates:
        total.add(update)
    for update in reversed(updates):
        backwards.add(update)
    np.testing.assert_array_equal(total.counts(CELLS), backwards.counts(CELLS))


@given(st.lists(BINS, min_size=2, max_size=40), st.lists(BINS, min_size=1, max_size=3))
def test_a_tenth_of_the_devices_moves_no_count_by_more_than_an_octave_beyond_the_others(
    honest: list[int], lies: list[int]
) -> None:
    num_liars = max((len(honest) + 1) // 10, 1)
    counts = np.zeros((1, 2, NUM_BINS), np.int64)
    for at in honest + [lies[index % len(lies)] for index in range(num_liars)]:
        counts[0, :, at] += m.RANGE_WEIGHT
    result = limited(counts)
    np.testing.assert_array_equal(result.sum(axis=2), counts.sum(axis=2))
    assert np.nonzero(result[0, 0])[0].max() <= max(honest) + BINS_PER_OCTAVE


@given(BINS, BINS)
def test_counts_of_two_devices_are_not_limited(first: int, second: int) -> None:
    counts = np.zeros((1, 2, NUM_BINS), np.int64)
    for at in (first, second):
        counts[0, :, at] += m.RANGE_WEIGHT
    np.testing.assert_array_equal(limited(counts), counts)

"""Rules that look at each value alone: they sort its Updates, so no order of the Updates changes a bit."""

from collections.abc import Mapping

import numpy as np

from fanin.edge.tensors import Float64s, Int64s


class OnePass:
    """The members of a ``ColumnRule`` that a rule with one pass has no use for."""

    @property
    def num_passes(self) -> int:
        """See ``ColumnRule.num_passes``."""
        return 1

    def begin(self, num_updates: int) -> Mapping[str, np.ndarray]:
        """See ``ColumnRule.begin``."""
        return {}

    def look(self, state: Mapping[str, np.ndarray], columns: Int64s, number: int) -> Mapping[str, np.ndarray]:
        """See ``ColumnRule.look``."""
        raise AssertionError("a rule with one pass has no pass before the last")


def doubled_median(ordered: Int64s) -> Int64s:
    """Return twice the median of each row, an exact integer (num_values,).

    Args:
        ordered: Sorted rows (num_values, num_updates). Their values are below 2^61, as a Plan's headroom guarantees.
    """
    num_updates = ordered.shape[1]
    total: Int64s = ordered[:, (num_updates - 1) // 2] + ordered[:, num_updates // 2]
    return total


class Median(OnePass):
    """The median of each value. For an even number of Updates it is the mean of the two in the middle.

    Reference:
        Yin et al. 2018, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, arXiv 1803.01498,
        definition 1 and algorithm 1, option I:

            g[k] = med{x_i[k] : i = 1..n}
    """

    def reduce(self, state: Mapping[str, np.ndarray], columns: Int64s) -> Float64s:
        """See ``ColumnRule.reduce``. The sum is exact; its conversion is one rounding, and the half is exact."""
        return doubled_median(np.sort(columns, axis=1)).astype(np.float64) / 2.0


class MeanAroundMedian(OnePass):
    """The mean of the n - f Updates of each value that are nearest to its median (MeaMed).

    Of two Updates at the same distance, the smaller one is nearer. It needs n >= 2f + 1 Updates.

    Args:
        num_attackers: f, the largest number of Updates that may be lies.

    Reference:
        Xie, Koyejo, Gupta 2018, Generalized Byzantine-tolerant SGD, arXiv 1802.10116, definition 7.
    """

    def __init__(self, num_attackers: int) -> None:
        self._num_attackers = num_attackers

    def reduce(self, state: Mapping[str, np.ndarray], columns: Int64s) -> Float64s:
        """See ``ColumnRule.reduce``."""
        return mean_around_median(columns, columns.shape[1] - self._num_attackers)


def mean_around_median(columns: Int64s, num_nearest: int) -> Float64s:
    """Return the mean of the values of each row that are nearest to its median. Its division is the only rounding."""
    ordered = np.sort(columns, axis=1)
    distances = np.abs(2 * ordered - doubled_median(ordered)[:, None])
    nearest = np.argsort(distances, axis=1, kind="stable")[:, :num_nearest]
    total: Int64s = np.take_along_axis(ordered, nearest, axis=1).sum(axis=1, dtype=np.int64)
    return total.astype(np.float64) / float(num_nearest)

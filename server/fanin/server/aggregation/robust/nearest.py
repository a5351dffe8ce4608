"""Rules that choose Updates by the squared distances between them.

Of Updates with equal scores, the first one in the order of the devices' ids is chosen.
"""

from collections.abc import Mapping

import numpy as np

from fanin.edge.tensors import Float64s, Int64s
from fanin.server.aggregation.robust.middle import OnePass, mean_around_median


def last_sum(values: Float64s) -> Float64s:
    """Return the sum of each row from its first to its last value, in this order on every machine (num_rows,)."""
    sums: Float64s = np.add.accumulate(values, axis=1)[:, -1] if values.shape[1] else np.zeros(len(values))
    return sums


def krum_scores(squares: Float64s, num_attackers: int) -> Float64s:
    """Return Krum's score of each Update: the sum of its squared distances to the n - f - 2 nearest others (n,)."""
    others = squares.copy()
    np.fill_diagonal(others, np.inf)
    others.sort(axis=1)
    return last_sum(others[:, : len(squares) - num_attackers - 2])


class Krum(OnePass):
    """The Update with the lowest score, or the mean of the ``num_chosen`` Updates with the lowest scores (Multi-Krum).

        score(i) = sum of ||x_i - x_j||^2 over the n - f - 2 Updates j != i that are nearest to i

    It needs n >= 2f + 3 Updates.

    Args:
        num_attackers: f, the largest number of Updates that may be lies.
        num_chosen: m, the number of Updates in the mean. None for all but f.

    Reference:
        Blanchard et al. 2017, Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, section 3.
    """

    def __init__(self, num_attackers: int, num_chosen: int | None) -> None:
        self._num_attackers = num_attackers
        self._num_chosen = num_chosen

    def measure(self, state: Mapping[str, np.ndarray], squares: Float64s) -> Mapping[str, np.ndarray]:
        """See ``DistanceRule.measure``."""
        num_chosen = len(squares) - self._num_attackers if self._num_chosen is None else self._num_chosen
        order = np.argsort(krum_scores(squares, self._num_attackers), kind="stable")
        return {"chosen": np.sort(order[:num_chosen])}

    def reduce(self, state: Mapping[str, np.ndarray], columns: Int64s) -> Float64s:
        """See ``ColumnRule.reduce``. The integers are summed exactly; the division is one rounding."""
        chosen = state["chosen"]
        total: Int64s = columns[:, chosen].sum(axis=1, dtype=np.int64)
        return total.astype(np.float64) / float(chosen.size)


class Bulyan(OnePass):
    """Krum chooses n - 2f Updates, one after another, and each value is the mean of the n - 4f nearest to their median.

    Krum runs again over the rest after each choice, with the distances to the n' - f - 2 nearest of n' Updates, and to
    at least one. It needs n >= 4f + 3 Updates.

    Args:
        num_attackers: f, the largest number of Updates that may be lies.

    Reference:
        El Mhamdi, Guerraoui, Rouault 2018, The Hidden Vulnerability of Distributed Learning in Byzantium,
        arXiv 1802.07927, section 4.
    """

    def __init__(self, num_attackers: int) -> None:
        self._num_attackers = num_attackers

    def measure(self, state: Mapping[str, np.ndarray], squares: Float64s) -> Mapping[str, np.ndarray]:
        """See ``DistanceRule.measure``."""
        return {"chosen": np.sort(bulyan_choice(squares, self._num_attackers))}

    def reduce(self, state: Mapping[str, np.ndarray], columns: Int64s) -> Float64s:
        """See ``ColumnRule.reduce``."""
        return mean_around_median(columns[:, state["chosen"]], columns.shape[1] - 4 * self._num_attackers)


def bulyan_choice(squares: Float64s, num_attackers: int) -> Int64s:
    """Return the n - 2f Updates that Krum chooses one after another."""
    others = squares.copy()
    np.fill_diagonal(others, np.inf)
    # Each row is sorted once. A choice removes its row, and its column wherever it is in the others.
    order = np.argsort(others, axis=1, kind="stable").astype(np.int16)
    near = np.take_along_axis(others, order, axis=1)[:, :-1]
    order, rest, chosen = order[:, :-1], np.arange(len(squares)), list[int]()
    while len(chosen) < len(squares) - 2 * num_attackers:
        best = int(np.argmin(last_sum(near[:, : max(rest.size - num_attackers - 2, 1)])))
        chosen.append(int(rest[best]))
        is_left = np.delete(order, best, axis=0) != rest[best]
        near = np.delete(near, best, axis=0)[is_left].reshape(rest.size - 1, max(rest.size - 2, 0))
        order = np.delete(order, best, axis=0)[is_left].reshape(rest.size - 1, max(rest.size - 2, 0))
        rest = np.delete(rest, best)
    return np.array(chosen, np.int64)

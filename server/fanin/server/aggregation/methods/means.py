"""Rules that multiply a mean by a number that follows from the sums of the statistics.

    fednova    sum_i p_i d_i * tau_eff       tau_eff = sum_i p_i |a_i|_1          p_i by examples
    qfedavg    sum_i F_i^q c_i / sum_i h_i = mean of F_i^q c_i * n / sum_i h_i    each device counts the same

The sums are integers, and the number is one division of float64. So the aggregate depends on no order, and ``fanin
verify`` recomputes it.

Reference:
    Wang et al. 2020, arXiv 2007.07481, equation 7. Li et al. 2020, arXiv 1905.10497, algorithm 2.
"""

from collections.abc import Callable, Sequence

from fanin.edge.codecs.methods.fednova import NORM
from fanin.edge.codecs.methods.qfedavg import SCALE, SCALE_UNIT
from fanin.edge.runtimes.evaluations import METRIC_UNIT
from fanin.edge.tensors import Float64s, TensorTable
from fanin.server.aggregation import fold
from fanin.server.aggregation.fold import Contribution, PartialSum
from fanin.server.aggregation.statistics import examples_key


class ScaledMean:
    """The weighted mean, times a number. See ``Rule``.

    Args:
        factor: Returns the number for the sum of a Round.
    """

    def __init__(self, factor: Callable[[PartialSum], float]) -> None:
        self._factor = factor

    def begin(self, table: TensorTable) -> PartialSum:
        """See ``Rule.begin``."""
        return fold.begin(table)

    def accept(self, state: PartialSum, table: TensorTable, update: Contribution) -> PartialSum:
        """See ``fold.accept``."""
        return fold.accept(state, table, update)

    def merge(self, left: PartialSum, right: PartialSum) -> PartialSum:
        """See ``fold.merge``."""
        return fold.merge(left, right)

    def finish(self, state: PartialSum, table: TensorTable, grid: Sequence[int], part: tuple[int, int]) -> Float64s:
        """See ``Rule.finish``."""
        return fold.finish(state, table, grid, part) * self._factor(state)


def effective_steps(state: PartialSum) -> float:
    """Return tau_eff of a Round; 0.0 if no device reports the norm of its steps, so that the parameters stay."""
    num_examples = state.counts.get(examples_key(NORM), 0)
    return max(state.counts[NORM], 0) / (METRIC_UNIT * num_examples) if num_examples > 0 else 0.0


def inverse_scale(state: PartialSum) -> float:
    """Return n / sum h of a Round; 0.0 if no device reports h, so that the parameters stay."""
    total = state.counts.get(SCALE, 0)
    return state.num_updates * SCALE_UNIT / total if total > 0 else 0.0

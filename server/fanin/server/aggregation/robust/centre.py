"""Rules whose aggregate is a sum of weighted Updates, with weights that follow from distances to a moving centre.

The centre is itself such a sum v = sum of w_j x_j, so its distances follow from those between the Updates.
"""

from collections.abc import Mapping

import numpy as np

from fanin.edge.tensors import Float64s, Int64s
from fanin.server.aggregation.robust.middle import OnePass
from fanin.server.aggregation.robust.nearest import last_sum


def weighted_sum(weights: Float64s, columns: Int64s) -> Float64s:
    """Return the sum of weighted columns, added from the first to the last (num_values,)."""
    total: Float64s = np.zeros(len(columns))
    for index, weight in enumerate(weights):
        total += columns[:, index] * weight
    return total


class GeometricMedian(OnePass):
    """The point with the least sum of distances to the Updates: robust federated averaging (RFA).

    Smoothed Weiszfeld steps begin at the mean:

        v = sum of b_i x_i / sum of b_i        b_i = 1 / max(smoothing, ||x_i - v||)

    The paper finds 3 steps enough. A far lie has a part of f / (n - f) in each next centre, so against the largest
    values of a grid more steps are needed. They cost little, because they need the distances alone.

    As the weights have the sum 1, the distance is

        ||x_i - v||^2 = sum_j w_j d_ij - 1/2 sum_ij w_i w_j d_ij        d_ij = ||x_i - x_j||^2

    Args:
        iterations: Number of steps.
        smoothing: The least distance, in the unit of the parameters.

    Reference:
        Pillutla, Kakade, Harchaoui 2022, Robust Aggregation for Federated Learning, arXiv 1912.13445, algorithm 2.
    """

    def __init__(self, iterations: int, smoothing: float) -> None:
        self._iterations = iterations
        self._smoothing = smoothing

    def measure(self, state: Mapping[str, np.ndarray], squares: Float64s) -> Mapping[str, np.ndarray]:
        """See ``DistanceRule.measure``."""
        between = squares.copy()
        np.fill_diagonal(between, 0.0)
        weights = np.full(len(squares), 1.0 / len(squares))
        for _ in range(self._iterations):
            means = last_sum(between * weights)
            spread = last_sum((means * weights)[None, :])[0] / 2.0
            # A distance from the centre below 2^-26 of the largest one is rounding, and may be below zero.
            distances = np.sqrt(np.maximum(means - spread, 0.0))
            inverse = 1.0 / np.maximum(distances, self._smoothing)
            weights = inverse / last_sum(inverse[None, :])[0]
        return {"weights": weights}

    def reduce(self, state: Mapping[str, np.ndarray], columns: Int64s) -> Float64s:
        """See ``ColumnRule.reduce``."""
        return weighted_sum(state["weights"], columns)


class CentredClipping(OnePass):
    """The mean of Updates that are cut to a radius around a centre. One step from zero is norm bounding.

        v = v + 1/n sum of (x_i - v) min(1, radius / ||x_i - v||)        v begins at zero, which is no change

    Args:
        iterations: Number of steps.
        radius: The radius, in the unit of the parameters.

    Reference:
        Karimireddy, He, Jaggi 2021, Learning from History for Byzantine Robust Optimization, arXiv 2012.10333,
        algorithm 2. Sun et al. 2019, Can You Really Backdoor Federated Learning?, arXiv 1911.07963, section 4.
    """

    def __init__(self, iterations: int, radius: float) -> None:
        self._iterations = iterations
        self._radius = radius

    def measure(self, state: Mapping[str, np.ndarray], squares: Float64s) -> Mapping[str, np.ndarray]:
        """See ``DistanceRule.measure``. Zero is one more point, so that all weights have the sum 1."""
        num_updates, norms = len(squares), np.diagonal(squares).copy()
        between = squares.copy()
        np.fill_diagonal(between, 0.0)
        weights, of_zero = np.zeros(num_updates), 1.0
        for _ in range(self._iterations):
            means = last_sum(between * weights) + of_zero * norms
            mean_of_zero = last_sum((norms * weights)[None, :])[0]
            spread = (last_sum((means * weights)[None, :])[0] + of_zero * mean_of_zero) / 2.0
            distances = np.sqrt(np.maximum(means - spread, 0.0))
            # An Update within the radius has the factor 1, also one at the centre itself.
            factors = self._radius / np.maximum(distances, self._radius)
            remaining = 1.0 - last_sum(factors[None, :])[0] / num_updates
            weights, of_zero = weights * remaining + factors / num_updates, of_zero * remaining
        return {"weights": weights}

    def reduce(self, state: Mapping[str, np.ndarray], columns: Int64s) -> Float64s:
        """See ``ColumnRule.reduce``."""
        return weighted_sum(state["weights"], columns)

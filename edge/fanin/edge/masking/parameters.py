"""Degree of the graph and threshold of the shares, for a number of devices and a threat model.

The degree is the smallest even one for which all of these hold, with A adversarial and S surviving neighbors of a
device (hypergeometric, k draws out of n devices):

    connected   n (n - k - 1) / 2 * C(a + d, k) / C(n, k) < 2^-(security + 1)
    secret      P[A > t1] <= 2^-(security + 1) / n; t > t1; if the coordinator deviates, 2t > k + t1
    correct     P[S < t] < 2^-correctness / n

If there is none, or the threat model needs it, the graph is complete: then all n devices hold shares, and the
conditions are a < t or 2t > n + a, and t <= n - d.

Decisions are made in floating point, and repeated with exact integers where it is within 1e-6 of the bound. So each
machine gets the same parameters.

Reference:
    Bell et al. 2020, Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, section 3. The published values
    of another implementation: federated-compute, fcp/secagg/server/graph_parameter_finder_test.cc.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from fanin.protos.errors import InvalidPlan

MILLION: Final = 1_000_000
CLOSE: Final = 1e-6
"""Relative distance from a bound below which a decision is made with exact integers."""
LEAST_THRESHOLD: Final = 2
LEAST_DEGREE: Final = 2


class Threat(IntEnum):
    """What the coordinator may do. The numbers are those of the encoded terms; a higher one is a stronger claim."""

    CURIOUS = 1
    SEMI_MALICIOUS = 2
    ACTIVE = 3

    @property
    def title(self) -> str:
        """The name in Plans and messages."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What parameters are computed from, besides the number of devices.

    Attributes:
        threat: The threat model.
        adversarial_ppm: Fraction of the devices that share all they know with the coordinator, in millionths.
        dropout_ppm: Fraction of the devices that may drop out, in millionths.
        security_bits: The statement on privacy fails with a probability of at most 2^-security_bits.
        correctness_bits: A Round with that many dropouts fails with a probability of at most 2^-correctness_bits.
    """

    threat: Threat
    adversarial_ppm: int
    dropout_ppm: int
    security_bits: int = 40
    correctness_bits: int = 20

    def __post_init__(self) -> None:
        for what, value in (("adversarial", self.adversarial_ppm), ("dropout", self.dropout_ppm)):
            if not 0 <= value < MILLION:
                raise InvalidPlan(f"{what}: got {value / MILLION:g}, expected 0 or more, below 1", code="FN-1626")

    def num_adversarial(self, num_devices: int) -> int:
        """Return a, the most adversarial devices among n."""
        return num_devices * self.adversarial_ppm // MILLION

    def num_dropouts(self, num_devices: int) -> int:
        """Return d, the most devices among n that drop out."""
        return num_devices * self.dropout_ppm // MILLION


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphParameters:
    """Degree k and threshold t. A graph of degree n - 1 is complete, and each device then holds a share of its own."""

    degree: int
    threshold: int


def parameters(num_devices: int, assumptions: Assumptions) -> GraphParameters:
    """Return degree and threshold.

    Raises:
        InvalidPlan: Fewer than 2 devices, or no threshold is both secret and correct.
    """
    if num_devices < LEAST_DEGREE:
        raise InvalidPlan(f"secure aggregation: got {num_devices} devices, expected at least 2", code="FN-1626")
    if assumptions.threat is not Threat.ACTIVE:
        for degree in range(LEAST_DEGREE, num_devices - 1, 2):
            threshold = _sparse_threshold(num_devices, degree, assumptions)
            if threshold is not None:
                return GraphParameters(degree=degree, threshold=threshold)
    threshold = least_complete_threshold(num_devices, assumptions)
    most = num_devices - assumptions.num_dropouts(num_devices)
    if threshold > most:
        raise InvalidPlan(
            f"secure aggregation: got {num_devices} devices; {assumptions.num_adversarial(num_devices)} may be "
            f"adversarial and {num_devices - most} may drop out: the threshold must be at least {threshold} to be "
            f"secret, and at most {most} to be correct; lower a fraction, or choose a weaker threat model",
            code="FN-1626",
        )
    return GraphParameters(degree=num_devices - 1, threshold=threshold)


def is_secret(num_devices: int, chosen: GraphParameters, assumptions: Assumptions) -> bool:
    """Return whether parameters that a coordinator chose keep secrets. A device checks this before it shares any."""
    degree, threshold = chosen.degree, chosen.threshold
    if degree == num_devices - 1:
        return least_complete_threshold(num_devices, assumptions) <= threshold <= num_devices
    if assumptions.threat is Threat.ACTIVE or degree % 2 or not LEAST_DEGREE <= degree < num_devices - 1:
        return False
    if threshold > degree or not _is_connected(num_devices, degree, assumptions):
        return False
    return threshold >= _least_sparse_threshold(num_devices, degree, assumptions)


def least_complete_threshold(num_devices: int, assumptions: Assumptions) -> int:
    """Return the smallest threshold that keeps secrets in a complete graph."""
    adversarial = assumptions.num_adversarial(num_devices)
    if assumptions.threat is Threat.CURIOUS:
        return max(adversarial + 1, LEAST_THRESHOLD)
    return max((num_devices + adversarial) // 2 + 1, LEAST_THRESHOLD)


def _sparse_threshold(num_devices: int, degree: int, assumptions: Assumptions) -> int | None:
    """Return the smallest threshold of a degree that is secret and correct, or None."""
    if not _is_connected(num_devices, degree, assumptions):
        return None
    threshold = _least_sparse_threshold(num_devices, degree, assumptions)
    surviving = _Tail(num_devices, num_devices - assumptions.num_dropouts(num_devices), degree)
    limit = _Limit(assumptions.correctness_bits, num_devices)
    # P[S < t] < limit: the largest such t is where the condition first fails, less one.
    largest = _first(lambda count: not surviving.is_below(count + 1, limit), degree)
    return threshold if threshold <= largest else None


def _least_sparse_threshold(num_devices: int, degree: int, assumptions: Assumptions) -> int:
    adversarial = _Tail(num_devices, assumptions.num_adversarial(num_devices), degree)
    limit = _Limit(assumptions.security_bits + 1, num_devices)
    most = _first(lambda count: adversarial.is_above_at_most(count, limit), degree)
    least = most + 1 if assumptions.threat is Threat.CURIOUS else (degree + most) // 2 + 1
    return max(least, LEAST_THRESHOLD)


def _is_connected(num_devices: int, degree: int, assumptions: Assumptions) -> bool:
    """Return whether the honest survivors are connected, but for a probability of 2^-(security + 1)."""
    bad = assumptions.num_adversarial(num_devices) + assumptions.num_dropouts(num_devices)
    if degree > bad:
        return True
    pairs = num_devices * (num_devices - degree - 1)
    log = math.log(pairs) + _log_choose(bad, degree) - _log_choose(num_devices, degree)
    bits = assumptions.security_bits

    def exact() -> bool:
        return (pairs * math.comb(bad, degree)) << bits < math.comb(num_devices, degree)

    return _decide(log, -bits * math.log(2), exact)


@dataclass(frozen=True, slots=True)
class _Limit:
    """The probability 2^-bits / n."""

    bits: int
    num_devices: int

    @property
    def log(self) -> float:
        return -self.bits * math.log(2) - math.log(self.num_devices)


class _Tail:
    """Tails of the hypergeometric distribution: how many of ``draws`` are among ``marked`` of ``total``."""

    def __init__(self, total: int, marked: int, draws: int) -> None:
        self._total, self._marked, self._draws = total, marked, draws
        self._low, self._high = max(0, draws - (total - marked)), min(draws, marked)
        counts = np.arange(self._low, self._high + 1, dtype=np.float64)
        steps = np.log(marked - counts[:-1]) + np.log(draws - counts[:-1])
        steps -= np.log(counts[1:]) + np.log(total - marked - draws + counts[1:])
        first = _log_choose(marked, self._low) + _log_choose(total - marked, draws - self._low)
        logs = first - _log_choose(total, draws) + np.concatenate(([0.0], np.cumsum(steps)))
        with np.errstate(under="ignore"):
            self._cumulative = np.logaddexp.accumulate(logs)
            self._remaining = np.logaddexp.accumulate(logs[::-1])[::-1]

    def is_above_at_most(self, count: int, limit: _Limit) -> bool:
        """Return whether P[X > count] <= limit."""
        if count >= self._high:
            return True
        if count < self._low:
            return False

        def exact() -> bool:
            return not self._exceeds(range(count + 1, self._high + 1), limit)

        return _decide(float(self._remaining[count + 1 - self._low]), limit.log, exact)

    def is_below(self, count: int, limit: _Limit) -> bool:
        """Return whether P[X < count] < limit."""
        if count <= self._low:
            return True
        if count > self._high:
            return False

        def exact() -> bool:
            return not self._reaches(range(self._low, count), limit)

        return _decide(float(self._cumulative[count - 1 - self._low]), limit.log, exact)

    def _exceeds(self, counts: range, limit: _Limit) -> bool:
        return self._scaled(counts, limit) > math.comb(self._total, self._draws)

    def _reaches(self, counts: range, limit: _Limit) -> bool:
        return self._scaled(counts, limit) >= math.comb(self._total, self._draws)

    def _scaled(self, counts: range, limit: _Limit) -> int:
        """Return the number of ways to have one of these counts, divided by the limit."""
        others = self._total - self._marked
        ways = sum(math.comb(self._marked, count) * math.comb(others, self._draws - count) for count in counts)
        return (ways * limit.num_devices) << limit.bits


def _first(is_true: Callable[[int], bool], last: int) -> int:
    """Return the first count from 0 to ``last`` for which a monotone condition is true, or ``last``."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if is_true(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _decide(log: float, log_limit: float, exact: Callable[[], bool]) -> bool:
    """Return whether a probability is below a limit, both as logarithms."""
    return exact() if abs(log - log_limit) < CLOSE else log < log_limit


def _log_choose(total: int, draws: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(draws + 1) - math.lgamma(total - draws + 1)

"""The privacy loss of releases on a device, in closed form: no accounting library.

A mechanism whose Renyi divergence of each integer order alpha >= 2 is at most ``alpha * rho + xi``, for neighbours in
both directions, has the loss (rho, xi). With xi = 0 this is zero-concentrated differential privacy. Losses of
releases add up, also if later releases depend on earlier ones. They never shrink: a device that shows its ledger
adds.

These are bounds without sampling. The coordinator's ledger (``fanin.server.privacy``) uses amplification where its
conditions hold, and is then smaller.

Reference:
    Canonne, Kamath, Steinke 2020, "The discrete Gaussian for differential privacy", theorem 14 (loss of a vector of
    discrete Gaussians) and proposition 12 (conversion). Agarwal, Kairouz, Liu 2021, "The Skellam mechanism for
    differentially private federated learning" (integer orders).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

ORDERS: Final = (*range(2, 513), *(1 << power for power in range(10, 24)))
"""Integer orders. Each gives a valid bound, so the least of them is one, too."""
DENOMINATOR: Final = 1 << 256
OUTWARD: Final = 1 + 1e-9
"""Factor that covers the rounding errors of float64, which are below 1e-13 here."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Bound ``alpha * rho + xi`` of the Renyi divergence of each integer order alpha >= 2.

    Sums are exact up to denominators of ``DENOMINATOR``; beyond, they are rounded up to multiples of its inverse. A
    ledger of 10,000 different releases would otherwise have denominators of a million bits.
    """

    rho: Fraction = Fraction(0)
    xi: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        if self.rho < 0 or self.xi < 0:
            raise ValueError(f"privacy loss: got rho {self.rho} and xi {self.xi}, expected numbers of at least 0")

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(_rounded_up(self.rho + other.rho), _rounded_up(self.xi + other.xi))

    def __mul__(self, num_releases: int) -> "Loss":
        return Loss(self.rho * num_releases, self.xi * num_releases)

    def epsilon(self, delta: float) -> float:
        """Return an epsilon for which the releases are (epsilon, delta)-differentially private.

        It is above 0 after the first release.
        """
        _check_delta(delta)
        if not self.rho and not self.xi:
            return 0.0
        rho, xi = float(self.rho) * OUTWARD, float(self.xi) * OUTWARD
        smallest: float = min(
            order * rho + xi + math.log1p(-1 / order) - math.log(delta * order) / (order - 1) for order in ORDERS
        )
        return max(smallest, rho) * OUTWARD


def _rounded_up(value: Fraction) -> Fraction:
    return value if value.denominator <= DENOMINATOR else Fraction(math.ceil(value * DENOMINATOR), DENOMINATOR)


def total(losses: Iterable[Loss]) -> Loss:
    """Return the loss of all releases."""
    return sum(losses, start=Loss())


def loss_of_discrete_gaussian(squared_sensitivity: int, parameter: Fraction) -> Loss:
    """Return the loss of a vector of discrete Gaussians added to integers.

    Args:
        squared_sensitivity: Square of the largest L2 norm of the difference of two neighbours, an integer.
        parameter: sigma**2 of each value.
    """
    return Loss(rho=Fraction(squared_sensitivity) / (2 * parameter))


def loss_of_skellam(squared_sensitivity: int, l1_sensitivity: int, variance: Fraction) -> Loss:
    """Return the loss of a vector of Skellam noise added to integers.

    Args:
        squared_sensitivity: Square of the largest L2 norm of the difference of two neighbours, an integer.
        l1_sensitivity: Largest L1 norm of the difference. Never above ``squared_sensitivity``, since the values are
            integers.
        variance: Variance of each value of the sum of all noise.
    """
    l2 = Fraction(squared_sensitivity)
    l1 = Fraction(min(l1_sensitivity, squared_sensitivity))
    gaussian = l2 / (2 * variance)
    # Either term bounds the excess over a Gaussian. The first one grows with the order, by alpha * l2 / (2
    # variance**2).
    linear = Loss(rho=gaussian, xi=3 * l1 / (2 * variance))
    mixed_xi = (6 * l1 - l2) / (4 * variance**2)
    mixed = Loss(rho=gaussian + l2 / (2 * variance**2), xi=max(mixed_xi, Fraction(0)))
    return min(linear, mixed, key=lambda loss: 8 * loss.rho + loss.xi)


def loss_of_gaussian_shares(squared_sensitivity: int, parameter: Fraction, num_devices: int, num_values: int) -> Loss:
    """Return the loss of a vector to which several devices added discrete Gaussians, each its own.

    A sum of discrete Gaussians is not one. It is close to one: each probability is off by at most a factor of exp(tau).

    Args:
        squared_sensitivity: Square of the largest L2 norm of the difference of two neighbours, an integer.
        parameter: sigma**2 of each value of one device.
        num_devices: The least number of devices whose noise is in the sum. More noise is only better.
        num_values: Length of the vector.
    """
    least = Fraction(squared_sensitivity) / (num_devices * parameter)
    # tau = 10 * sum over k < n of exp(-2 pi**2 sigma**2 k / (k + 1)); the first term is the largest. A float that
    # underflows is replaced by the smallest one above 0.
    term = max(math.exp(-(math.pi**2) * float(parameter)), 5e-324)
    tau = Fraction(OUTWARD) * 10 * (num_devices - 1) * Fraction(term)
    # (1/2) epsilon**2 concentrated, for the smaller of sqrt(least + tau d / 2) and sqrt(least) + tau
    # sqrt(d).
    near = least + tau * num_values / 2
    root = Fraction(math.sqrt(least) * OUTWARD) + tau * Fraction(math.sqrt(num_values) * OUTWARD)
    return Loss(rho=min(near, root**2) / 2)


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta: got {delta}, expected a number between 0 and 1, both excluded")

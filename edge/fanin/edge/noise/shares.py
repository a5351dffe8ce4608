"""The noise that devices add to a masked sum: each its share, scaled for the least number of honest survivors.

    device        clips, rounds to the public grid          integers q, q_1^2 + ... + q_d^2 <= S^2
                  adds its share                            variance v = z^2 S^2 / h of each value, rounded up
                  masks                                     in a ring that holds the sum and its noise
    coordinator   sums and unmasks                          sum of q + noise of variance h v at least

h is the least number of honest survivors. Devices that share all they know with the coordinator reveal their noise, so
they do not count. A sum with more honest devices has more noise, which is only better. Each side computes v from the
options of the Plan, and no side receives it.

Reference:
    Agarwal, Kairouz, Liu 2021, "The Skellam mechanism for differentially private federated learning". Kairouz, Liu,
    Steinke 2021, "The distributed discrete Gaussian mechanism for federated learning with secure aggregation".
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Final

from fanin.edge.noise.distributions import BLOCK_VALUES, DiscreteGaussian, Distribution, Skellam, draw, reach
from fanin.edge.noise.inversion import Int64s
from fanin.edge.noise.loss import Loss, loss_of_gaussian_shares, loss_of_skellam
from fanin.edge.rings import Ring
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import PrivacyTerms
from fanin.protos.plans import GAUSSIAN_SHARES, SKELLAM

STEPS: Final = 1 << 32
"""A variance is rounded up to a multiple of 1 / STEPS: exact on both sides, with a denominator that samplers have."""
WRAP_BITS: Final = 128
"""A sum wraps with a probability below 2^-128. That costs utility, and no privacy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseShare:
    """The noise of one device in the sum of a Round.

    Attributes:
        mechanism: One of ``MECHANISMS``.
        noise_multiplier: Least standard deviation of the noise of the honest survivors, divided by the sensitivity.
        squared_sensitivity: Largest sum of the squares of the integers of a device.
        num_values: Length of the vector.
        num_honest: The least number of devices whose noise is in a sum and is not known to the coordinator.

    Raises:
        ValueError: The mechanism is unknown, no device is honest, or the sampler does not reach the variance.
    """

    mechanism: str
    noise_multiplier: float
    squared_sensitivity: int
    num_values: int
    num_honest: int

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS:
            raise ValueError(f"mechanism: got {self.mechanism!r}, expected one of {', '.join(MECHANISMS)}")
        if self.num_honest < 1:
            raise ValueError(f"noise of devices: got {self.num_honest} honest devices, expected at least 1")
        _ = self.distribution

    @property
    def variance(self) -> Fraction:
        """The variance of each value of one device; of ``gaussian-shares``, the parameter sigma^2."""
        least = Fraction(self.noise_multiplier) ** 2 * self.squared_sensitivity / self.num_honest
        return Fraction(math.ceil(least * STEPS), STEPS)

    @property
    def distribution(self) -> Distribution:
        """The distribution of each value of one device."""
        return MECHANISMS[self.mechanism].distribution(self.variance)

    @property
    def loss(self) -> Loss:
        """The privacy loss of the sum of a Round, without sampling."""
        return MECHANISMS[self.mechanism].loss(self)

    def ring(self, num_devices: int, largest: int) -> Ring:
        """Return the smallest ring that holds the sum of a Round and its noise.

        Args:
            num_devices: The most devices of a sum.
            largest: The largest absolute value of an integer before its noise.

        Raises:
            ValueError: No ring of at most 64 bits holds the sum.
        """
        noise = reach(self.distribution, WRAP_BITS + self.num_values.bit_length(), num_devices)
        bits = (num_devices * largest + noise).bit_length() + 1
        return Ring(bits=-(-bits // 8) * 8)

    def noised(self, values: Int64s, seed: bytes) -> Iterator[Int64s]:
        """Yield values with the noise of a device, in consecutive pieces.

        Args:
            values: The integers (num_values,).
            seed: 32 bytes of the operating system's CSPRNG, which serve this vector alone and never leave the device.
        """
        distribution = self.distribution
        for first in range(0, values.size, BLOCK_VALUES):
            piece = values[first : first + BLOCK_VALUES]
            yield piece + draw(seed, distribution, first, piece.size)


def share_of(terms: PrivacyTerms, num_values: int, num_honest: int) -> NoiseShare:
    """Return the noise of one device under the terms of a Round.

    Raises:
        InvalidPlan: The mechanism has no noise on devices, or its sampler does not reach the noise.
    """
    try:
        return NoiseShare(
            mechanism=terms.mechanism,
            noise_multiplier=terms.noise_multiplier,
            squared_sensitivity=terms.squared_sensitivity,
            num_values=num_values,
            num_honest=num_honest,
        )
    except ValueError as exc:
        raise InvalidPlan(
            f"plan: privacy: a device cannot draw its share of the noise: {exc}; use codec.name int8, which has a "
            f"coarser grid, the mechanism {GAUSSIAN_SHARES}, a smaller noise_multiplier, or more survivors",
            code="FN-1687",
        ) from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMechanism:
    """A mechanism with noise on devices: the distribution of a variance, and the loss of the sum."""

    distribution: Callable[[Fraction], Distribution]
    loss: Callable[[NoiseShare], Loss]


def _skellam(share: NoiseShare) -> Loss:
    squared = share.squared_sensitivity
    # The L1 norm of a vector is at most sqrt(values) times its L2 norm.
    l1 = min(squared, math.isqrt(share.num_values * squared) + 1)
    return loss_of_skellam(squared, l1, share.num_honest * share.variance)


def _gaussian_shares(share: NoiseShare) -> Loss:
    return loss_of_gaussian_shares(share.squared_sensitivity, share.variance, share.num_honest, share.num_values)


MECHANISMS: Final[Mapping[str, SharedMechanism]] = MappingProxyType(
    {
        SKELLAM: SharedMechanism(distribution=Skellam, loss=_skellam),
        GAUSSIAN_SHARES: SharedMechanism(distribution=DiscreteGaussian, loss=_gaussian_shares),
    }
)
"""The mechanisms by name."""

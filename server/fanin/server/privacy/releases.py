"""What a Run releases: records of sensitivity, noise and sampling. Everything that leaves the coordinator is one of
them.

Neighbours differ by one device: all its Updates are there, or each of them is zero (add or remove, with a fixed
denominator). The sensitivity is that of the integers that are summed, so it contains the rounding to the grid.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from fanin.edge.noise.loss import Loss, loss_of_discrete_gaussian


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedSum:
    """A sum of integer vectors, with a discrete Gaussian added to each value.

    Attributes:
        squared_sensitivity: Square of the largest L2 norm of one device's integers.
        parameter: sigma**2 of each value, as in ``DiscreteGaussian``.
    """

    squared_sensitivity: int
    parameter: Fraction

    def __post_init__(self) -> None:
        if self.squared_sensitivity < 0 or self.parameter <= 0:
            raise ValueError(
                f"noised sum: got squared sensitivity {self.squared_sensitivity} and sigma squared {self.parameter}, "
                "expected at least 0 and a number above 0"
            )

    @property
    def loss(self) -> Loss:
        """Its privacy loss without sampling."""
        return loss_of_discrete_gaussian(self.squared_sensitivity, self.parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRelease:
    """Noised sums of one Round over devices that were drawn by independent coins.

    All sums of a Round belong into one record: they share one draw, so two records would claim the amplification twice.

    Attributes:
        sums: The sums: parameters, statistics, clip bits.
        sampling_rate: Probability with which each device of the roster takes part, above 0 and below 1.
    """

    sums: tuple[NoisedSum, ...]
    sampling_rate: float

    def __post_init__(self) -> None:
        if not self.sums:
            raise ValueError("sampled release: got no sum, expected at least one")
        if not 0 < self.sampling_rate < 1:
            raise ValueError(
                f"sampled release: got sampling rate {self.sampling_rate}, expected a number between 0 and 1, both "
                "excluded; a release without sampling is a PlainRelease"
            )

    @property
    def noise_multiplier(self) -> float:
        """sigma / sensitivity of one Gaussian with the same loss as all sums together, rounded down."""
        twice_rho = 2 * sum((each.loss.rho for each in self.sums), start=Fraction(0))
        return math.nextafter(1 / math.sqrt(twice_rho), 0) if twice_rho else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRelease:
    """A release to which each device may have contributed: no amplification is claimed.

    Attributes:
        loss: Its privacy loss, by a function of ``fanin.edge.noise.loss``; that of several sums is their total.
    """

    loss: Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianRelease:
    """A Gaussian of real numbers. No Run of fanin releases one; plans and tests compare with it.

    Attributes:
        noise_multiplier: sigma / sensitivity.
        sampling_rate: Probability with which each device takes part, above 0; 1 means no sampling.
    """

    noise_multiplier: float
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        if not self.noise_multiplier > 0 or not 0 < self.sampling_rate <= 1:
            raise ValueError(
                f"Gaussian release: got noise multiplier {self.noise_multiplier} and sampling rate "
                f"{self.sampling_rate}, expected a number above 0, and one above 0 and at most 1"
            )


Release = SampledRelease | PlainRelease | GaussianRelease

"""Adaptive clipping: the clip norm of the next Round, from a noised sum of one bit of each device.

The bit of a device is 1 if its change is within the clip norm C of the Round, and -1 if it was scaled down. With the
noised sum B of these bits, and a fixed number n of devices,

    b = 1/2 + B / 2n                        an estimate of the share of changes within C
    C <- C * exp(-eta * (b - gamma))        so C moves towards the quantile gamma of their norms

The bits are twice those of the paper, less 1, so that they are integers: its b - 1/2 has the sensitivity 1/2 and noise
of sigma_b, this one has the sensitivity 1 and noise of 2 sigma_b. A device that is absent adds 0, which is neither.

The noise multiplier z of the Plan is that of both sums together: with z_delta for the vector,

    1 / z^2 = 1 / z_delta^2 + 1 / (2 sigma_b)^2

Every machine gets the same norm, to the bit. The exponent is a fraction of integers. ``exp`` of a C library may differ
in its last bit; that of ``decimal`` is correctly rounded by its specification, and so are its quotients and products.

Reference:
    Andrew, Thakkar, McMahan, Ramaswamy 2021, "Differentially private learning with adaptive clipping",
    arXiv:1905.03871, algorithm 1 and theorem 1.
"""

import math
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from typing import Final

from fanin.protos.plans.privacy import MAX_CLIP_NORM, MIN_CLIP_NORM

DIGITS: Final = 60
"""Decimal digits of each step. A float64 has 17."""
CONTEXT: Final = Context(prec=DIGITS, rounding=ROUND_HALF_EVEN, Emin=-(10**6), Emax=10**6)
STEPS: Final = 1 << 32
"""The squared noise multiplier of the vector is rounded up to a multiple of 1 / STEPS, with a denominator that samplers
have. More noise is only better."""
BIT_SENSITIVITY: Final = 1
"""Largest contribution of a device to the sum of the bits."""


def squared_multiplier(noise_multiplier: float, bits_noise: float) -> Fraction:
    """Return z_delta^2: the squared standard deviation of the noise of the vector, divided by the sensitivity.

    Args:
        noise_multiplier: z, that of vector and bits together.
        bits_noise: sigma_b; 0: the Round has no bits, and z_delta is z.

    Raises:
        ValueError: The noise of the bits alone costs more than ``noise_multiplier`` allows.
    """
    squared = Fraction(noise_multiplier) ** 2
    if not bits_noise:
        return squared
    rest = 1 / squared - 1 / bits_parameter(bits_noise)
    if rest <= 0:
        raise ValueError(
            f"got bits_noise {bits_noise:g} with noise_multiplier {noise_multiplier:g}, expected more than "
            f"{noise_multiplier / 2:g}"
        )
    return Fraction(math.ceil(STEPS / rest), STEPS)


def bits_parameter(bits_noise: float) -> Fraction:
    """Return the squared standard deviation of the noise in the sum of the bits, which are 1 or -1."""
    return (2 * Fraction(bits_noise)) ** 2


def next_norm(clip_norm: float, bits: int, num_devices: int, quantile: float, rate: float) -> float:
    """Return the clip norm of the next Round, within the range of a clip norm.

    Args:
        clip_norm: That of this Round.
        bits: The noised sum of the bits.
        num_devices: The fixed number of devices by which the mean divides.
        quantile: gamma, the share of changes that should be within the norm.
        rate: eta.
    """
    share = Fraction(1, 2) + Fraction(bits, 2 * num_devices)
    exponent = -Fraction(rate) * (share - Fraction(quantile))
    factor = CONTEXT.exp(CONTEXT.divide(Decimal(exponent.numerator), Decimal(exponent.denominator)))
    norm = float(CONTEXT.multiply(Decimal(clip_norm), factor))
    return min(max(norm, MIN_CLIP_NORM), MAX_CLIP_NORM)

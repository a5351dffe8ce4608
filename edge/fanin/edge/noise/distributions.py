"""The distributions of privacy noise, and ``draw``: integers by position, from a seed.

The noise of a vector is one sequence of integers. Its values are drawn in blocks of ``BLOCK_VALUES``, and each block
has random words of its own (``streams``). So any slice of the sequence can be drawn alone, in memory for a few
blocks, and every machine
and every process gets the same integers: a successor of a coordinator, or a device after a restart.

All three distributions are exact: the probability of each integer is the one in the docstring, not an approximation.
The only assumption is that the keystream of ChaCha20 is random.

Reference:
    Canonne, Kamath, Steinke 2020, "The discrete Gaussian for differential privacy", NeurIPS.
    Agarwal, Kairouz, Liu 2021, "The Skellam mechanism for differentially private federated learning", NeurIPS.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final, Protocol

import numpy as np

from fanin.edge.noise.inversion import Int64s, Inversion
from fanin.edge.noise.loss import OUTWARD
from fanin.edge.noise.poisson import poisson_window
from fanin.edge.noise.streams import BlockStream, key_of
from fanin.edge.noise.strips import Energy, StripSampler

BLOCK_VALUES: Final = 1 << 15
"""Values of a block: its arrays fit in a cache of the processor."""
MAX_VARIANCE: Final = 1 << 60
"""Largest variance of a discrete Gaussian: products of 64 bits hold twice its square root, squared."""
MAX_SCALE: Final = 1 << 30
"""Largest scale of a discrete Laplace."""
MAX_SKELLAM_VARIANCE: Final = 1 << 28
"""Largest variance of a Skellam distribution. Its tables grow with the square root: 150,000 entries here."""
MAX_DENOMINATOR: Final = 1 << 128
"""Largest denominator of a parameter: the square of a float64 near 1 fits."""
CACHED_SAMPLERS: Final = 8


class BlockSampler(Protocol):
    """Draws the values of one block."""

    def block(self, stream: BlockStream, num_values: int) -> Int64s:
        """Return the first values of the block whose words ``stream`` has."""
        ...


@dataclass(frozen=True, slots=True)
class DiscreteGaussian:
    """P(x) is proportional to exp(-x**2 / (2 * parameter)) on the integers.

    Attributes:
        parameter: sigma**2. The variance is slightly below it, by less than 1 part in 10**7 from ``parameter`` = 1 on.
    """

    parameter: Fraction

    def __post_init__(self) -> None:
        _check("sigma squared of a discrete Gaussian", self.parameter, MAX_VARIANCE)

    @property
    def name(self) -> str:
        """Kind and parameter, as the key of the random words contains them."""
        return f"discrete-gaussian {self.parameter.numerator}/{self.parameter.denominator}"


@dataclass(frozen=True, slots=True)
class DiscreteLaplace:
    """P(x) is proportional to exp(-abs(x) / scale) on the integers: the two-sided geometric distribution."""

    scale: Fraction

    def __post_init__(self) -> None:
        _check("scale of a discrete Laplace", self.scale, MAX_SCALE)

    @property
    def name(self) -> str:
        """Kind and parameter, as the key of the random words contains them."""
        return f"discrete-laplace {self.scale.numerator}/{self.scale.denominator}"


@dataclass(frozen=True, slots=True)
class Skellam:
    """The difference of two independent Poisson variables, each of mean ``variance / 2``.

    Sums of independent Skellam variables are Skellam: the sum of the noise of n devices has n times the variance of
    one.
    """

    variance: Fraction

    def __post_init__(self) -> None:
        _check("variance of a Skellam distribution", self.variance, MAX_SKELLAM_VARIANCE)

    @property
    def name(self) -> str:
        """Kind and parameter, as the key of the random words contains them."""
        return f"skellam {self.variance.numerator}/{self.variance.denominator}"


Distribution = DiscreteGaussian | DiscreteLaplace | Skellam


def draw(seed: bytes, distribution: Distribution, start: int, count: int) -> Int64s:
    """Return the values ``start`` to ``start + count`` of a sequence of noise, as int64.

    Args:
        seed: 32 bytes of a CSPRNG, for one vector of one release: derive one for each (HKDF), and never use it again
            for another vector.
        distribution: The distribution of each value; values are independent.
        start: Position of the first value, from 0 on. A multiple of ``BLOCK_VALUES`` draws no value in vain.
        count: Number of values.

    Raises:
        ValueError: The seed does not have 32 bytes, or ``start`` or ``count`` is negative.
    """
    if start < 0 or count < 0:
        raise ValueError(f"draw: got start {start} and count {count}, expected numbers from 0 on")
    values = np.empty(count, dtype=np.int64)
    for begin, part in _parts(seed, distribution, start, count):
        values[begin : begin + len(part)] = part
    return values


def reach(distribution: Distribution, bits: int, num_terms: int = 1) -> int:
    """Return a number t such that a sum of values is beyond -t .. t with a probability of at most 2**-bits.

    Values of any size can occur. Head-room for a sum with noise therefore has a probability of failure; a wrapped value
    costs utility, but no privacy.

    Args:
        distribution: The distribution.
        bits: At least 1. For n sums, add log2(n).
        num_terms: Number of independent values in a sum.
    """
    # P(abs(x) >= t) <= 2 exp(-e) for the exponent e below.
    exponent = (bits + 1) * math.log(2)
    match distribution:
        case DiscreteGaussian(parameter):
            # It is subgaussian with sigma (Canonne, Kamath, Steinke 2020), and sums add up their sigma**2.
            return math.ceil(math.sqrt(2 * parameter * num_terms * exponent) * OUTWARD)
        case DiscreteLaplace(scale):
            # Each of the terms is within its own bound.
            return math.ceil(num_terms * scale * (exponent + math.log(num_terms)) * OUTWARD)
        case Skellam(variance):
            # Bernstein: the logarithm of the moment generating function is variance * (cosh(h) - 1), and
            # cosh(h) - 1 <= h**2 / (2 (1 - h / 3)), so e = t**2 / (2 (variance + t / 3)).
            third = exponent / 3
            return math.ceil((third + math.sqrt(third**2 + 2 * variance * num_terms * exponent)) * OUTWARD)


def _parts(seed: bytes, distribution: Distribution, start: int, count: int) -> Iterator[tuple[int, Int64s]]:
    key = key_of(seed, distribution.name)
    sampler = _sampler(distribution)
    position = start
    while position < start + count:
        block, offset = divmod(position, BLOCK_VALUES)
        end = min(BLOCK_VALUES, offset + start + count - position)
        yield position - start, sampler.block(BlockStream(key, block), end)[offset:]
        position += end - offset


@lru_cache(maxsize=CACHED_SAMPLERS)
def _sampler(distribution: Distribution) -> BlockSampler:
    match distribution:
        case DiscreteGaussian(parameter):
            scale = math.isqrt(int(parameter))
            return StripSampler(Energy(unit=1 / (2 * parameter), square=1, linear=0, scale=scale))
        case DiscreteLaplace(scale_of_laplace):
            return StripSampler(Energy(unit=1 / scale_of_laplace, square=0, linear=1, scale=int(scale_of_laplace)))
        case Skellam(variance):
            return SkellamSampler(variance)


class SkellamSampler:
    """A sampler of a Skellam distribution: word 0 is the first Poisson variable, word 1 the second."""

    def __init__(self, variance: Fraction) -> None:
        self._poisson = Inversion(lambda bits: poisson_window(variance / 2, bits))

    def block(self, stream: BlockStream, num_values: int) -> Int64s:
        """Return the first values of a block."""
        words = stream.next_words(num_values)
        first = self._poisson.outcomes(words[:, 0], lambda index: stream.more_bits(0, index))
        return first - self._poisson.outcomes(words[:, 1], lambda index: stream.more_bits(1, index))


def _check(subject: str, value: Fraction, largest: int) -> None:
    if not isinstance(value, Fraction):
        raise ValueError(f"{subject}: got {value!r}, expected a Fraction, so that no rounding is hidden")
    if not 0 < value <= largest:
        raise ValueError(f"{subject}: got {float(value):.6g}, expected a number above 0, at most {largest}")
    if value.denominator > MAX_DENOMINATOR:
        raise ValueError(f"{subject}: got a denominator of {value.denominator.bit_length()} bits, expected at most 129")

"""Clipped integers with a proven L2 norm: the sensitivity of a sum with privacy noise.

The grid comes from the clip norm and the number of bits, never from the data. Rounding to it adds to the norm, so the
bound is that of the integers, and it holds for every change: integers above it are rounded again, and at last towards
zero. A coordinator that sees the integers compares ``squared_norm`` with the same bound.

Reference:
    Kairouz, Liu, Steinke 2021, "The distributed discrete Gaussian mechanism for federated learning with secure
    aggregation", arXiv:2102.06387, conditional randomized rounding (algorithm 1 and proposition 26).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fanin.edge.noise.inversion import Int64s
from fanin.edge.tensors import Float32s

MAX_BITS: Final = 32
CLIP_BITS: Final = 20
"""Most bits of a clipped value. A clip norm is then 2^18 steps or more, so the rounding of a billion values adds 0.2 %
to the sensitivity at most. With more bits the noise would leave the range of its sampler."""
ROUNDINGS: Final = 8
"""Stochastic roundings before rounding towards zero. One is above the bound with a probability of at most 0.61, and for
more than a few values far less."""
SLICE_VALUES: Final = 1 << 16
"""Squares of half a value are added up over so many values in 64 bits: below 2**48."""
HALF_BITS: Final = 16
ROUNDED_SHARE: Final = Fraction(1, 5)
"""Largest share of d / 4 steps^2 in the squared clip norm: the sensitivity grows by a tenth at most. The share is above
a quarter of this, because steps are powers of two."""
LEAST_RANGE: Final = 25
"""``int8`` reaches 127 steps, and a step is at least sqrt(1/5) of the root mean square."""
Signed = npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class ClipGrid:
    """The public grid of a clip norm.

    Attributes:
        clip_norm: Largest L2 norm of a change before it is rounded.
        bits: Bits of an encoded value, including the sign.
        num_values: Length of the vector: all trained parameters, a tied tensor once.
    """

    clip_norm: float
    bits: int
    num_values: int

    def __post_init__(self) -> None:
        if not 0 < self.clip_norm < math.inf or not 2 <= self.bits <= MAX_BITS or self.num_values < 1:
            raise ValueError(
                f"clip grid: got clip norm {self.clip_norm}, {self.bits} bits and {self.num_values} values, expected "
                f"a finite norm above 0, 2 to {MAX_BITS} bits and at least one value"
            )

    @classmethod
    def of(cls, clip_norm: float, codec_bits: int, num_values: int) -> "ClipGrid":
        """Return the grid of a Round whose codec has this number of bits."""
        return cls(clip_norm, min(codec_bits, CLIP_BITS), num_values)

    @property
    def largest(self) -> int:
        """The largest encoded value."""
        return (1 << (self.bits - 1)) - 1

    @property
    def slack(self) -> float:
        """The sensitivity, divided by the clip norm: what rounding to the grid costs. At least 1."""
        return math.sqrt(self.squared_sensitivity) / (self.clip_norm * 2.0**-self.exponent)

    @property
    def exponent(self) -> int:
        """The step is 2**exponent: the finest on which a vector with one value of the clip norm fits.

        With few bits and many values, rounding would then be most of the sensitivity. A finer step is better: one with
        which rounding adds ``ROUNDED_SHARE`` of the squared norm at most. Larger values are cut, which the norm
        survives: the range still has ``LEAST_RANGE`` times the root mean square of a vector of the clip norm.
        """
        exponent = math.frexp(self.clip_norm)[1] - (self.bits - 1)
        while Fraction(self.clip_norm) > self.largest * Fraction(2) ** exponent:
            exponent += 1
        if self.largest >= LEAST_RANGE * math.sqrt(1 / ROUNDED_SHARE):
            while (
                Fraction(self.num_values, 4) * Fraction(4) ** exponent > ROUNDED_SHARE * Fraction(self.clip_norm) ** 2
            ):
                exponent -= 1
        return exponent

    @property
    def squared_sensitivity(self) -> int:
        """Largest sum of squares of the integers: c**2 + d / 4 + c + sqrt(d) / 2, for c = clip norm / step.

        Independent rounding of d values is within it with a probability of about 1 - exp(-1/2) or more. All integers
        that ``clipped`` returns are.
        """
        steps = Fraction(self.clip_norm) / Fraction(2) ** self.exponent
        root = Fraction(math.isqrt(self.num_values), 2)
        return math.floor(steps * steps + Fraction(self.num_values, 4) + steps + root)

    def clipped(self, change: Float32s, rng: np.random.Generator) -> Int64s:
        """Return the integers of a change, whose sum of squares is at most ``squared_sensitivity``.

        Args:
            change: The values (num_values,).
            rng: Rounds. The bound holds whatever it draws.

        Raises:
            ValueError: The number of values is wrong, or a value is not finite.
        """
        if change.shape != (self.num_values,):
            raise ValueError(f"clip: got shape {change.shape}, expected ({self.num_values},)")
        values = change.astype(np.float64)
        norm = norm_of(change)
        if norm > self.clip_norm:
            values *= self.clip_norm / norm
        values = np.ldexp(values, -self.exponent)
        limit, bound = self.largest, self.squared_sensitivity
        for _ in range(ROUNDINGS):
            rounded = np.clip(np.floor(values + rng.random(self.num_values)), -limit, limit).astype(np.int64)
            if squared_norm((rounded,)) <= bound:
                return rounded
        # Towards zero, the norm is at most clip norm / step, up to the rounding of float64: less than the slack.
        rounded = np.clip(np.trunc(values), -limit, limit).astype(np.int64)
        if squared_norm((rounded,)) > bound:
            raise AssertionError("clip: integers rounded towards zero are within the bound")
        return rounded


def norm_of(change: Float32s) -> float:
    """Return the L2 norm of a change. Raises ValueError for a value that is not finite."""
    values = change.astype(np.float64)
    largest = float(np.max(np.abs(values)))
    if not math.isfinite(largest):
        raise ValueError("clip: got a value that is not finite, expected finite values")
    # Divided by the largest value first, so that no square overflows or vanishes.
    return largest * float(np.sqrt(np.sum(np.square(values / largest)))) if largest else 0.0


def largest_of(codec_bits: int) -> int:
    """Return the largest clipped value of a codec with this number of bits."""
    return (1 << (min(codec_bits, CLIP_BITS) - 1)) - 1


def squared_norm(pieces: Iterable[Signed]) -> int:
    """Return the exact sum of squares of integers of at most 32 bits, in consecutive pieces of any length."""
    total = 0
    for piece in pieces:
        for first in range(0, piece.size, SLICE_VALUES):
            values = piece[first : first + SLICE_VALUES].astype(np.int64)
            high, low = values >> HALF_BITS, values & ((1 << HALF_BITS) - 1)
            total += int(np.sum(high * high)) << (2 * HALF_BITS)
            total += int(np.sum(high * low)) << (HALF_BITS + 1)
            total += int(np.sum(low * low))
    return total

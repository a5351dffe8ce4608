"""Exact samples of densities exp(-E(|x|)) on the integers, for the energies of discrete Gaussian and discrete Laplace.

The half-line 0, 1, 2, ... is cut into strips of m = 2**r integers. A candidate is a strip, a place in it and a sign::

    word 0   64 bits u       the strip b, by exact inversion of the weights exp(-E(b m))
    word 1   32 bits v       acceptance with probability exp(-t), t = E(b m + j) - E(b m), most significant bits
              1 bit          the sign; a negative zero is rejected
             31 bits         the lowest r of them: the place j

So x = sign * (b m + j) has a probability proportional to exp(-E(|x|)). The strip is at most a sixteenth of the scale
wide, and about one candidate in thirty is rejected. With a scale below 32, m is 1 and every candidate but a negative
zero is accepted.

v is compared with bounds of exp(-t):

1. with its least value in the strip, from a table: nineteen in twenty are accepted here;
2. with a fixed-point value of 32 bits that is off by at most ``MARGIN`` units (proof below);
3. with integer bounds of ``bounds.exp_minus``, to as many bits as the comparison needs.

Step 3 decides one candidate in billions. No step uses a floating-point number, so each machine accepts the same
candidates.

Fixed point. Write t = a rho for an integer a and a rational rho. With a' = floor(a / 2**h) < 2**31 and c = floor(rho
2**(h + 62)), the product a' c is below 2**62, since t < 1. t 2**32 exceeds T = floor(a' c / 2**30) by less than 1
(the floor) + 2**32 rho 2**h (the rest of a) + a' 2**-30 (the floor of c), and ``_fixed_point`` chooses h so that this
is below 8. exp(-T / 2**32) is a table entry of the first 10 bits, off by less than 2, times a cubic in the last 22
bits, off by less than 4: the rest of the series is below 2**-44, and each of three floors costs less than 1. The
product and its floor are off by less than 7. In all: less than 15 units of 2**-32.

Reference:
    Karney 2016, "Sampling exactly from the normal distribution", ACM TOMS 42(1), for strips of a discrete Gaussian.
    Canonne, Kamath, Steinke 2020, "The discrete Gaussian for differential privacy", for the distributions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Final

import numpy as np

from fanin.edge.noise.bounds import exp_minus
from fanin.edge.noise.inversion import Int64s, Inversion, Window
from fanin.edge.noise.streams import BlockStream, MoreBits, UInt64s

ACCEPT_BITS: Final = 32
STRIPS_PER_SCALE: Final = 16
MARGIN: Final = 16
"""Units of 2**-32 by which the fixed-point value of exp(-t) is off, at most; the proof gives 15."""
EXTRA_CANDIDATES: Final = 64
TABLE_BITS: Final = 10
REST_BITS: Final = ACCEPT_BITS - TABLE_BITS
PRODUCT_BITS: Final = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """E(x) = unit * (square * x**2 + linear * x) for x >= 0.

    Attributes:
        unit: A positive rational.
        square: 0 or 1.
        linear: 0 or 1.
        scale: About where E grows by 1: the standard deviation, or the scale of a Laplace distribution.
    """

    unit: Fraction
    square: int
    linear: int
    scale: int

    def at(self, x: int) -> Fraction:
        """Return E(x)."""
        return self.unit * (self.square * x * x + self.linear * x)


class StripSampler:
    """A sampler of one density. Building it takes a few milliseconds; it holds tables of a few hundred KB."""

    def __init__(self, energy: Energy) -> None:
        self._energy = energy
        self._place_bits = max(0, (energy.scale // STRIPS_PER_SCALE).bit_length() - 1)
        self.width = 1 << self._place_bits
        self._strips = Inversion(self._window)
        self._num_strips = self._strips.num_outcomes
        least = [self._acceptance(strip, self.width - 1, ACCEPT_BITS)[0] for strip in range(self._num_strips)]
        self._least = np.array(least, dtype=np.uint64)
        self._shift, self._factor = self._fixed_point()
        # Only the sizes of batches depend on it, and no value does.
        weights = self._window(ACCEPT_BITS).lows
        self._candidates_per_value = 17 / 16 / (1 - weights[0] / (2 * self.width * sum(weights)))

    def _window(self, bits: int) -> Window:
        """Return bounds of the weights exp(-E(b m)) of the strips b = 0, 1, 2, ..."""
        work = bits + 16
        lows: list[int] = []
        highs: list[int] = []
        while True:
            exponent = self._energy.at(len(lows) * self.width)
            low, high = exp_minus(exponent.numerator, exponent.denominator, work)
            lows.append(low)
            highs.append(high)
            if high < 1 << 8:
                break
        # E is convex, so the weights of later strips fall at least as fast as from the last strip to the next one.
        last = (len(lows) - 1) * self.width
        fall = self._energy.at(last + self.width) - self._energy.at(last)
        ratio = exp_minus(fall.numerator, fall.denominator, 32)[1]
        tail = -(-highs[-1] * ratio // ((1 << 32) - ratio))
        return Window(first=0, lows=lows, highs=highs, head=0, tail=tail)

    def _acceptance(self, strip: int, place: int, bits: int) -> tuple[int, int]:
        """Return bounds of ``2**bits * exp(-t)`` of a candidate."""
        begin = strip * self.width
        loss = self._energy.at(begin + place) - self._energy.at(begin)
        return exp_minus(loss.numerator, loss.denominator, bits)

    def _fixed_point(self) -> tuple[int, int]:
        """Return h and c of the module's docstring."""
        largest = self._multiples(self._num_strips - 1, self.width - 1)
        assert self._energy.unit * largest < 1, "a strip is at most a sixteenth of the scale wide"
        shift = max(0, largest.bit_length() - 31)
        # rho * 2**h * 2**32 < 4: a' >= 2**30 when h > 0, and rho a < 1. And a' * 2**-30 < 2.
        factor = int(self._energy.unit * (1 << (shift + PRODUCT_BITS)))
        return shift, factor

    def _multiples(self, strip: int, place: int) -> int:
        """Return a = t / rho of one candidate."""
        square, linear = self._energy.square, self._energy.linear
        return square * (2 * strip * self.width * place + place * place) + linear * place

    @cached_property
    def _table(self) -> UInt64s:
        """floor(2**32 exp(-i / 2**10)), at most 2**32 - 1, so that products fit in 64 bits."""
        entries = (exp_minus(index, 1 << TABLE_BITS, ACCEPT_BITS)[0] for index in range(1 << TABLE_BITS))
        return np.array([min(entry, (1 << ACCEPT_BITS) - 1) for entry in entries], dtype=np.uint64)

    def _fixed_acceptances(self, strips: Int64s, places: Int64s) -> Int64s:
        """Return 2**32 exp(-t), off by less than ``MARGIN``."""
        square, linear = self._energy.square, self._energy.linear
        multiples = linear * places
        if square:
            multiples = multiples + places * (2 * self.width * strips + places)
        products = (multiples >> self._shift).astype(np.uint64) * np.uint64(self._factor)
        losses = products >> np.uint64(PRODUCT_BITS - ACCEPT_BITS)
        rest = losses & np.uint64((1 << REST_BITS) - 1)
        second = (rest * rest) >> np.uint64(ACCEPT_BITS + 1)
        third = ((rest * rest) >> np.uint64(ACCEPT_BITS)) * rest // np.uint64(6 << ACCEPT_BITS)
        series = np.uint64(1 << ACCEPT_BITS) - rest + second - third
        acceptances: UInt64s = (self._table[losses >> np.uint64(REST_BITS)] * series) >> np.uint64(ACCEPT_BITS)
        return np.asarray(acceptances, dtype=np.int64)

    def block(self, stream: BlockStream, num_values: int) -> Int64s:
        """Return the first values of a block: those of its accepted candidates, in their order."""
        parts: list[Int64s] = []
        num_accepted = num_candidates = 0
        while num_accepted < num_values:
            missing = num_values - num_accepted
            num_next = int(missing * self._candidates_per_value) + EXTRA_CANDIDATES
            part = self._accepted(stream, num_candidates, num_next)
            parts.append(part)
            num_candidates += num_next
            num_accepted += len(part)
        return (parts[0] if len(parts) == 1 else np.concatenate(parts))[:num_values]

    def _accepted(self, stream: BlockStream, start: int, num_candidates: int) -> Int64s:
        words = stream.next_words(num_candidates)
        second = words[:, 1]
        strips = self._strips.outcomes(words[:, 0], lambda index: stream.more_bits(0, start + index))
        signs_and_places = second.astype(np.int64) & ((1 << ACCEPT_BITS) - 1)
        places = signs_and_places & (self.width - 1)
        levels = second >> np.uint64(ACCEPT_BITS)
        values = strips * self.width + places
        is_negative = signs_and_places >> (ACCEPT_BITS - 1)
        is_accepted = (values | (is_negative ^ 1)) != 0
        if self.width > 1:
            known = np.minimum(strips, self._num_strips - 1)
            is_open = (levels >= self._least[known]) | (strips > known)
            open_indices = np.flatnonzero(is_open)
            is_accepted[open_indices] &= self._decide(
                strips[open_indices],
                places[open_indices],
                levels[open_indices].astype(np.int64),
                lambda index: stream.more_bits(1, start + int(open_indices[index])),
            )
        return np.asarray(((values ^ -is_negative) + is_negative)[is_accepted], dtype=np.int64)

    def _decide(
        self, strips: Int64s, places: Int64s, levels: Int64s, more_bits: Callable[[int], MoreBits]
    ) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Return whether v < exp(-t) of each candidate, for the real number v that begins with ``levels``."""
        acceptances = self._fixed_acceptances(np.minimum(strips, self._num_strips - 1), places)
        is_accepted = levels < acceptances
        is_close = (np.abs(levels - acceptances) <= MARGIN + 1) | (strips >= self._num_strips)
        for index in np.flatnonzero(is_close).tolist():
            is_accepted[index] = self.accepts(
                (int(strips[index]), int(places[index])), int(levels[index]), more_bits(index)
            )
        return np.asarray(is_accepted)

    def accepts(self, candidate: tuple[int, int], level: int, more: MoreBits) -> bool:
        """Return whether v < exp(-t) for (strip, place), where v begins with the 32 bits of ``level``."""
        num_words = 0
        while True:
            bits = ACCEPT_BITS + 64 * num_words
            value = (level << (64 * num_words)) | (more(num_words) if num_words else 0)
            low, high = self._acceptance(*candidate, bits)
            if value + 1 <= low:
                return True
            if value >= high:
                return False
            num_words += 1

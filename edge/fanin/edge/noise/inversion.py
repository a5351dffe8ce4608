"""Exact inversion: outcomes with real probabilities from uniform bits, decided by integer bounds.

A uniform real number u in [0, 1) chooses the outcome b with C(b-1) <= u < C(b), where C is the cumulative distribution.
The probabilities are irrational, so C is enclosed by integer bounds, and u is known to 64 bits at first:

1. A table has ``floor(2**64 * C)`` and ``ceil(2**64 * C)`` of each outcome, from proven bounds of the weights.
2. A 64-bit word that falls between two enclosures decides the outcome.
3. A word inside an enclosure, or behind the last outcome of the table, is extended by 64 bits, and the bounds are
   computed to as many bits more. This repeats until the outcome is decided. Its probability is the number of outcomes
   times 2**-63, so it costs no time; without it, the sampler would not be exact.

The result is a sample of the exact distribution: each step decides for the real number u.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from fanin.edge.noise.streams import MoreBits, UInt64s

Int64s = npt.NDArray[np.int64]

WORD_BITS: Final = 64
CELL_BITS: Final = (14, 20)
"""Fewest and most first bits of a word that look up its outcome directly, in cells of 4 bytes.

With two to four cells an outcome, they decide nine words in ten.
"""
UNDECIDED: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Bounds of weights: those of the outcomes ``first``, ``first + 1``, ..., and of the sums on both sides of them.

    The weights need no normalization: probabilities are their shares.

    Attributes:
        first: The first outcome with bounds of its own.
        lows: Lower bounds of the weights, integers in one scale.
        highs: Upper bounds.
        head: Upper bound of the sum of the weights of all outcomes before ``first``.
        tail: Upper bound of the sum of the weights of all outcomes after the last; above 0 if there are any.
    """

    first: int
    lows: list[int]
    highs: list[int]
    head: int
    tail: int

    def thresholds(self, bits: int) -> tuple[list[int], list[int]]:
        """Return ``floor(2**bits * C)`` of lower bounds of C, and ``ceil(2**bits * C)`` of upper bounds.

        Entry 0 is that of the outcome before ``first``, entry i + 1 that of ``first + i``.
        """
        below_low = list(accumulate(self.lows, initial=0))
        below_high = list(accumulate(self.highs, initial=self.head))
        sum_low, sum_high = below_low[-1], below_high[-1] - self.head
        scale = 1 << bits
        lows = [
            scale * low // (low + (sum_high - (high - self.head)) + self.tail)
            for low, high in zip(below_low, below_high, strict=True)
        ]
        highs = [-(-scale * high // (high + (sum_low - low))) for low, high in zip(below_low, below_high, strict=True)]
        return lows, [min(high, scale) for high in highs]


class Inversion:
    """A table of outcomes.

    Args:
        window: The function of a number of bits that returns bounds of the weights. Their enclosures of C must be
            narrower than 2**-bits, times a few, and the sums on both sides of the window below 2**-bits, times a few.
    """

    def __init__(self, window: Callable[[int], Window]) -> None:
        self._window = window
        base = window(WORD_BITS)
        lows, highs = base.thresholds(WORD_BITS)
        self.first = base.first
        self.num_outcomes = len(base.lows)
        last = (1 << WORD_BITS) - 1
        # Entry i decides between outcomes first + i - 1 and first + i. A word at the largest threshold is undecided.
        self._lows = np.array([min(low, last) for low in lows], dtype=np.uint64)
        self._highs = np.array([min(high, last) for high in highs], dtype=np.uint64)
        fewest, most = CELL_BITS
        cell_bits = max(fewest, min(most, (2 * self.num_outcomes).bit_length()))
        self._shift = np.uint64(WORD_BITS - cell_bits)
        begins = np.arange(1 << cell_bits, dtype=np.uint64) << self._shift
        at_begin, at_end = self._decide(begins), self._decide(begins | ((np.uint64(1) << self._shift) - np.uint64(1)))
        self._cells = np.where(at_begin == at_end, at_begin, UNDECIDED).astype(np.int32)

    def _decide(self, words: UInt64s) -> Int64s:
        """Return the index of each word's outcome, or ``UNDECIDED``."""
        indices = np.searchsorted(self._lows, words, side="right").astype(np.int64)
        # Thresholds up to ``index - 1`` are at or below the word; the outcome is ``first + index - 1``.
        is_decided = (indices >= 1) & (indices <= self.num_outcomes)
        is_decided &= words >= self._highs[np.maximum(indices - 1, 0)]
        return np.asarray(np.where(is_decided, indices - 1, UNDECIDED), dtype=np.int64)

    def outcomes(self, words: UInt64s, more_bits: Callable[[int], MoreBits]) -> Int64s:
        """Return the outcome of each uniform word.

        Args:
            words: (num_words,) uniform 64-bit words.
            more_bits: The function of a word's position that returns the bits that follow it.
        """
        indices = self._cells[words >> self._shift].astype(np.int64)
        open_positions = np.flatnonzero(indices == UNDECIDED)
        if open_positions.size:
            decided = self._decide(words[open_positions])
            indices[open_positions] = decided
            for position in open_positions[decided == UNDECIDED].tolist():
                indices[position] = self.resolve(int(words[position]), more_bits(position)) - self.first
        return np.asarray(indices + self.first)

    def resolve(self, word: int, more: MoreBits) -> int:
        """Return the outcome of a word that 64 bits do not decide."""
        num_words = 0
        while True:
            num_words += 1
            bits = WORD_BITS * (1 + num_words)
            value = (word << (WORD_BITS * num_words)) | more(num_words)
            window = self._window(bits)
            lows, highs = window.thresholds(bits)
            index = bisect_right(lows, value)
            if 1 <= index <= len(window.lows) and value >= highs[index - 1]:
                return window.first + index - 1

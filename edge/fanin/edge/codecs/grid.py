"""The grid: one power-of-two step per block, so that updates are integers and their sum is exact.

A block is one tensor, and its step is 2^exponent. A device may encode a block ``shift`` bits coarser. With powers of
two ``q * step`` is exact in floating point, and a coarser step is a left shift of the integer sum.

A codec with few bits uses W, the largest shift that the Plan allows, as additional range. The coordinator chooses a
finer grid, by at most W bits. Each device then chooses the finest step with which its update fits. So its values use
all of their bits, although the coordinator does not know their size in advance. ``fixed32`` has enough bits without W.

The next grid follows the *reach* of a block: the largest magnitude that more than a third of a Round's Updates attain.
The coordinator measures it in the payloads. A device's counts, losses and weight, and the mean, do not move the grid,
because one device can set them to any value. Laws (tests/laws/test_grid.py):

- If at most a third of the Updates are malicious, the reach stays between the smallest and the largest reach of the
  honest devices. Assume that these differ by at most 2^4 in a block. Then over any number of Rounds the grid stays
  within 2^4 of the grid of the honest devices alone.
- For any set of Updates, a block becomes at most 2 bits coarser or finer per Round. So two sets of Updates of the same
  Round lead to grids within 2^4 of each other.

All rules are pure functions of the parent Version and the closed set of a Round. So every coordinator, every restart
and ``fanin verify`` compute the same grid.
"""

import math
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from fanin.edge.codecs.fixed import Integers
from fanin.edge.tensors import TensorTable

MIN_EXPONENT: Final = -120
MAX_EXPONENT: Final = 60
"""Between these limits steps are normal float32 numbers, with room for a shift, for models of any scale."""
FIRST_RANGE: Final = 1.0
"""Magnitude that a block's update may have in a first Round, even if all its parameters are zero."""
FIRST_BITS: Final = 1
"""Bits that a first Round leaves above that range."""
FIRST_RESOLVED_BITS: Final = 30
"""A first step need not be finer than 2^-30 of that range, which is finer than float32 resolves it."""
ROOMY_CHANGE: Final = 1024.0
"""A first change of values of an unknown scale for which there is room."""
RESOLVED_BITS: Final = 25
"""A step need not be finer than 2^-25 of a block's reach: 3e-8, finer than float32 resolves it."""
MIN_GROWTH_BITS: Final = 1
"""With the largest shift a block's range is at least 2^1 times its reach. Bits beyond ``RESOLVED_BITS`` extend it
further: to 2^6 times the reach for ``fixed32``."""
MAX_MOVE_BITS: Final = 2
"""Most bits by which a block becomes coarser or finer per Round. Two possible next grids are within 2^4."""
MIN_REACH: Final = -63
MAX_REACH: Final = 63
"""Reaches are counted in bits above the Round's step. Beyond these limits a block moves by MAX_MOVE_BITS anyway."""
NO_REACH: Final = 0
"""The column of ``reaches`` for Updates that did not move a block; column c > 0 is a reach of c - 64 bits."""
NUM_REACHES: Final = MAX_REACH - MIN_REACH + 2
Reaches = npt.NDArray[np.int64]
"""The number of Updates with each reach, for each block (num_blocks, NUM_REACHES). Rows of Updates add up."""


class Precision(Protocol):
    """Bits of the values of a Run's Updates."""

    @property
    def bits(self) -> int:
        """Bits of one value, including the sign."""
        ...

    @property
    def max_shift(self) -> int:
        """The number of bits by which a block may be coarser than the grid."""
        ...


def first_grid(maxima: Sequence[float], codec: Precision) -> tuple[int, ...]:
    """Return the grid of a first Round, in which no update is known yet.

    The range of a block is the largest magnitude of its parameters, or 1 if that is larger. A codec with few bits
    covers this range only with its largest shift, so that its step is as fine as the shifts allow.

    Args:
        maxima: Largest magnitude of each block's parameters (num_blocks,).
        codec: The codec of the Run.

    Returns:
        Exponents (num_blocks,).
    """
    own_bits = codec.bits - 1 - FIRST_BITS
    fraction_bits = min(own_bits + codec.max_shift, FIRST_RESOLVED_BITS)
    return tuple(_limited(math.frexp(max(largest, FIRST_RANGE))[1] - fraction_bits) for largest in maxima)


def first_change_notes(codec: Precision) -> tuple[str, ...]:
    """Return a note for arrays whose scale is unknown, such as those of a Flower app, unless a first change has room.

    Args:
        codec: The codec of the Run.
    """
    (exponent,) = first_grid([0.0], codec)
    largest = math.ldexp(1.0, codec.bits - 1 + codec.max_shift + exponent)
    if largest >= ROOMY_CHANGE:
        return ()
    shift = FIRST_RESOLVED_BITS - 1 + round(math.log2(ROOMY_CHANGE)) - (codec.bits - 1)
    note = (
        f"codec.max_shift: got {codec.max_shift}, so the first Round cuts a change of a small value to {largest:g}; if "
        f"arrays have no scale, such as coefficients of raw columns, set codec.max_shift={shift} "
        "(docs/howto/flower.md#large-changes)"
    )
    return (note,)


def next_grid(grid: Sequence[int], reaches: Reaches, first: Sequence[int], codec: Precision) -> tuple[int, ...]:
    """Return the grid for the Round after this one.

    Args:
        grid: The Round's own grid (num_blocks,).
        reaches: The reaches of its Updates (num_blocks, NUM_REACHES).
        first: The first grid of the parent's parameters (num_blocks,). A block without a change on any device becomes
            finer, down to this step, because its own step may be too coarse for any update.
        codec: The codec of the Run.

    Returns:
        Exponents (num_blocks,), each at most ``MAX_MOVE_BITS`` from the Round's own.
    """
    fraction_bits = resolved_bits(codec)
    exponents = []
    for exponent, row, finest in zip(grid, reaches, first, strict=True):
        column = common_column(row)
        reached = exponent + column + MIN_REACH - 1 - fraction_bits
        target = min(exponent, finest) if column == NO_REACH else reached
        exponents.append(_limited(min(max(target, exponent - MAX_MOVE_BITS), exponent + MAX_MOVE_BITS)))
    return tuple(exponents)


def common_column(row: Reaches) -> int:
    """Return the highest column that more than a third of the Updates attain, for one block (NUM_REACHES,).

    For n Updates it is the column of the (n // 3 + 1)-th largest reach. If at most a third of the Updates are
    malicious, it is between the smallest and the largest column of the others.
    """
    num_at_least = np.cumsum(row[::-1])[::-1]
    rank = int(row.sum()) // 3 + 1
    return int(np.count_nonzero(num_at_least >= rank)) - 1 if row.any() else NO_REACH


def reach_column(largest: int, shift: int) -> int:
    """Return the column of an Update in one block.

    Args:
        largest: Largest encoded magnitude.
        shift: Bits by which the Update's step is coarser than the Round's.
    """
    if not largest:
        return NO_REACH
    return min(max(largest.bit_length() + shift, MIN_REACH), MAX_REACH) - MIN_REACH + 1


def largest_magnitude(values: Integers) -> int:
    """Return the largest magnitude of encoded values (num_values,); 0 for none."""
    return max(int(values.max(initial=0)), -int(values.min(initial=0)))


def no_reaches(table: TensorTable) -> Reaches:
    """Return the reaches of an empty set of Updates (num_blocks, NUM_REACHES)."""
    return np.zeros((len(table.specs), NUM_REACHES), np.int64)


def resolved_bits(codec: Precision) -> int:
    """Return how many bits of a block's reach the step resolves.

    These are the codec's bits after growth and half of its shifts. The other half of the shifts is for devices whose
    update exceeds the reach.
    """
    own_bits = codec.bits - 1 - MIN_GROWTH_BITS
    return min(own_bits + codec.max_shift // 2, RESOLVED_BITS)


def _limited(exponent: int) -> int:
    return min(max(exponent, MIN_EXPONENT), MAX_EXPONENT)

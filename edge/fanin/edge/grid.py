"""The grid: one power-of-two step per block, so that updates are integers and their sum is exact.

A block is a tensor. Its step is 2^exponent; a device may encode a block ``shift`` bits coarser. Powers of two
make ``q * step`` exact in floating point and turn a coarser step into a left shift of the integer sum.

Both rules here are pure functions of numbers that the coordinator has anyway when a Round ends, so every
coordinator, restart and ``fanin verify`` finds the same grid.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from fanin.edge.tensors import Float32s, TensorTable

VALUE_BITS: Final = 31
"""Bits of magnitude in an int32."""
MIN_EXPONENT: Final = -120
MAX_EXPONENT: Final = 60
"""Steps stay normal float32 numbers, with room for a shift, whatever a model's scale."""
FIRST_RANGE: Final = 1.0
"""What a block's values may reach in a first Round even if all its parameters are zero."""
GROWTH_BITS: Final = 6
"""A block's range is at least 2^6 times the largest step that the mean took: one device may move far more than
the mean of many, and 31 - 6 bits still resolve the mean to 3e-8 of its largest value, finer than float32."""
SATURATED_BITS: Final = 4
"""How much coarser a block gets after a Round in which values were cut."""


def block_maxima(table: TensorTable, flat: Float32s) -> tuple[float, ...]:
    """The largest magnitude of each block of a vector (num_values,); 0.0 for an empty block."""
    return tuple(float(np.abs(view).max(initial=0.0)) for view in table.views(flat).values())


def first_grid(table: TensorTable, parameters: Float32s) -> tuple[int, ...]:
    """The grid of a first Round: no update is known yet, so a block may move by its own size, or by 1."""
    return tuple(_exponent(max(largest, FIRST_RANGE), 1) for largest in block_maxima(table, parameters))


def next_grid(grid: Sequence[int], maxima: Sequence[float], num_saturated: int) -> tuple[int, ...]:
    """The grid after a Round whose mean update had these block maxima.

    A block without movement keeps its step. If any value was cut somewhere, every block gets coarser than it
    was, because the sum of the counts (all that is known under masks) does not say which block it was.
    """
    if num_saturated:
        return tuple(min(exponent + SATURATED_BITS, MAX_EXPONENT) for exponent in grid)
    return tuple(
        exponent if largest == 0.0 else _exponent(largest, GROWTH_BITS)
        for exponent, largest in zip(grid, maxima, strict=True)
    )


def _exponent(largest: float, spare_bits: int) -> int:
    """The smallest step's exponent with which ``largest * 2^spare_bits`` still fits an int32."""
    _, exponent = np.frexp(largest)  # largest < 2^exponent
    return int(np.clip(int(exponent) + spare_bits - VALUE_BITS, MIN_EXPONENT, MAX_EXPONENT))

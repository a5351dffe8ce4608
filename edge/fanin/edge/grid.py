"""The grid: one power-of-two step per block, so that updates are integers and their sum is exact.

A block is a tensor. Its step is 2^exponent; a device may encode a block ``shift`` bits coarser. Powers of two
make ``q * step`` exact in floating point and turn a coarser step into a left shift of the integer sum.

A codec of few bits cannot resolve the mean's movement and hold a far larger one of one device on the same step.
So its grid is finer by a part of W, the shifts that the Plan allows, and each device takes the finest step on
which its own update fits: its values then use all of their bits, though the server knew nothing of their size.
``fixed32`` has bits enough without; there W is room beyond the grid.

Both rules here are pure functions of numbers that the coordinator has anyway when a Round ends, so every
coordinator, restart and ``fanin verify`` finds the same grid.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from fanin.edge.codecs import codec_named
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.messages import CodecSpec

MIN_EXPONENT: Final = -120
MAX_EXPONENT: Final = 60
"""Steps stay normal float32 numbers, with room for a shift, whatever a model's scale."""
FIRST_RANGE: Final = 1.0
"""What a block's values may reach in a first Round even if all its parameters are zero."""
FIRST_BITS: Final = 1
"""The room that a first Round leaves above that range."""
FIRST_RESOLVED_BITS: Final = 30
"""A first step need not be finer than 2^-30 of that range, which is finer than float32 resolves it."""
RESOLVED_BITS: Final = 25
"""A step need not be finer than 2^-25 of the mean's largest value: 3e-8, finer than float32 resolves it."""
MIN_GROWTH_BITS: Final = 2
"""With all shifts a block's range is at least 2^2 times the largest step that the mean took: one device may move
far more than the mean of many. Bits that would resolve nothing more make it larger, 2^6 for ``fixed32``."""
SATURATED_BITS: Final = 4
"""How much coarser a block gets after a Round in which values were cut."""


def block_maxima(table: TensorTable, flat: Float32s) -> tuple[float, ...]:
    """The largest magnitude of each block of a vector (num_values,); 0.0 for an empty block."""
    return tuple(float(np.abs(view).max(initial=0.0)) for view in table.views(flat).values())


def first_grid(table: TensorTable, parameters: Float32s, codec: CodecSpec) -> tuple[int, ...]:
    """The grid of a first Round: no update is known yet, so a block may move by its own size, or by 1.

    A codec of few bits reaches that with all shifts only; its step is as much finer as they allow.
    """
    own_bits = codec_named(codec.name).bits - 1 - FIRST_BITS
    fraction_bits = min(own_bits + codec.max_shift, FIRST_RESOLVED_BITS)
    return tuple(_exponent(max(largest, FIRST_RANGE), fraction_bits) for largest in block_maxima(table, parameters))


def next_grid(grid: Sequence[int], maxima: Sequence[float], num_saturated: int, codec: CodecSpec) -> tuple[int, ...]:
    """The grid after a Round whose mean update had these block maxima.

    A block without movement keeps its step. If any value was cut somewhere, every block gets coarser than it
    was, because the sum of the counts (all that is known under masks) does not say which block it was.
    """
    if num_saturated:
        return tuple(min(exponent + SATURATED_BITS, MAX_EXPONENT) for exponent in grid)
    fraction_bits = resolved_bits(codec)
    return tuple(
        exponent if largest == 0.0 else _exponent(largest, fraction_bits)
        for exponent, largest in zip(grid, maxima, strict=True)
    )


def resolved_bits(codec: CodecSpec) -> int:
    """How many bits of the mean's largest value a step resolves: what the codec has after growth, and half of the
    shifts. The other half lets a device move further still."""
    own_bits = codec_named(codec.name).bits - 1 - MIN_GROWTH_BITS
    return min(own_bits + codec.max_shift // 2, RESOLVED_BITS)


def _exponent(largest: float, fraction_bits: int) -> int:
    """The exponent of the step of which 2^fraction_bits are just more than ``largest``."""
    _, exponent = np.frexp(largest)  # largest < 2^exponent
    return int(np.clip(int(exponent) - fraction_bits, MIN_EXPONENT, MAX_EXPONENT))

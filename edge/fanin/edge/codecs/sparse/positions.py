"""Sorted positions as bits: each position is split into low bits, and the distance of its high part to the one before.

k of n positions have l = floor(log2(n / k)) low bits each. The code has a fixed number of bits for k and n:

    [k + floor((n - 1) / 2^l) bits: for each position, a zero for each step of its high part, then a one]
    [k * l bits: the low bits of each position, the lowest first]

It has at most about half a bit a position more than the logarithm of the number of such sets. As its length is fixed, a
reader computes where any slice of a payload begins.

Reference:
    Elias 1974, Efficient Storage and Retrieval by Content and Address of Static Files, Journal of the ACM 21(2). The
    high parts have the unary code of their differences, as in the code of Rice for sorted numbers.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidUpdate

Bits = npt.NDArray[np.uint8]
"""Bits, one in each element."""
CODE: Final = "FN-1840"


def num_low_bits(num_positions: int, num_values: int) -> int:
    """Return the number of low bits of each of some positions below ``num_values``."""
    return (num_values // num_positions).bit_length() - 1


def num_high_bits(num_positions: int, num_values: int) -> int:
    """Return the number of bits of the high parts of some positions below ``num_values``."""
    return num_positions + ((num_values - 1) >> num_low_bits(num_positions, num_values))


def position_bits(num_positions: int, num_values: int) -> int:
    """Return the number of bits of some positions below ``num_values``: at least one position."""
    return num_high_bits(num_positions, num_values) + num_positions * num_low_bits(num_positions, num_values)


def encode_positions(positions: Int64s, num_values: int) -> Bits:
    """Return the bits of positions (num_positions,), each larger than the one before and below ``num_values``."""
    num, low = positions.size, num_low_bits(positions.size, num_values)
    high = np.zeros(num_high_bits(num, num_values), np.uint8)
    high[(positions >> low) + np.arange(num)] = 1
    return np.concatenate([high, integer_bits(positions, low)])


def decode_positions(bits: Bits, num_positions: int, num_values: int) -> Int64s:
    """Return positions (num_positions,) from their bits.

    Raises:
        InvalidUpdate: There are fewer or more positions, one is not below ``num_values``, two are equal, or one is
            smaller than the one before.
    """
    low, num_high = num_low_bits(num_positions, num_values), num_high_bits(num_positions, num_values)
    ones = np.flatnonzero(bits[:num_high])
    if ones.size != num_positions:
        kind = "surplus" if ones.size > num_positions else "missing"
        raise _error(f"{kind} indices: got {ones.size} of {num_values} values, expected {num_positions}")
    positions: Int64s = ((ones - np.arange(num_positions)) << low) + bits_integers(bits[num_high:], low, num_positions)
    if (largest := int(positions.max())) >= num_values:
        raise _error(f"index out of range: got {largest}, expected one below {num_values}")
    steps = np.diff(positions)
    if (smallest := int(steps.min(initial=1))) < 1:
        place = int(steps.argmin())
        kind = "unsorted indices" if smallest else "duplicate index"
        raise _error(f"{kind}: got {positions[place + 1]} after {positions[place]}, expected a larger one")
    return positions


def integer_bits(values: npt.NDArray[np.signedinteger], bits: int) -> Bits:
    """Return the lowest bits of integers (num_values,), for each value the lowest bit first."""
    return ((values[:, np.newaxis] >> np.arange(bits)) & 1).astype(np.uint8).ravel()


def bits_integers(bits: Bits, width: int, num_values: int) -> Int64s:
    """Return the integers of at least 0 whose bits ``integer_bits`` returns (num_values,)."""
    rows = bits.reshape(num_values, width) if width else np.zeros((num_values, 0), np.uint8)
    integers: Int64s = (rows.astype(np.int64) << np.arange(width)).sum(axis=1)
    return integers


def _error(text: str) -> InvalidUpdate:
    return InvalidUpdate(f"update: topk: {text}; encode each slice again, with sorted indices", code=CODE)

"""Counts as digits: integers that float32 holds exactly, also summed over a fleet.

A parameter of a Version is a float32, which has all whole numbers up to 2^24. An integer v of a device is sent as
digits of b bits, the lowest first::

    v = sum_i  d_i 2^(b i)      0 <= d_i < 2^b      b = 24 - ceil(log2(devices))

The sum of a digit over the devices stays below 2^24, so the sum of the integers follows exactly from the summed digits,
without a carry between devices::

    sum v = sum_i  (sum d_i) 2^(b i)
"""

from typing import Final

import numpy as np

from fanin.edge.tensors import Float32s, Int64s

EXACT_BITS: Final = 24
MAX_DEVICES: Final = 1 << 20
"""Most devices of a Round. A digit has 4 bits then."""
WITHHELD: Final = -1
"""The number of devices of a cell that is withheld. Its other digits are 0."""


def digit_bits(num_devices: int) -> int:
    """Return the bits of a digit, so that a sum over this many devices is below 2^24."""
    return EXACT_BITS - (num_devices - 1).bit_length()


def num_digits(largest: int, bits: int) -> int:
    """Return the digits of integers from 0 to ``largest``; at least one."""
    return max(1, -(-largest.bit_length() // bits))


def split(values: Int64s, count: int, bits: int) -> Int64s:
    """Return the digits of integers that are at least 0 (..., count)."""
    shifts = np.arange(count, dtype=np.int64) * bits
    digits: Int64s = (values[..., np.newaxis] >> shifts) & ((1 << bits) - 1)
    return digits


def join(digits: Float32s, bits: int) -> int:
    """Return the integer of summed digits (count,), exactly."""
    return sum(int(digit) << (bits * index) for index, digit in enumerate(digits.tolist()))

"""The Updates of a Round side by side, and the exact squared distances between them.

A distance is the sum of integers below 2^124 times a power of four for each block. So the products are sums of parts of
20 bits: float64 adds up the products of 2,048 such parts without rounding, in any order, and a BLAS may choose it. The
sums are kept in int64 digits of 40 bits. So the squared distance of a block is an exact integer, whatever the lengths
of the slices are, and each block rounds it in the same operations.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from fanin.edge.tensors import Float64s, Int64s, TensorTable
from fanin.server.aggregation.fold import Contribution, blocks_within

PART_BITS: Final = 20
"""Bits of the parts of a value. The products of two have at most 42 bits, because a first part may have 21."""
NUM_ROWS: Final = 1 << 11
"""Products of parts that are added up in float64: 2^42 * 2^11 is 2^53, the last integer before a gap."""
NUM_COLUMNS: Final = 1 << 8
"""Updates that are multiplied by all others at a time, so that the products of 1,024 Updates take 2 MB."""
DIGIT_BITS: Final = 2 * PART_BITS
"""Bits of a digit. The last digit keeps the sign, and at least 23 bits more."""


class Columns:
    """The values of Updates, in steps of the Round's grid.

    Args:
        updates: The Updates. Each can be read again.
        table: The layout of the values.
        size_bytes: Bytes of the values that are in memory at a time.
    """

    def __init__(self, updates: Sequence[Contribution], table: TensorTable, size_bytes: int) -> None:
        self._updates = updates
        self._table = table
        self._num_rows = max(size_bytes // (8 * len(updates)), 1)

    def slices(self, first: int, last: int) -> Iterator[tuple[int, int, Int64s]]:
        """Yield (start, stop, values (stop - start, num_updates)) for consecutive slices of [first, last)."""
        for start in range(first, last, self._num_rows):
            stop = min(start + self._num_rows, last)
            yield start, stop, self._read(start, stop)

    def squared_distances(self, grid: Sequence[int]) -> Float64s:
        """Return the squared distances between Updates, and those from zero on the diagonal (n, n).

        They are in the unit of the parameters. Each block rounds at most five times, so the relative error is at most
        the number of blocks times 2^-50.

        Args:
            grid: The exponent of the step of each block.
        """
        num_updates = len(self._updates)
        squares = np.zeros((num_updates, num_updates))
        for start, stop, exponent in blocks_within(self._table, grid, 0, self._table.num_values):
            products = _Products(num_updates)
            for _, _, values in self.slices(start, stop):
                products.add(values)
            for row in range(num_updates):
                squares[row, row:] += np.ldexp(products.distances(row), 2 * exponent)
        for row in range(num_updates):
            squares[row:, row] = squares[row, row:]
        return squares

    def _read(self, first: int, last: int) -> Int64s:
        columns = np.empty((last - first, len(self._updates)), np.int64)
        for index, update in enumerate(self._updates):
            assert update.read is not None, "an Update for a column rule can be read again"
            values = update.read(first, last)
            for start, stop, shift in blocks_within(self._table, update.shifts, first, last):
                rows = slice(start - first, stop - first)
                np.left_shift(values[rows], shift, out=columns[rows, index], dtype=np.int64)
        return columns


class _Products:
    """The inner products of Updates in one block: exact sums, as digits from the lowest to the highest.

    The digits but the last are from 0 to 2^40 - 1. The sums below the diagonal are not kept.
    """

    def __init__(self, num_updates: int) -> None:
        self._digits = [np.zeros((num_updates, num_updates), np.int64) for _ in range(2)]

    def add(self, values: Int64s) -> None:
        """Add the products of further values (num_values, num_updates)."""
        for first in range(0, len(values), NUM_ROWS):
            parts = _parts(values[first : first + NUM_ROWS])
            while len(self._digits) <= len(parts):
                self._digits.append(np.zeros_like(self._digits[0]))
                self._carry(slice(None), slice(None))
            for start in range(0, values.shape[1], NUM_COLUMNS):
                stop = start + NUM_COLUMNS
                self._add_products(parts, slice(0, stop), slice(start, stop))

    def distances(self, row: int) -> Float64s:
        """Return the squared distances of an Update from the next ones, and in the first place from zero."""
        digits = []
        for digit in self._digits:
            distance = digit[row, row] + np.diagonal(digit)[row:] - 2 * digit[row, row:]
            distance[0] = digit[row, row]
            digits.append(distance)
        for low, high in pairwise(digits):
            high += low >> DIGIT_BITS
            low &= (1 << DIGIT_BITS) - 1
        total: Float64s = digits[-1].astype(np.float64)
        for digit in digits[-2::-1]:
            total = total * 2.0**DIGIT_BITS + digit
        return total

    def _add_products(self, parts: Sequence[Float64s], rows: slice, columns: slice) -> None:
        for left, first in enumerate(parts):
            for right, second in enumerate(parts):
                products = (first[:, rows].T @ second[:, columns]).astype(np.int64)
                number, odd = divmod(left + right, 2)
                low_bits = DIGIT_BITS - PART_BITS * odd
                low = products & ((1 << low_bits) - 1)
                low <<= PART_BITS * odd
                self._digits[number][rows, columns] += low
                products >>= low_bits
                self._digits[number + 1][rows, columns] += products
        self._carry(rows, columns)

    def _carry(self, rows: slice, columns: slice) -> None:
        for low, high in pairwise(self._digits):
            high[rows, columns] += low[rows, columns] >> DIGIT_BITS
            low[rows, columns] &= (1 << DIGIT_BITS) - 1


def _parts(values: Int64s) -> list[Float64s]:
    """Return values in parts of 20 bits, from the lowest to the highest, which has the sign."""
    largest = max(int(values.max(initial=0)), -int(values.min(initial=0)))
    parts = []
    while largest >= 1 << PART_BITS + 1:
        parts.append((values & ((1 << PART_BITS) - 1)).astype(np.float64))
        values, largest = values >> PART_BITS, largest >> PART_BITS
    return [*parts, values.astype(np.float64)]

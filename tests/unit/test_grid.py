"""The grid by example: a first Round, growth, and what happens after values were cut."""

import numpy as np
from support.values import TABLE

from fanin.edge.grid import (
    GROWTH_BITS,
    MAX_EXPONENT,
    MIN_EXPONENT,
    SATURATED_BITS,
    VALUE_BITS,
    block_maxima,
    first_grid,
    next_grid,
)
from fanin.edge.tensors import TensorTable


def test_the_maxima_are_those_of_magnitudes_and_0_for_an_empty_block() -> None:
    table = TensorTable.of({"a": (3,), "b": (0,), "c": ()})
    assert block_maxima(table, np.array([1.0, -5.0, 2.0, -0.5], np.float32)) == (5.0, 0.0, 0.5)


def test_a_first_grid_lets_a_block_move_by_its_size_or_by_1() -> None:
    # 3 < 2^2 and 1 < 2^1, with one bit to spare each: 2^31 steps of 2^-28 are 8, of 2^-29 they are 4.
    zeros = np.zeros(TABLE.num_values, np.float32)
    assert first_grid(TABLE, zeros) == (-29, -29, -29)
    zeros[0] = -3.0
    assert first_grid(TABLE, zeros) == (-28, -29, -29)


def test_a_next_grid_follows_what_the_mean_moved() -> None:
    moved = next_grid((-29, -29, -29), (2.0**-10, 0.0, 2.0**20), 0)
    assert moved == (-9 + GROWTH_BITS - VALUE_BITS, -29, 21 + GROWTH_BITS - VALUE_BITS)


def test_after_a_cut_every_block_gets_coarser() -> None:
    assert next_grid((-29, 0, MAX_EXPONENT - 1), (1.0, 0.0, 1.0), 1) == (
        -29 + SATURATED_BITS,
        SATURATED_BITS,
        MAX_EXPONENT,
    )


def test_exponents_end_at_their_limits() -> None:
    assert next_grid((0, 0), (2.0**127, 1e-45), 0) == (MAX_EXPONENT, MIN_EXPONENT)

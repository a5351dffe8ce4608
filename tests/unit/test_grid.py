"""The grid by example: a first Round, growth, and what happens after values were cut."""

import numpy as np
import pytest
from support.values import TABLE

from fanin.edge.grid import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    SATURATED_BITS,
    block_maxima,
    first_grid,
    next_grid,
)
from fanin.edge.tensors import TensorTable
from fanin.protos.messages import CodecSpec

FIXED32 = CodecSpec(name="fixed32", max_shift=0)
INT8 = CodecSpec(name="int8", max_shift=12)
BARE_INT8 = CodecSpec(name="int8", max_shift=0)


def test_the_maxima_are_those_of_magnitudes_and_0_for_an_empty_block() -> None:
    table = TensorTable.of({"a": (3,), "b": (0,), "c": ()})
    assert block_maxima(table, np.array([1.0, -5.0, 2.0, -0.5], np.float32)) == (5.0, 0.0, 0.5)


@pytest.mark.parametrize(
    ("spec", "of_one"),
    # 1 < 2^1, with one bit to spare: 2^31 steps of 2^-29 are 4, and so are 2^7 of 2^-5, made 2^12 times finer.
    [(FIXED32, -29), (CodecSpec(name="fixed32", max_shift=9), -29), (BARE_INT8, -5), (INT8, -17)],
)
def test_a_first_grid_lets_a_block_move_by_its_size_or_by_1(spec: CodecSpec, of_one: int) -> None:
    zeros = np.zeros(TABLE.num_values, np.float32)
    assert first_grid(TABLE, zeros, spec) == (of_one, of_one, of_one)
    zeros[0] = -3.0
    assert first_grid(TABLE, zeros, spec) == (of_one + 1, of_one, of_one)


@pytest.mark.parametrize(("spec", "resolved"), [(FIXED32, 25), (BARE_INT8, 5), (INT8, 11)])
def test_a_next_grid_follows_what_the_mean_moved(spec: CodecSpec, resolved: int) -> None:
    moved = next_grid((-29, -29, -29), (2.0**-10, 0.0, 2.0**20), 0, spec)
    assert moved == (-9 - resolved, -29, 21 - resolved)


def test_after_a_cut_every_block_gets_coarser() -> None:
    assert next_grid((-29, 0, MAX_EXPONENT - 1), (1.0, 0.0, 1.0), 1, FIXED32) == (
        -29 + SATURATED_BITS,
        SATURATED_BITS,
        MAX_EXPONENT,
    )


def test_exponents_end_at_their_limits() -> None:
    assert next_grid((0, 0), (2.0**127, 1e-45), 0, FIXED32) == (MAX_EXPONENT, MIN_EXPONENT)

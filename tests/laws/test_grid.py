"""Laws of the grid: its steps keep their limits, and values of the size it was made for are never cut."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.laws import LAW

from fanin.edge.codecs import CODECS
from fanin.edge.grid import GROWTH_BITS, MAX_EXPONENT, MIN_EXPONENT, block_maxima, first_grid, next_grid
from fanin.edge.tensors import Float32s, TensorTable

TABLE = TensorTable.of({"a": (3,), "b": (2,), "c": (0,)})
# Beyond 2^90 the step would be coarser than MAX_EXPONENT allows: no model that trains is there.
VALUES = st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=5, max_size=5).map(
    lambda values: np.array(values, np.float32)
)
MAXIMA = st.floats(0, allow_infinity=False)
GRIDS = st.lists(st.integers(MIN_EXPONENT, MAX_EXPONENT), min_size=3, max_size=3)


@LAW
@given(VALUES)
def test_a_first_round_can_move_every_value_by_its_own_size(parameters: Float32s) -> None:
    grid = first_grid(TABLE, parameters)
    assert all(MIN_EXPONENT <= exponent <= MAX_EXPONENT for exponent in grid)
    for update in (parameters, -parameters, np.ones_like(parameters)):
        assert CODECS["fixed32"].encode(TABLE, update, grid, 0).num_saturated == 0


@LAW
@given(st.lists(st.floats(-(2.0**84), 2.0**84, width=32), min_size=5, max_size=5), GRIDS)
def test_the_next_round_can_move_every_value_by_2_to_the_growth_times_the_mean(
    means: list[float], grid: list[int]
) -> None:
    mean = np.array(means, np.float32)
    found = next_grid(grid, block_maxima(TABLE, mean), 0)
    moved = TABLE.views(mean * np.float32(2**GROWTH_BITS))
    for (name, view), exponent, before in zip(moved.items(), found, grid, strict=True):
        if view.any():
            block = TensorTable.of({name: view.shape})
            assert CODECS["fixed32"].encode(block, view.ravel(), (exponent,), 0).num_saturated == 0
        else:
            assert exponent == before


@LAW
@given(GRIDS, st.lists(MAXIMA, min_size=3, max_size=3), st.integers(0, 3))
def test_every_exponent_stays_within_the_limits(grid: list[int], maxima: list[float], num_saturated: int) -> None:
    found = next_grid(grid, maxima, num_saturated)
    assert len(found) == len(grid)
    assert all(MIN_EXPONENT <= exponent <= MAX_EXPONENT for exponent in found)
    if num_saturated:
        assert all(after > before or after == MAX_EXPONENT for after, before in zip(found, grid, strict=True))

"""Laws of the grid: it holds what it promises, resolves what it can, and its exponents stay within their limits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fanin.edge.codecs import CODECS, Encoded, largest_value
from fanin.edge.grid import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    MIN_GROWTH_BITS,
    block_maxima,
    first_grid,
    next_grid,
)
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.messages import CodecSpec

TABLE = TensorTable.of({"a": (3,), "b": (2,), "c": (0,)})
# Beyond 2^90 the step would be coarser than MAX_EXPONENT allows: no model that trains is there.
VALUES = st.lists(st.floats(-(2.0**66), 2.0**66, width=32), min_size=5, max_size=5).map(
    lambda values: np.array(values, np.float32)
)
MAXIMA = st.floats(0, allow_infinity=False)
GRIDS = st.lists(st.integers(MIN_EXPONENT, MAX_EXPONENT), min_size=3, max_size=3)
SPECS = st.builds(CodecSpec, name=st.sampled_from(sorted(CODECS)), max_shift=st.integers(0, 24))


def encode(table: TensorTable, update: Float32s, grid: tuple[int, ...], spec: CodecSpec) -> Encoded:
    return CODECS[spec.name].encode(table, update, grid, spec.max_shift, np.random.default_rng(0))


@given(VALUES, SPECS)
def test_a_first_round_can_move_every_value_by_its_own_size(parameters: Float32s, spec: CodecSpec) -> None:
    grid = first_grid(TABLE, parameters, spec)
    assert all(MIN_EXPONENT <= exponent <= MAX_EXPONENT for exponent in grid)
    for update in (parameters, -parameters, np.ones_like(parameters)):
        assert encode(TABLE, update, grid, spec).num_saturated == 0


@given(VALUES, GRIDS, SPECS)
def test_the_next_round_can_move_every_value_by_the_growth_times_the_mean(
    mean: Float32s, grid: list[int], spec: CodecSpec
) -> None:
    found = next_grid(grid, block_maxima(TABLE, mean), 0, spec)
    growth_bits = 6 if spec.name == "fixed32" else MIN_GROWTH_BITS + spec.max_shift // 2
    # 2^7 steps are one more than an int8 reaches, hence not quite all of it.
    moved = TABLE.views(mean * np.float32(2**growth_bits * 0.99))
    for (name, view), exponent, before in zip(moved.items(), found, grid, strict=True):
        if view.any():
            block = TensorTable.of({name: view.shape})
            assert encode(block, view.ravel(), (exponent,), spec).num_saturated == 0
        else:
            assert exponent == before


@given(st.floats(2.0**-60, 2.0**60, width=32), st.integers(4, 24), st.floats(-4, 8))
def test_int8_uses_all_its_bits_for_updates_of_many_sizes(mean: float, max_shift: int, bits_apart: float) -> None:
    spec = CodecSpec(name="int8", max_shift=max_shift)
    half = max_shift // 2
    table = TensorTable.of({"a": (1,)})
    grid = next_grid((0,), (float(np.float32(mean)),), 0, spec)
    update = np.array([mean * 2.0 ** np.clip(bits_apart, 2 - half, half)], np.float32)
    (q,) = CODECS["int8"].decode(memoryview(encode(table, update, grid, spec).payload)).tolist()
    assert 63 <= q <= largest_value(8)


@given(GRIDS, st.lists(MAXIMA, min_size=3, max_size=3), st.integers(0, 3), SPECS)
def test_every_exponent_stays_within_the_limits(
    grid: list[int], maxima: list[float], num_saturated: int, spec: CodecSpec
) -> None:
    found = next_grid(grid, maxima, num_saturated, spec)
    assert len(found) == len(grid)
    assert all(MIN_EXPONENT <= exponent <= MAX_EXPONENT for exponent in found)
    if num_saturated:
        assert all(after > before or after == MAX_EXPONENT for after, before in zip(found, grid, strict=True))

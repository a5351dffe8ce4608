"""Laws of the codec ``fixed32``: half a step of error, nothing lost that the grid can hold, everything counted."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.laws import LAW

from fanin.edge.codecs import CODECS, LIMIT, Encoded
from fanin.edge.tensors import Float32s, TensorTable

CODEC = CODECS["fixed32"]
TABLE = TensorTable.of({"a": (2, 2), "b": (), "c": (0,), "d": (3,)})
EXPONENTS = st.integers(-60, 10)
GRIDS = st.tuples(EXPONENTS, EXPONENTS, EXPONENTS, EXPONENTS)
UPDATES = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=8, max_size=8).map(
    lambda values: np.array(values, np.float32)
)


def decoded(encoded: Encoded) -> list[int]:
    return [int(value) for value in CODEC.decode(memoryview(encoded.payload))]


def steps(grid: tuple[int, ...], shifts: tuple[int, ...]) -> list[Fraction]:
    """The step of each value, exactly."""
    blocks = [Fraction(2) ** (exponent + shift) for exponent, shift in zip(grid, shifts, strict=True)]
    return [step for step, spec in zip(blocks, TABLE.specs, strict=True) for _ in range(spec.num_values)]


@LAW
@given(UPDATES, GRIDS, st.integers(0, 8))
def test_each_value_is_the_nearest_step_or_the_end(update: Float32s, grid: tuple[int, ...], max_shift: int) -> None:
    encoded = CODEC.encode(TABLE, update, grid, max_shift)
    assert len(encoded.payload) == CODEC.payload_bytes(TABLE) == 4 * TABLE.num_values
    assert all(0 <= shift <= max_shift for shift in encoded.shifts)
    num_rounded = num_saturated = 0
    for value, q, step in zip(update, decoded(encoded), steps(grid, encoded.shifts), strict=True):
        exact = Fraction(float(value)) / step
        nearest = round(exact)  # a Fraction rounds ties to even, as IEEE 754 does
        num_rounded += nearest != exact
        num_saturated += abs(nearest) > LIMIT
        assert q == max(-LIMIT, min(LIMIT, nearest))
        if abs(nearest) <= LIMIT:
            assert abs(q - exact) <= Fraction(1, 2)
    assert (encoded.num_rounded, encoded.num_saturated) == (num_rounded, num_saturated)


@LAW
@given(UPDATES, GRIDS, st.integers(0, 8))
def test_a_shift_is_used_only_where_a_finer_one_would_cut(
    update: Float32s, grid: tuple[int, ...], max_shift: int
) -> None:
    encoded = CODEC.encode(TABLE, update, grid, max_shift)
    for view, exponent, shift in zip(TABLE.views(update).values(), grid, encoded.shifts, strict=True):
        if shift:
            finer = Fraction(2) ** (exponent + shift - 1)
            assert any(abs(round(Fraction(float(value)) / finer)) > LIMIT for value in view.ravel())
    if encoded.num_saturated:
        assert max_shift in encoded.shifts


@LAW
@given(st.lists(st.integers(-(1 << 24), 1 << 24), min_size=8, max_size=8), GRIDS)
def test_values_on_the_grid_are_exact(integers: list[int], grid: tuple[int, ...]) -> None:
    exact = [q * step for q, step in zip(integers, steps(grid, (0, 0, 0, 0)), strict=True)]
    encoded = CODEC.encode(TABLE, np.array([float(value) for value in exact], np.float32), grid, 0)
    assert decoded(encoded) == integers
    assert (encoded.num_rounded, encoded.num_saturated) == (0, 0)


@LAW
@given(UPDATES, GRIDS, st.integers(0, 8))
def test_a_negated_update_encodes_to_negated_values(update: Float32s, grid: tuple[int, ...], max_shift: int) -> None:
    plus, minus = (CODEC.encode(TABLE, values, grid, max_shift) for values in (update, -update))
    assert decoded(minus) == [-q for q in decoded(plus)]
    assert (minus.shifts, minus.num_rounded, minus.num_saturated) == (
        plus.shifts,
        plus.num_rounded,
        plus.num_saturated,
    )


@LAW
@given(UPDATES, GRIDS, st.integers(0, 7), st.sampled_from((np.nan, np.inf, -np.inf)))
def test_what_is_not_finite_is_refused(update: Float32s, grid: tuple[int, ...], where: int, value: float) -> None:
    update[where] = value
    with pytest.raises(ValueError, match="update: got NaN or infinity, expected finite values; the training diverged"):
        CODEC.encode(TABLE, update, grid, 0)

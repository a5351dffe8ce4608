"""The grid by example: the first Round, changes by a third of the devices, and blocks that do not change."""

import numpy as np
import pytest
from support.values import TABLE

from fanin.edge.codecs.grid import (
    MAX_EXPONENT,
    MAX_MOVE_BITS,
    MAX_REACH,
    MIN_EXPONENT,
    MIN_REACH,
    NO_REACH,
    NUM_REACHES,
    Reaches,
    common_column,
    first_change_notes,
    first_grid,
    largest_magnitude,
    next_grid,
    no_reaches,
    reach_column,
)
from fanin.edge.tensors import TensorTable
from fanin.protos.messages import CodecSpec

FIXED32 = CodecSpec(name="fixed32", max_shift=0)
INT8 = CodecSpec(name="int8", max_shift=12)
BARE_INT8 = CodecSpec(name="int8", max_shift=0)


def reaches(*rows: tuple[int | None, ...]) -> Reaches:
    """Count the reaches of each block's Updates, in bits above the step. None is an Update without a change."""
    counts = no_reaches(TensorTable.of({f"block-{index:02}": (1,) for index in range(len(rows))}))
    for index, row in enumerate(rows):
        for bits in row:
            counts[index, NO_REACH if bits is None else reach_column(1, bits - 1)] += 1
    return counts


@pytest.mark.parametrize(
    ("spec", "exponent"),
    # 1 < 2^1, with one spare bit: 2^31 steps of 2^-29 are 4. So are 2^7 steps of 2^-5; int8 makes them 2^12 finer.
    [(FIXED32, -29), (CodecSpec(name="fixed32", max_shift=9), -29), (BARE_INT8, -5), (INT8, -17)],
)
def test_a_first_grid_lets_a_block_move_by_its_size_or_by_1(spec: CodecSpec, exponent: int) -> None:
    assert first_grid((0.0, 0.5, 1.0), spec) == (exponent, exponent, exponent)
    assert first_grid((3.0, 0.0, 0.0), spec) == (exponent + 1, exponent, exponent)


@pytest.mark.parametrize(("spec", "shift"), [(FIXED32, 8), (BARE_INT8, 32), (INT8, 32)])
def test_a_first_change_without_room_is_a_note_with_the_shift_that_has_room(spec: CodecSpec, shift: int) -> None:
    (note,) = first_change_notes(spec)
    assert "cuts a change of a small value to 4; " in note
    assert f"codec.max_shift={shift} " in note
    assert first_change_notes(CodecSpec(name=spec.name, max_shift=shift)) == ()


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_parameters_that_are_not_finite_have_a_first_grid(wrong: float) -> None:
    assert first_grid((wrong,), FIXED32) == (-30,)


@pytest.mark.parametrize("values", [(5, -7, 3), (-128, 127, 0), (0, 0, 0), ()])
def test_the_largest_magnitude_is_that_of_both_signs(values: tuple[int, ...]) -> None:
    assert largest_magnitude(np.array(values, np.int8)) == max((abs(value) for value in values), default=0)


@pytest.mark.parametrize(("largest", "shift", "bits"), [(1, 0, 1), (127, 0, 7), (128, 3, 11), (1, -5, -4)])
def test_a_reach_is_counted_in_bits_above_the_step(largest: int, shift: int, bits: int) -> None:
    assert reach_column(largest, shift) + MIN_REACH - 1 == bits


def test_reaches_end_at_their_limits() -> None:
    assert reach_column(0, 50) == NO_REACH
    assert reach_column(1, 1000) == NUM_REACHES - 1 == reach_column(1, MAX_REACH - 1)
    assert reach_column(1, -1000) == 1


@pytest.mark.parametrize(
    ("row", "common"),
    [
        ((), None),
        ((7,), 7),
        ((7, 3), 7),
        ((7, 3, 1), 3),
        ((7, 3, 3, 1), 3),
        ((9, 9, 9, 5, 4, 4, 4, 4, 4, 4), 5),
        ((9, None, None), None),
        ((9, 9, None), 9),
    ],
)
def test_the_common_reach_is_that_of_more_than_a_third_of_the_updates(
    row: tuple[int | None, ...], common: int | None
) -> None:
    column = common_column(reaches(row)[0])
    assert column == (NO_REACH if common is None else reach_column(1, common - 1))


@pytest.mark.parametrize(("spec", "resolved"), [(FIXED32, 25), (BARE_INT8, 6), (INT8, 12)])
def test_a_next_grid_approaches_the_reach(spec: CodecSpec, resolved: int) -> None:
    rows = reaches(*[(resolved + difference,) * 4 for difference in (-9, -1, 0, 1, 9)])
    assert next_grid((-29,) * 5, rows, (-29,) * 5, spec) == (-31, -30, -29, -28, -27)


def test_a_block_that_does_not_move_becomes_finer_until_it_has_its_first_step() -> None:
    rows = reaches((None, None, 20), (None,), (None,), (None,))
    assert next_grid((60, -28, -29, -35), rows, (-29,) * 4, FIXED32) == (60 - MAX_MOVE_BITS, -29, -29, -35)


def test_exponents_end_at_their_limits() -> None:
    rows = reaches((31,), (1,))
    assert next_grid((MAX_EXPONENT, MIN_EXPONENT), rows, (0, 0), FIXED32) == (MAX_EXPONENT, MIN_EXPONENT)


def test_a_table_without_values_has_a_grid() -> None:
    assert next_grid((), no_reaches(TensorTable.of({})), (), FIXED32) == ()
    assert no_reaches(TABLE).shape == (3, NUM_REACHES)

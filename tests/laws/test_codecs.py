"""Laws of the codecs: an error of at most one step, no loss of values on the grid, and counts of all changed values."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.folds import fresh

from fanin.edge.codecs.fixed import (
    CODECS,
    Encoded,
    RunCodec,
    decoded,
    decoded_part,
    decoded_pieces,
    largest_value,
    payload_bytes,
)
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.messages import CodecSpec
from fanin.protos.plans import CODEC_BITS
from fanin.server.aggregation.fold import accept, begin

TABLE = TensorTable.of({"a": (2, 2), "b": (), "c": (0,), "d": (3,)})
EXPONENTS = st.integers(-60, 10)
GRIDS = st.tuples(EXPONENTS, EXPONENTS, EXPONENTS, EXPONENTS)
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.floats(-1.0, 1.0, width=32)
UPDATES = st.lists(FLOATS, min_size=8, max_size=8).map(lambda values: np.array(values, np.float32))
SHIFTS = st.integers(0, 20)
SEEDS = st.integers(0, 1 << 32)
NAMES = st.sampled_from(sorted(CODECS))
STOCHASTIC = st.sampled_from([name for name, codec in sorted(CODECS.items()) if codec.is_stochastic])


def encode(name: str, update: Float32s, grid: Sequence[int], max_shift: int, seed: int) -> Encoded:
    return CODECS[name].encode(TABLE, update, grid, max_shift, np.random.default_rng(seed))


def values_of(name: str, encoded: Encoded) -> list[int]:
    return [int(value) for value in decoded(CODECS[name], encoded.payload, TABLE.num_values)]


def limit(name: str) -> int:
    return largest_value(CODECS[name].bits)


def steps(grid: Sequence[int], shifts: Sequence[int]) -> list[Fraction]:
    """Return the exact step of each value."""
    blocks = [Fraction(2) ** (exponent + shift) for exponent, shift in zip(grid, shifts, strict=True)]
    return [step for step, spec in zip(blocks, TABLE.specs, strict=True) for _ in range(spec.num_values)]


@given(NAMES, UPDATES, GRIDS, SHIFTS, SEEDS)
def test_each_value_encodes_to_an_adjacent_step_or_to_the_end(
    name: str, update: Float32s, grid: tuple[int, ...], max_shift: int, seed: int
) -> None:
    encoded = encode(name, update, grid, max_shift, seed)
    assert all(0 <= shift <= max_shift for shift in encoded.shifts)
    max_distance = Fraction(1) if CODECS[name].is_stochastic else Fraction(1, 2)
    num_rounded, num_beyond = 0, 0
    for value, q, step in zip(update, values_of(name, encoded), steps(grid, encoded.shifts), strict=True):
        exact = Fraction(float(value)) / step
        num_rounded += exact.denominator != 1
        if abs(exact) <= limit(name):
            assert abs(q - exact) <= max_distance
            assert (q == exact) == (exact.denominator == 1)
        else:
            num_beyond += 1
            assert q == (limit(name) if exact > 0 else -limit(name))
    assert encoded.num_rounded == num_rounded
    # A value less than a step beyond the end may be rounded back to the end.
    assert encoded.num_saturated <= num_beyond
    assert (encoded.num_saturated > 0) <= (max_shift in encoded.shifts)


@given(UPDATES, GRIDS, SHIFTS, SEEDS)
def test_fixed32_rounds_to_the_nearest_step_and_ties_to_even(
    update: Float32s, grid: tuple[int, ...], max_shift: int, seed: int
) -> None:
    encoded = encode("fixed32", update, grid, max_shift, seed)
    nearest = [
        round(Fraction(float(value)) / step)  # a Fraction rounds ties to even, as IEEE 754 does
        for value, step in zip(update, steps(grid, encoded.shifts), strict=True)
    ]
    end = limit("fixed32")
    assert values_of("fixed32", encoded) == [max(-end, min(end, q)) for q in nearest]
    assert encoded.num_saturated == sum(abs(q) > end for q in nearest)


@given(STOCHASTIC, st.floats(-(2.0**-10), 2.0**-10, width=32), st.integers(-18, -14), SEEDS)
def test_stochastic_codecs_are_unbiased(name: str, value: float, exponent: int, seed: int) -> None:
    num = 20_000
    many = TensorTable.of({"a": (num,)})
    update = np.full(num, value, np.float32)
    encoded = CODECS[name].encode(many, update, (exponent,), 12, np.random.default_rng(seed))
    step = 2.0 ** (exponent + encoded.shifts[0])
    mean = float(decoded(CODECS[name], encoded.payload, num).mean()) * step
    # Hoeffding: for errors of at most a step, their mean exceeds 0.04 step with probability 2 exp(-2 n 0.04^2) < 1e-27.
    assert abs(mean - value) <= 0.04 * step


@given(NAMES, UPDATES, GRIDS, SHIFTS, SEEDS)
def test_a_shift_is_used_only_where_a_finer_one_would_cut(
    name: str, update: Float32s, grid: tuple[int, ...], max_shift: int, seed: int
) -> None:
    encoded = encode(name, update, grid, max_shift, seed)
    for view, exponent, shift in zip(TABLE.views(update).values(), grid, encoded.shifts, strict=True):
        if shift:
            finer = Fraction(2) ** (exponent + shift - 1)
            assert any(abs(Fraction(float(value)) / finer) > limit(name) for value in view.ravel())


@given(NAMES, st.data(), GRIDS, SEEDS)
def test_values_on_the_grid_are_exact(name: str, data: st.DataObject, grid: tuple[int, ...], seed: int) -> None:
    # float32 holds 24 bits.
    end = min(limit(name), 1 << 24)
    integers = data.draw(st.lists(st.integers(-end, end), min_size=8, max_size=8))
    exact = [q * step for q, step in zip(integers, steps(grid, (0, 0, 0, 0)), strict=True)]
    encoded = encode(name, np.array([float(value) for value in exact], np.float32), grid, 0, seed)
    assert values_of(name, encoded) == integers
    assert (encoded.num_rounded, encoded.num_saturated) == (0, 0)


@given(NAMES, UPDATES, GRIDS, SHIFTS, SEEDS)
def test_a_negated_update_encodes_to_negated_values(
    name: str, update: Float32s, grid: tuple[int, ...], max_shift: int, seed: int
) -> None:
    plus, minus = (encode(name, values, grid, max_shift, seed) for values in (update, -update))
    assert values_of(name, minus) == [-q for q in values_of(name, plus)]
    assert (minus.shifts, minus.num_rounded, minus.num_saturated) == (
        plus.shifts,
        plus.num_rounded,
        plus.num_saturated,
    )


@given(NAMES, UPDATES, GRIDS, SHIFTS, SEEDS)
def test_a_payload_has_exactly_the_bytes_of_its_values(
    name: str, update: Float32s, grid: tuple[int, ...], max_shift: int, seed: int
) -> None:
    encoded = encode(name, update, grid, max_shift, seed)
    run_codec = RunCodec(codec=CODECS[name], max_shift=max_shift)
    assert 8 * len(encoded.payload) == 8 * run_codec.payload_bytes(TABLE) == CODEC_BITS[name] * TABLE.num_values


@given(NAMES, st.lists(st.integers(-7, 7), max_size=9), st.lists(st.integers(0, 36), max_size=4), st.data())
def test_pieces_and_parts_of_a_payload_have_the_values_of_the_whole(
    name: str, integers: list[int], cuts: list[int], data: st.DataObject
) -> None:
    """The cuts are anywhere: inside a value, and between the two values of a byte."""
    codec, num, table = CODECS[name], len(integers), TensorTable.of({"a": (len(integers),)})
    payload = codec.encode(table, np.array(integers, np.float32), (0,), 0, np.random.default_rng(0)).payload
    assert len(payload) == payload_bytes(codec.bits, num) == math.ceil(num * codec.bits / 8)
    assert decoded(codec, payload, num).tolist() == integers
    ends = sorted(min(cut, len(payload)) for cut in cuts)
    slices = [payload[first:last] for first, last in pairwise([0, *ends, len(payload)])]
    assert [int(q) for piece in decoded_pieces(codec, slices, num) for q in piece] == integers
    first, last = sorted((data.draw(st.integers(0, num)), data.draw(st.integers(0, num))))
    part = decoded_part(codec, lambda offset, size: payload[offset : offset + size], (first, last), num)
    assert part.tolist() == integers[first:last]
    if codec.bits * num % 8:
        assert payload[-1] >> 4 == 0


@given(NAMES, st.lists(st.tuples(UPDATES, st.integers(1, 1 << 20), SEEDS), min_size=1, max_size=5), GRIDS)
def test_encoded_updates_fold_to_what_python_adds(
    name: str, updates: list[tuple[Float32s, int, int]], grid: tuple[int, ...]
) -> None:
    total, expected = begin(TABLE), [0] * TABLE.num_values
    for update, weight, seed in updates:
        encoded = encode(name, update, grid, 8, seed)
        shifts = steps((0, 0, 0, 0), encoded.shifts)
        for index, (q, shift) in enumerate(zip(values_of(name, encoded), shifts, strict=True)):
            expected[index] += weight * q * int(shift)
        pieces = (decoded(CODECS[name], encoded.payload, TABLE.num_values),)
        total = accept(total, TABLE, fresh(weight, encoded.shifts, CodecSpec(name=name, max_shift=8), pieces))
    assert total.values.tolist() == expected


@given(NAMES, UPDATES, GRIDS, st.integers(0, 7), st.sampled_from((np.nan, np.inf, -np.inf)))
def test_values_that_are_not_finite_are_refused(
    name: str, update: Float32s, grid: tuple[int, ...], where: int, value: float
) -> None:
    update[where] = value
    with pytest.raises(ValueError, match="update: got NaN or infinity, expected finite values; the training diverged"):
        encode(name, update, grid, 0, 0)

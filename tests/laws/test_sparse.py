"""Laws of ``topk``: it sends the largest values, exactly counted bits, no surprise for the fold, and loses nothing."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.folds import fresh

from fanin.edge.codecs.codec import codec_of
from fanin.edge.codecs.fixed import (
    CODECS,
    SLICE_VALUES,
    SparseCodec,
    decoded,
    decoded_part,
    decoded_pieces,
    encoded_bytes,
    largest_value,
)
from fanin.edge.codecs.pipeline import UpdatePipeline, first_states
from fanin.edge.codecs.sparse import TopK, topk
from fanin.edge.codecs.stages import ErrorFeedback, layout_of
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.errors import InvalidPlan, InvalidUpdate
from fanin.protos.messages import CodecSpec
from fanin.server.aggregation.fold import Contribution, accept, begin

TABLE = TensorTable.of({"a": (5, 2), "b": (), "c": (0,), "d": (9,)})
NUM = TABLE.num_values
EXPONENTS = st.integers(-60, 10)
GRIDS = st.tuples(EXPONENTS, EXPONENTS, EXPONENTS, EXPONENTS)
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.floats(-1.0, 1.0, width=32) | st.just(0.0)
UPDATES = st.lists(FLOATS, min_size=NUM, max_size=NUM).map(lambda values: np.array(values, np.float32))
FRACTIONS = st.floats(0, 1, exclude_min=True)
CODECS_OF_ANY_SHARE = st.builds(topk, fraction=FRACTIONS, bits=st.sampled_from([2, 4, 8]))
SHIFTS = st.integers(0, 20)
SEEDS = st.integers(0, 1 << 32)


def steps(grid: Sequence[int], shifts: Sequence[int]) -> list[float]:
    """Return the step of each value."""
    blocks = [math.ldexp(1.0, exponent + shift) for exponent, shift in zip(grid, shifts, strict=True)]
    return [step for step, spec in zip(blocks, TABLE.specs, strict=True) for _ in range(spec.num_values)]


def largest(update: Float32s, num: int) -> list[int]:
    """Return the positions of the largest magnitudes: of equal ones, the first."""
    return sorted(np.argsort(-np.abs(update.astype(np.float64)), kind="stable")[:num].tolist())


@given(CODECS_OF_ANY_SHARE, UPDATES, GRIDS, SHIFTS, SEEDS)
def test_the_largest_values_are_sent_and_all_others_are_zero(
    codec: TopK, update: Float32s, grid: tuple[int, ...], max_shift: int, seed: int
) -> None:
    encoded = codec.encode(TABLE, update, grid, max_shift, np.random.default_rng(seed))
    values = decoded(codec, encoded.payload, NUM).tolist()
    chosen = largest(update, math.ceil(codec.fraction * NUM))
    assert {place for place, q in enumerate(values) if q} <= set(chosen)
    limit, num_rounded = largest_value(codec.bits), 0
    for place, step in enumerate(steps(grid, encoded.shifts)):
        exact, q = Fraction(float(update[place])) / Fraction(step), values[place]
        if place not in chosen:
            continue
        num_rounded += exact.denominator != 1
        if abs(exact) > limit:
            assert q == (limit if exact > 0 else -limit)
        elif abs(exact) < 1:
            assert q == (0 if abs(exact) <= Fraction(1, 2) else math.copysign(1, exact))
        else:
            assert abs(q - exact) < 1
        assert abs(q - exact) <= abs(exact), "a value is sent with a larger error than if it were left out"
    assert encoded.num_rounded == num_rounded
    assert all(0 <= shift <= max_shift for shift in encoded.shifts)
    assert encoded.num_saturated == 0 or max_shift in encoded.shifts


@given(CODECS_OF_ANY_SHARE, UPDATES, GRIDS, SEEDS)
def test_what_is_sent_and_the_rest_are_the_change_to_the_bit(
    codec: TopK, update: Float32s, grid: tuple[int, ...], seed: int
) -> None:
    encoded = codec.encode(TABLE, update, grid, 12, np.random.default_rng(seed))
    step = np.array(steps(grid, encoded.shifts))
    sent = decoded(codec, encoded.payload, NUM) * step
    is_near = np.abs(update) <= (largest_value(codec.bits) + 2.0**23) * step
    rest = (update - sent).astype(np.float32)
    assert np.array_equal((rest.astype(np.float64) + sent)[is_near], update.astype(np.float64)[is_near])


@given(st.lists(UPDATES.map(np.tanh), min_size=1, max_size=5), SEEDS)
def test_error_feedback_keeps_the_rest_of_each_target_to_the_bit(updates: list[Float32s], seed: int) -> None:
    layout, states = layout_of(TABLE, {"feedback": ErrorFeedback()}), first_states({"feedback": ErrorFeedback()}, NUM)
    spec = CodecSpec(name="topk", max_shift=12, options={"fraction": 0.2, "bits": 4})
    line = UpdatePipeline(
        codec=codec_of(spec),
        grid=(-15,) * 4,
        learning_rate=0.5,
        stages={"feedback": ErrorFeedback()},
        layout=layout,
        downlink={},
        rng_of=lambda _purpose, values: np.random.default_rng([seed, values.size]),
    )
    for update in updates:
        target = (update.astype(np.float64) + states["feedback"]["residual"]).astype(np.float32)
        outcome = line.apply(update, 1, states)
        sent = decoded(line.codec.codec, outcome.encoded.payload, NUM) * steps(line.grid, outcome.encoded.shifts)
        states = outcome.states
        assert np.array_equal(states["feedback"]["residual"] + sent, target)


@given(st.floats(1.0, 100.0, width=32), st.integers(-8, -1), SEEDS)
def test_values_of_at_least_a_step_are_unbiased_with_8_bits(value: float, exponent: int, seed: int) -> None:
    num = 20_000
    codec, many = topk(fraction=1.0), TensorTable.of({"a": (num,)})
    encoded = codec.encode(many, np.full(num, value, np.float32), (exponent,), 12, np.random.default_rng(seed))
    step = 2.0 ** (exponent + encoded.shifts[0])
    mean = float(decoded(codec, encoded.payload, num).mean()) * step
    # Hoeffding: for errors of at most a step, their mean exceeds 0.04 step with probability 2 exp(-2 n 0.04^2) < 1e-27.
    assert abs(mean - value) <= 0.04 * step


@given(CODECS_OF_ANY_SHARE, st.integers(1, 3 * SLICE_VALUES), SEEDS, st.data())
@example(topk(fraction=0.01), 3 * SLICE_VALUES, 0, None)
@example(topk(fraction=1.0, bits=2), SLICE_VALUES + 1, 0, None)
def test_bits_are_counted_exactly_and_slices_are_read_alone(
    codec: TopK, num: int, seed: int, data: st.DataObject | None
) -> None:
    rng = np.random.default_rng(seed)
    update = rng.standard_t(3, num).astype(np.float32)
    payload = codec.encode(TensorTable.of({"a": (num,)}), update, (-6,), 12, rng).payload
    sizes = [min(SLICE_VALUES, num - first) for first in range(0, num, SLICE_VALUES)]
    expected = []
    for size in sizes:
        sent = math.ceil(codec.fraction * size)
        low = int(math.log2(size // sent))
        expected.append(math.ceil((sent + (size - 1 >> low) + sent * low + sent * codec.bits) / 8))
    assert len(payload) == encoded_bytes(codec, num) == sum(expected)
    whole = decoded(codec, payload, num)
    chosen = [first + place for first in range(0, num, SLICE_VALUES) for place in _largest_of(codec, update, first)]
    assert set(np.flatnonzero(whole).tolist()) <= set(chosen)
    # The cuts are anywhere: inside the parts of slices.
    cuts = sorted(rng.integers(0, len(payload) + 1, 5).tolist())
    pieces = [payload[first:last] for first, last in pairwise([0, *cuts, len(payload)])]
    parts = list(decoded_pieces(codec, pieces, num))
    assert [part.size for part in parts] == sizes, "a reader holds one slice at a time"
    assert np.array_equal(np.concatenate(parts), whole)
    draw = [0, num // 2] if data is None else sorted(data.draw(st.tuples(st.integers(0, num), st.integers(0, num))))
    reads: list[int] = []

    def read(offset: int, size: int) -> bytes:
        reads.append(size)
        return payload[offset : offset + size]

    assert np.array_equal(decoded_part(codec, read, (draw[0], draw[1]), num), whole[draw[0] : draw[1]])
    num_slices = (draw[1] - 1) // SLICE_VALUES - draw[0] // SLICE_VALUES + 1 if draw[0] < draw[1] else 0
    assert sum(reads) <= num_slices * max(expected)


def _largest_of(codec: TopK, update: Float32s, first: int) -> list[int]:
    part = update[first : first + SLICE_VALUES]
    return largest(part, math.ceil(codec.fraction * part.size))


@given(CODECS_OF_ANY_SHARE, st.integers(1, 300), st.binary(max_size=600), st.data())
def test_any_bytes_decode_to_values_in_range_or_to_our_error(
    codec: TopK, num: int, noise: bytes, data: st.DataObject
) -> None:
    size = encoded_bytes(codec, num)
    payload = data.draw(st.sampled_from([noise, noise[:size].ljust(size, b"\0")]))
    try:
        values = decoded(codec, payload, num)
    except InvalidUpdate as exc:
        assert exc.code in ("FN-1840", "FN-0639")
        return
    assert values.shape == (num,)
    assert np.count_nonzero(values) <= math.ceil(codec.fraction * num)
    limit = largest_value(codec.bits)
    assert -limit - 1 <= values.min() <= values.max() <= limit


def _slice(highs: str, lows: list[int], tail: str = "") -> bytes:
    """Return a slice of 16 values, 4 of them sent with 2 bits: 7 bits of high parts, 2 low bits, 2 bits a value."""
    text = highs + "".join(f"{low:02b}"[::-1] for low in lows) + "10" * 4 + tail
    text = text.ljust(24, "0")
    return bytes(int(text[at : at + 8][::-1], 2) for at in range(0, len(text), 8))


@pytest.mark.parametrize(
    ("highs", "lows", "tail", "text"),
    [
        ("1010101", [1, 1, 1, 1], "", ""),
        ("1110000", [0, 1, 2, 3], "", "missing indices: got 3 of 16 values, expected 4"),
        ("1111100", [0, 1, 2, 3], "", "surplus indices: got 5 of 16 values, expected 4"),
        ("1111000", [0, 1, 1, 3], "", "duplicate index: got 1 after 1"),
        ("1111000", [0, 2, 1, 3], "", "unsorted indices: got 1 after 2"),
        ("1111000", [0, 1, 2, 3], "1", "surplus bits after the values"),
    ],
)
def test_wrong_indices_are_refused_by_name(highs: str, lows: list[int], tail: str, text: str) -> None:
    codec, payload = topk(fraction=0.25, bits=2), _slice(highs, lows, tail)
    if not text:
        assert np.flatnonzero(decoded(codec, payload, 16)).tolist() == [1, 5, 9, 13]
        return
    with pytest.raises(InvalidUpdate, match=text) as caught:
        decoded(codec, payload, 16)
    assert caught.value.code == "FN-1840"


def test_an_index_beyond_the_values_is_refused() -> None:
    # One of 3 values is sent with 8 bits: 2 bits of high parts, 1 low bit. High part 1 and low bit 1 are the index 3.
    codec = topk(fraction=0.3)
    with pytest.raises(InvalidUpdate, match="index out of range: got 3, expected one below 3"):
        decoded(codec, bytes([0b00001110, 0]), 3)


@pytest.mark.parametrize("num_bytes", [-1, 1])
def test_a_payload_of_another_size_is_refused(num_bytes: int) -> None:
    codec = topk(fraction=0.01)
    payload = bytes(encoded_bytes(codec, SLICE_VALUES + 5) + num_bytes)
    with pytest.raises(InvalidUpdate) as caught:
        list(decoded_pieces(codec, [payload], SLICE_VALUES + 5))
    assert caught.value.code in ("FN-0639", "FN-1840")


@given(st.lists(st.tuples(UPDATES, st.integers(1, 1 << 20), SEEDS), min_size=1, max_size=6), GRIDS, st.randoms())
def test_sparse_and_dense_updates_fold_to_what_python_adds(
    updates: list[tuple[Float32s, int, int]], grid: tuple[int, ...], random: Random
) -> None:
    contributions, expected = list[Contribution](), [0] * NUM
    codecs = (topk(fraction=0.3), CODECS["int8"], topk(fraction=0.5, bits=2), CODECS["int4"])
    for number, (update, weight, seed) in enumerate(updates):
        codec = codecs[number % len(codecs)]
        encoded = codec.encode(TABLE, update, grid, 8, np.random.default_rng(seed))
        values = decoded(codec, encoded.payload, NUM)
        for place, shift in enumerate(steps((0,) * 4, encoded.shifts)):
            expected[place] += weight * int(values[place]) * int(shift)
        pieces = list(decoded_pieces(codec, [encoded.payload], NUM))
        contributions.append(fresh(weight, encoded.shifts, CodecSpec(name="int8", max_shift=8), pieces))
    random.shuffle(contributions)
    total = begin(TABLE)
    for contribution in contributions:
        total = accept(total, TABLE, contribution)
    assert total.values.tolist() == expected


@pytest.mark.parametrize(
    "options", [{"fraction": 0.0}, {"fraction": 1.5}, {"fraction": math.nan}, {"fraction": 0.1, "bits": 3}, {}]
)
def test_wrong_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidPlan) as caught:
        codec_of(CodecSpec(name="topk", max_shift=12, options=options))
    assert caught.value.code == "FN-0216"


@given(CODECS_OF_ANY_SHARE, UPDATES, st.integers(0, NUM - 1), st.sampled_from((np.nan, np.inf, -np.inf)))
def test_values_that_are_not_finite_are_refused(codec: TopK, update: Float32s, where: int, value: float) -> None:
    assert isinstance(codec, SparseCodec)
    update[where] = value
    with pytest.raises(ValueError, match="update: got NaN or infinity"):
        codec.encode(TABLE, update, (0,) * 4, 0, np.random.default_rng(0))

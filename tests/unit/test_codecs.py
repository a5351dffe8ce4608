"""The codecs by example, and the input that they refuse."""

import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from support.errors import raises

from fanin.edge.codecs.codec import codec_of, guarded_codec
from fanin.edge.codecs.contract import check_codec
from fanin.edge.codecs.fixed import CODECS, DIVERGED, SLICE_VALUES, Encoded, decoded, largest_value
from fanin.edge.tensors import TensorTable
from fanin.protos.errors import InvalidPlan, InvalidUpdate
from fanin.protos.messages import MAX_GRID_EXPONENT, MIN_GRID_EXPONENT, CodecSpec
from fanin.protos.plans import MAX_CODEC_SHIFT

TABLE = TensorTable.of({"a": (2,), "b": (2,)})


def encode(name: str, values: list[float], max_shift: int = 0, seed: int = 0) -> Encoded:
    return CODECS[name].encode(TABLE, np.array(values, np.float32), (0, 0), max_shift, np.random.default_rng(seed))


def test_fixed32_rounds_to_the_nearest_step_ties_to_even() -> None:
    encoded = encode("fixed32", [0.5, 1.5, -2.5, 3.0])
    assert encoded.payload == struct.pack("<4i", 0, 2, -2, 3)
    assert (encoded.shifts, encoded.num_rounded, encoded.num_saturated) == ((0, 0), 3, 0)


def test_int8_rounds_at_random_and_equally_for_the_same_seed() -> None:
    results = {struct.unpack("<4b", encode("int8", [0.5, -1.5, 100.25, 3.0], seed=seed).payload) for seed in range(64)}
    assert {values[0] for values in results} == {0, 1}
    assert {values[1] for values in results} == {-2, -1}
    assert {values[2] for values in results} == {100, 101}
    assert {values[3] for values in results} == {3}
    assert encode("int8", [0.5, -1.5, 100.25, 3.0], seed=5) == encode("int8", [0.5, -1.5, 100.25, 3.0], seed=5)


def test_a_block_shifts_by_as_little_as_it_needs() -> None:
    encoded = encode("fixed32", [2.0**33, 4.0, 1.0, 1.0], 8)
    assert encoded.shifts == (3, 0)
    assert encoded.payload == struct.pack("<4i", 2**30, 0, 1, 1)
    assert (encoded.num_rounded, encoded.num_saturated) == (1, 0)
    encoded = encode("int8", [508.0, -4.0, 127.0, -127.0], 8)
    assert encoded.shifts == (2, 0)
    assert encoded.payload == struct.pack("<4b", 127, -1, 127, -127)
    assert (encoded.num_rounded, encoded.num_saturated) == (0, 0)


@pytest.mark.parametrize(("name", "form"), [("fixed32", "<4i"), ("int16", "<4h"), ("int8", "<4b")])
def test_beyond_the_last_shift_values_are_cut_and_counted(name: str, form: str) -> None:
    limit = largest_value(CODECS[name].bits)
    encoded = encode(name, [4.0 * (limit + 1), -(2.0**40), 1.0, 1.0], 2)
    assert encoded.shifts == (2, 0)
    assert encoded.payload == struct.pack(form, limit, -limit, 1, 1)
    assert (encoded.num_rounded, encoded.num_saturated) == (0, 2)


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("exponent", [MIN_GRID_EXPONENT, MAX_GRID_EXPONENT])
def test_any_grid_of_an_assignment_can_be_used(name: str, exponent: int) -> None:
    update = np.array([3e38, -1e-45, 0.0, -3e38], np.float32)
    encoded = CODECS[name].encode(TABLE, update, (exponent, exponent), MAX_CODEC_SHIFT, np.random.default_rng(0))
    values = decoded(CODECS[name], encoded.payload, 4).tolist()
    limit = largest_value(CODECS[name].bits)
    if exponent < 0:
        # Even the smallest float32 is 2^851 steps.
        assert values == [limit, -limit, 0, -limit]
        assert (encoded.num_rounded, encoded.num_saturated) == (0, 3)
    else:
        assert values == [0, 0, 0, 0]
        # Here the smallest float32 in steps underflows even in float64.
        assert (encoded.num_rounded, encoded.num_saturated) == (2, 0)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_an_update_is_never_changed_by_encoding_it(name: str) -> None:
    update = np.array([0.3, 1e20, -1.0, 0.0], np.float32)
    before = update.tobytes()
    CODECS[name].encode(TABLE, update, (0, 0), 3, np.random.default_rng(0))
    assert update.tobytes() == before


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("exponent", [MIN_GRID_EXPONENT, -31, -30, -8, 0, 3])
def test_a_long_update_is_encoded_as_its_values_one_by_one_would_be(name: str, exponent: int) -> None:
    """The codec computes in blocks and in float32. The reference applies the rule in float64 to the whole Update."""
    codec, num = CODECS[name], 2 * SLICE_VALUES + 7
    table = TensorTable.of({"a": (5,), "b": (num,)})
    update = np.random.default_rng(1).normal(0.0, 1.0, num + 5).astype(np.float32)
    update[:5] = 0.0
    update[5::3] *= np.float32(2.0**-20)
    encoded = codec.encode(table, update, (exponent, exponent), 2, np.random.default_rng(2))
    limit, shift = largest_value(codec.bits), encoded.shifts[1]
    scaled = update[5:].astype(np.float64) * 2.0 ** -(exponent + shift)
    if codec.is_stochastic:
        rng = np.random.default_rng(2)
        rng.random(5)
        rounded = np.copysign(np.floor(np.abs(scaled)) + (rng.random(num) < np.abs(scaled) % 1.0), scaled)
    else:
        rounded = np.rint(scaled)
    assert encoded.shifts[0] == 0
    assert encoded.num_rounded == np.count_nonzero(rounded != scaled)
    assert encoded.num_saturated == np.count_nonzero(np.abs(rounded) > limit)
    expected = np.clip(rounded, -limit, limit).astype(np.int64)
    np.testing.assert_array_equal(decoded(codec, encoded.payload, num + 5), np.concatenate([np.zeros(5), expected]))


def test_a_callers_mistakes_are_value_errors() -> None:
    rng = np.random.default_rng(0)
    with raises(ValueError, "grid: got 1 blocks, expected 2"):
        CODECS["fixed32"].encode(TABLE, np.zeros(4, np.float32), (0,), 0, rng)
    with raises(ValueError, "flat vector: got shape (3,), expected (4,)"):
        CODECS["fixed32"].encode(TABLE, np.zeros(3, np.float32), (0, 0), 0, rng)


def test_int4_has_two_values_in_a_byte_the_first_in_its_low_bits() -> None:
    encoded = encode("int4", [3.0, -1.0, -7.0, 56.0], 3)
    assert encoded.shifts == (0, 3)
    assert encoded.payload.hex() in ("f37f", "f370")
    table, update = TensorTable.of({"a": (1,), "b": (2,)}), np.array([-8.0, 2.0, -2.0], np.float32)
    odd = CODECS["int4"].encode(table, update, (0, 0), 0, np.random.default_rng(0))
    assert (odd.payload.hex(), odd.num_saturated) == ("290e", 1)


def test_a_piece_that_ends_within_a_value_is_refused() -> None:
    with raises(InvalidUpdate, "fixed32: got a payload of 7 bytes, expected a multiple of 4"):
        CODECS["fixed32"].decode(memoryview(bytes(7)))


@pytest.mark.parametrize(
    ("name", "hint"), [("", ""), ("int08", "; did you mean int8?"), ("Fixed32", "; did you mean fixed32?")]
)
def test_an_unknown_codec_is_refused(name: str, hint: str) -> None:
    names = "['fixed32', 'int16', 'int4', 'int8', 'topk']"
    text = f"plan: codec.name: got {name!r}, expected one of {names}, which are installed here{hint}"
    with raises(InvalidPlan, text):
        codec_of(CodecSpec(name=name, max_shift=0))


class Own:
    """``int8`` as a codec of another package, with one method whose result is changed."""

    bits = 8
    is_stochastic = True

    def __init__(self, method: str = "", change: Callable[[Any], object] = lambda result: result) -> None:
        self._method, self._change = method, change

    def encode(self, *arguments: Any) -> Any:
        return self._changed("encode", CODECS["int8"].encode(*arguments))

    def decode(self, payload: memoryview) -> Any:
        return self._changed("decode", CODECS["int8"].decode(payload))

    def _changed(self, method: str, result: object) -> object:
        return self._change(result) if method == self._method else result


NUMBERS = count()


def failing(_result: object) -> object:
    raise KeyError("beta")


@pytest.mark.parametrize("name", sorted(CODECS))
def test_the_codecs_of_fanin_keep_the_contract(name: str) -> None:
    check_codec(CODECS[name])
    check_codec(Own())


@pytest.mark.parametrize(
    ("method", "change", "text"),
    [
        ("encode", failing, "encode raised KeyError: 'beta'"),
        ("encode", lambda result: None, "encode returned NoneType, expected an Encoded with a payload of bytes"),
        ("encode", lambda result: replace(result, payload=b"1"), "encode returned 1 bytes, expected 72"),
        (
            "encode",
            lambda result: replace(result, shifts=(5, 0, 0)),
            "encode returned the shifts (5, 0, 0), expected one from 0 to 4 for each of 3 blocks",
        ),
        (
            "encode",
            lambda result: replace(result, shifts=(0,)),
            "encode returned the shifts (0,), expected one from 0 to 4 for each of 3 blocks",
        ),
        ("decode", failing, "decode raised KeyError: 'beta'"),
        ("decode", lambda values: values.astype("<i2"), "decode returned int16 (72,), expected int8 (72,)"),
        ("decode", lambda values: values[1:], "decode returned int8 (71,), expected int8 (72,)"),
        ("decode", list, "decode returned list, expected int8 (72,)"),
    ],
)
def test_a_wrong_result_of_a_codec_names_its_method(method: str, change: Any, text: str) -> None:
    with raises(InvalidPlan, f"codec Own: {text}; correct the codec"):
        check_codec(Own(method, change))


@pytest.mark.parametrize(
    ("method", "change", "text"),
    [
        (
            "encode",
            lambda result: replace(result, num_rounded=next(NUMBERS)),
            "encode: a repetition with the same generator gave another result",
        ),
        ("decode", lambda values: values[::-1], "decode: slices gave other values than the whole payload"),
        ("decode", lambda values: -values, "encode: moved a value of weights by "),
    ],
)
def test_the_contract_detects_a_codec_that_breaks_it(method: str, change: Any, text: str) -> None:
    with pytest.raises(AssertionError) as excinfo:
        check_codec(Own(method, change))
    assert str(excinfo.value).startswith(text)


def test_a_training_that_diverged_is_no_fault_of_the_codec() -> None:
    codec = guarded_codec(Own("encode", failing), "codec")
    with raises(ValueError, DIVERGED):
        codec.encode(TABLE, np.full(4, np.nan, np.float32), (0, 0), 0, np.random.default_rng(0))


def test_results_of_the_codecs_of_fanin_are_not_checked() -> None:
    for name, codec in CODECS.items():
        assert codec_of(CodecSpec(name=name, max_shift=0)).codec is codec

"""The fold and FedAvg against slow references in plain Python: the results are bit-identical."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.folds import fresh

from fanin.edge.codecs.fixed import largest_value
from fanin.edge.tensors import TensorTable
from fanin.protos.messages import CodecSpec
from fanin.server.aggregation.fold import SCRATCH_VALUES, accept, begin, finish
from fanin.server.aggregation.outer import FedAvg

TABLE = TensorTable.of({"a": (2, 2), "b": (), "c": (0,), "d": (3,)})
LIMIT = largest_value(32)
BLOCKS = (0, 0, 0, 0, 1, 3, 3, 3)
VALUES = st.lists(st.integers(-LIMIT, LIMIT), min_size=len(BLOCKS), max_size=len(BLOCKS))
CODEC = CodecSpec(name="fixed32", max_shift=4)
# Some shifts exceed the codec's limit: they come from the grid of an earlier Round.
SHIFTS = st.lists(st.integers(0, 4) | st.integers(-70, 70), min_size=4, max_size=4)
UPDATES = st.lists(st.tuples(st.integers(1, 1 << 20), SHIFTS, VALUES), min_size=1, max_size=5)
GRIDS = st.lists(st.integers(-60, 10), min_size=4, max_size=4)
PARAMETERS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=len(BLOCKS), max_size=len(BLOCKS))
Update = tuple[int, list[int], list[int]]


def slow_sums(updates: list[Update]) -> list[int]:
    """Fold value by value in unbounded integers."""
    sums = [0] * len(BLOCKS)
    for weight, shifts, values in updates:
        for index, block in enumerate(BLOCKS):
            sums[index] += weight * slow_move(values[index], shifts[block])
    return sums


def slow_move(value: int, shift: int) -> int:
    """Move a value to another grid: halves round to even, and values beyond the codec's range are clipped."""
    if shift < 0:
        return round(Fraction(value, 1 << -shift))
    limit = 1 << (31 + CODEC.max_shift)
    return max(-limit, min(limit, value << shift)) if shift > CODEC.max_shift else value << shift


def slow_fedavg(updates: list[Update], grid: list[int], parameters: list[float], rate: float) -> list[float]:
    """Compute FedAvg value by value: McMahan et al. 2017, algorithm 1, with a server learning rate."""
    total_weight = float(sum(weight for weight, _, _ in updates))
    after = []
    for total, block, parameter in zip(slow_sums(updates), BLOCKS, parameters, strict=True):
        mean = math.ldexp(float(total), grid[block]) / total_weight
        value = parameter + rate * mean
        after.append(struct.unpack("<f", struct.pack("<f", value))[0])
    return after


@given(UPDATES, GRIDS, PARAMETERS, st.floats(0.01, 2.0))
def test_numpy_and_plain_python_agree_in_bits(
    updates: list[Update], grid: list[int], parameters: list[float], rate: float
) -> None:
    total = begin(TABLE)
    for weight, shifts, values in updates:
        pieces = (np.array(values, np.int32),)
        total = accept(total, TABLE, fresh(weight, tuple(shifts), CODEC, pieces))
    assert total.values.tolist() == slow_sums(updates)

    start = np.array(parameters, np.float32)
    _, exact = FedAvg(rate).step({}, start.astype(np.float64), finish(total, TABLE, grid), 1)
    actual = exact.astype(np.float32)
    assert actual.tobytes() == struct.pack(f"<{len(BLOCKS)}f", *slow_fedavg(updates, grid, parameters, rate))


@pytest.mark.parametrize("dtype", [np.int8, np.int32])
@pytest.mark.parametrize("shift", [3, -2, 40])
def test_the_scratch_buffer_gives_the_bits_of_the_complete_expression(
    dtype: type[np.signedinteger], shift: int
) -> None:
    info = np.iinfo(dtype)
    values = np.random.default_rng(0).integers(-info.max, info.max, 2 * SCRATCH_VALUES + 3, dtype, endpoint=True)
    table = TensorTable.of({"a": (5,), "b": (values.size - 5,)})
    codec = CodecSpec(name={np.int8: "int8", np.int32: "fixed32"}[dtype], max_shift=4)
    pieces = np.split(values, [3, 7, SCRATCH_VALUES + 11, SCRATCH_VALUES + 11])
    total = accept(begin(table), table, fresh(1 << 20, (0, shift), codec, pieces))
    wide_values = values.astype(np.int64)
    limit = 1 << (info.bits - 1 + codec.max_shift)
    shifted_values = (
        np.rint(wide_values / 4.0).astype(np.int64) if shift < 0 else np.clip(wide_values * 2.0**shift, -limit, limit)
    )
    expected = np.concatenate([wide_values[:5], shifted_values[5:].astype(np.int64)]) * (1 << 20)
    np.testing.assert_array_equal(total.values, expected)

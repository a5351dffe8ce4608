"""``edge.ranges``: the grids of activations, histograms of extreme values, and the ranges that they describe."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.edge.ranges import (
    EDGES,
    NUM_BINS,
    OUTLIERS,
    Activation,
    bin_of,
    columns,
    counts,
    grid_of,
    grids_of,
    initial_ranges,
    ranges_of,
    ranges_of_data,
)
from fanin.edge.tensors import Float32s, Int64s
from fanin.protos.errors import InvalidVersion

ACTIVATIONS = tuple(
    Activation(name=name, graph_format=name.partition(":")[0], low=low, high=high)
    for name, low, high in (("onnx:a", -1.0, 2.0), ("tflite:a", 0.0, 4.0), ("onnx:b", -0.5, 0.0))
)
BEFORE = np.array([[-1.0, 2.0]], np.float32)
lows = st.floats(-(2.0**100), 0.0, width=32).map(np.float32)
highs = st.floats(0.0, 2.0**100, width=32).map(np.float32)


@given(low=lows, high=highs)
def test_a_grid_has_zero_and_its_range(low: np.float32, high: np.float32) -> None:
    scale, zero_point = grid_of(low, high)
    assert scale.dtype == np.float32 and zero_point.dtype == np.int8
    codes = np.array([-128, 127], np.float64)
    lowest, highest = float(scale) * (codes - float(zero_point))
    if 2.0**-50 < float(high) - float(low) < 2.0**60:
        # The grid is shifted by at most half a step, so that zero is on it.
        assert lowest <= float(low) + 0.51 * float(scale) and highest >= float(high) - 0.51 * float(scale)


def test_a_range_without_signal_has_a_grid() -> None:
    assert grid_of(np.float32(0.0), np.float32(0.0)) == (1.0, 0)


@pytest.mark.heavy
@given(low=lows, high=highs)
def test_the_grids_of_onnxruntimes_quantizer_are_the_same(low: np.float32, high: np.float32) -> None:
    quantizer = pytest.importorskip("onnxruntime.quantization.quant_utils")
    zero_point, scale = quantizer.compute_scale_zp(
        np.array(low), np.array(high), np.array(-128, np.int8), np.array(127, np.int8)
    )
    if 2.0**-60 <= float(scale) <= 2.0**60:
        assert grid_of(low, high) == (scale, zero_point)


def test_a_version_may_replace_the_ranges_of_the_export() -> None:
    assert initial_ranges(ACTIVATIONS).tolist() == [-1.0, 2.0, 0.0, 4.0, -0.5, 0.0]
    assert grids_of(ACTIVATIONS) == grids_of(ACTIVATIONS, initial_ranges(ACTIVATIONS))
    grids = grids_of(ACTIVATIONS, np.array([0.0, 255.0, -127.5, 127.5, -255.0, 0.0], np.float32))
    assert grids == {"onnx:a": (1.0, -128), "tflite:a": (1.0, 0), "onnx:b": (1.0, 127)}
    assert columns(ACTIVATIONS, "onnx").tolist() == [0, 2]


@pytest.mark.parametrize(
    "ranges",
    [
        np.zeros(4, np.float32),
        np.zeros(6, np.float64),
        np.zeros((3, 2), np.float32),
        np.array([0.5, 1, 0, 0, 0, 0], np.float32),
        np.array([0, 1, 0, 0, 0, np.nan], np.float32),
        np.array([-np.inf, 1, 0, 0, 0, 0], np.float32),
    ],
)
def test_ranges_that_do_not_fit_are_refused(ranges: Float32s) -> None:
    with pytest.raises(InvalidVersion) as caught:
        grids_of(ACTIVATIONS, ranges)
    assert caught.value.code == "FN-0361"


@given(magnitude=st.floats(0.0, 2.0**30, width=32).map(np.float32))
def test_a_bin_has_the_magnitudes_up_to_its_edge(magnitude: np.float32) -> None:
    (number,) = bin_of(np.array([magnitude], np.float32))
    assert number == 0 or EDGES[number - 1] < magnitude
    assert number == NUM_BINS - 1 or magnitude <= EDGES[number]


def histogram(examples: Float32s) -> Int64s:
    """Return the counts of one activation, of examples (n, 2) of its lowest and its highest value."""
    return counts(examples[:, :1], examples[:, 1:])


def spread(num: int) -> Float32s:
    """Return the extremes of examples: highs from 1 to 3, and lows of 0."""
    return np.stack([np.zeros(num), np.linspace(1.0, 3.0, num)], axis=1).astype(np.float32)


def test_ranges_hold_the_examples_and_are_not_much_wider() -> None:
    ((low, high),) = ranges_of(histogram(spread(1000)), BEFORE)
    assert low == 0.0 and 3.0 <= high <= 3.0 * 2**0.25


def test_counts_of_devices_add_up_in_any_order() -> None:
    rng = np.random.default_rng(1)
    examples = rng.normal(size=(300, 2)).astype(np.float32) * np.array([-1, 1], np.float32)
    parts = [histogram(examples[start : start + 50]) for start in range(0, 300, 50)]
    assert np.array_equal(sum(parts[::-1]), histogram(examples))


def test_one_example_of_a_hundred_moves_no_side() -> None:
    examples = spread(100)
    examples[0] = (-50000.0, 50000.0)
    ((low, high),) = ranges_of(histogram(examples), BEFORE)
    assert low == 0.0 and high < 4.0


def test_a_device_with_more_than_the_outliers_moves_a_side_outwards_only() -> None:
    honest, num = histogram(spread(2 * OUTLIERS)), 50
    outwards = ranges_of(honest + histogram(np.full((num, 2), (-100.0, 100.0), np.float32)), BEFORE)
    inwards = ranges_of(honest + histogram(np.zeros((num, 2), np.float32)), BEFORE)
    assert outwards[0, 1] > 100.0 and np.array_equal(inwards, ranges_of(honest, BEFORE))


def test_an_activation_without_counts_keeps_its_range() -> None:
    assert np.array_equal(ranges_of(np.zeros((1, 2, NUM_BINS), np.int64), BEFORE), BEFORE)
    dead = histogram(np.zeros((200, 2), np.float32))
    assert np.array_equal(ranges_of(dead, BEFORE), BEFORE)


def test_a_side_beyond_the_last_edge_stays_as_far_out_as_it_was() -> None:
    huge = histogram(np.full((200, 2), (0.0, 1e9), np.float32))
    assert ranges_of(huge, np.array([[0.0, 1e8]], np.float32)).tolist() == [[0.0, np.float32(1e8)]]
    assert ranges_of(huge, BEFORE)[0, 1] == EDGES[-1]


def test_an_example_that_is_not_finite_does_not_count() -> None:
    examples = spread(10)
    examples[3, 1], examples[4, 0] = np.nan, -np.inf
    assert histogram(examples).sum(axis=2).tolist() == [[8, 8]]
    ((low, high),) = ranges_of_data(examples[:, :1], examples[:, 1:], BEFORE)
    assert (low, high) == (0.0, 3.0)
    none = np.full((2, 1), np.nan, np.float32)
    assert np.array_equal(ranges_of_data(none, none, BEFORE), BEFORE)


def test_ranges_of_data_have_zero() -> None:
    values = np.array([[1.0], [2.0]], np.float32)
    assert ranges_of_data(values, values, BEFORE).tolist() == [[0.0, 2.0]]
    assert ranges_of_data(-values, -values, BEFORE).tolist() == [[-2.0, 0.0]]

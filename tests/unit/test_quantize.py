"""``edge.bundles.quantize``: the laws of the int8 codes, and the slots that a manifest may list."""

from dataclasses import replace

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.edge.bundles.derived import Derived, FoldedTensor
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.bundles.manifest_json import dump_manifest, parse_manifest
from fanin.edge.bundles.quantize import (
    bias_codes,
    bias_scales,
    fill_slots,
    weight_codes,
    weight_scales,
    with_derived,
)
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.ranges import MIN_INPUT_SCALE
from fanin.edge.signatures import DEVICE_SIGNATURES, Signature
from fanin.edge.tensors import TensorTable
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidBundle, InvalidVersion

TABLE = TensorTable.of({"bias": (3,), "norm": (2,), "weight": (3, 2)})
INPUT_SCALE = 0.25

finite = st.floats(-1e6, 1e6, width=32)
matrices = npst.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 7)), elements=finite)
flats = npst.arrays(np.float32, TABLE.num_values, elements=finite)


def slot(kind: SlotKind, parameter: str, shape: tuple[int, ...], **facts: object) -> Slot:
    """Return a slot that is named after its kind and parameter."""
    return replace(Slot(initializer=f"{parameter}.{kind}", kind=kind, parameter=parameter, shape=shape), **facts)


SLOTS = (
    slot(SlotKind.WEIGHT, "weight", (2, 3), axis=0, permutation=(1, 0)),
    slot(SlotKind.WEIGHT_SCALE, "weight", (3,), axis=0),
    slot(SlotKind.BIAS, "bias", (3,), weight="weight", axis=0, input_scale=INPUT_SCALE),
    slot(SlotKind.BIAS_SCALE, "bias", (3,), weight="weight", axis=0, input_scale=INPUT_SCALE),
    slot(SlotKind.FLOAT, "norm", (2,)),
)


@given(weight=matrices, axis=st.integers(0, 1))
def test_a_dequantized_weight_is_off_by_half_a_scale_at_most(weight: np.ndarray, axis: int) -> None:
    scales = weight_scales(weight, axis)
    column = np.expand_dims(scales.astype(np.float64), 1 - axis)
    error = np.abs(weight_codes(weight, axis, scales) * column - weight)
    # 127 scales equal the largest weight, up to the float32 rounding of the scale.
    assert np.all(error <= column / 2 * (1 + 1e-5))


@given(weight=matrices, axis=st.integers(0, 1))
def test_quantizing_a_dequantized_weight_returns_the_same_codes(weight: np.ndarray, axis: int) -> None:
    scales = weight_scales(weight, axis)
    codes = weight_codes(weight, axis, scales)
    dequantized = codes * np.expand_dims(scales, 1 - axis)
    assert dequantized.dtype == np.float32
    np.testing.assert_array_equal(weight_codes(dequantized, axis, weight_scales(dequantized, axis)), codes)


@given(weight=matrices)
def test_the_largest_weight_of_a_channel_has_the_largest_code(weight: np.ndarray) -> None:
    largest = np.abs(weight).max(axis=1)
    codes = np.abs(weight_codes(weight, 0, weight_scales(weight, 0))).max(axis=1)
    np.testing.assert_array_equal(codes[largest > 1e-12], 127)


def test_a_variance_below_zero_folds_as_zero() -> None:
    """The mean of Updates is rounded to a grid, so the variance of a channel can become negative."""
    derived = Derived(folded={"folded": FoldedTensor(value="norm", variance="variance", epsilon=1e-3)})
    norm, variances = np.float32([1.0, -2.0]), (np.float32([-0.5, 4.0]), np.float32([0.0, 4.0]))
    below, zero = (with_derived({"norm": norm, "variance": each}, derived)["folded"] for each in variances)
    np.testing.assert_array_equal(below, zero)
    np.testing.assert_allclose(below, norm / np.sqrt(np.float32([1e-3, 4.001])), rtol=1e-6)


@given(flat=flats, weightless=st.integers(0, 2))
def test_a_bias_keeps_its_value_even_where_its_channel_is_zero(flat: np.ndarray, weightless: int) -> None:
    flat = flat.copy()
    views = TABLE.views(flat)
    views["weight"][weightless] = 0.0
    values = fill_slots(SLOTS, TABLE, flat)
    scales = values["bias.bias_scale"].astype(np.float64)
    assert np.all(scales > 0)
    assert not values["weight.weight"][:, weightless].any()
    error = np.abs(values["bias.bias"] * scales - views["bias"])
    assert np.all(error <= scales / 2 + 1e-6 * np.abs(views["bias"]))


@given(flat=flats)
def test_slots_have_the_dtype_and_the_shape_that_they_declare(flat: np.ndarray) -> None:
    values = fill_slots(SLOTS, TABLE, flat)
    dtypes = {SlotKind.WEIGHT: np.int8, SlotKind.BIAS: np.int32}
    for each in SLOTS:
        value = values[each.initializer]
        assert value.shape == each.shape
        assert value.dtype == dtypes.get(each.kind, np.float32)
        assert value.flags.c_contiguous
    np.testing.assert_array_equal(values["norm.float"], TABLE.views(flat)["norm"])


def test_the_codes_of_a_worked_example() -> None:
    flat = TABLE.flatten(
        {
            "bias": np.array([1.0, -1.0, 0.0]),
            "norm": np.array([7.0, 8.0]),
            "weight": np.array([[1.27, -0.635], [0.0, 0.0], [-12.7, 0.05]], np.float32),
        }
    )
    values = fill_slots(SLOTS, TABLE, flat)
    np.testing.assert_allclose(values["weight.weight_scale"], [0.01, 1 / (INPUT_SCALE * 2**30), 0.1], rtol=1e-6)
    # -0.635 / 0.01 is a tie in decimals only: both float32 values differ from them a little.
    np.testing.assert_array_equal(values["weight.weight"][0], [127, 0, -127])
    assert values["weight.weight"][1, 0] in (-63, -64)
    np.testing.assert_array_equal(values["bias.bias"], [400, -(2**30), 0])


def test_a_tie_rounds_to_the_even_code() -> None:
    weight = np.array([[127.0, 0.5, 1.5, 2.5, -0.5]], np.float32)
    np.testing.assert_array_equal(weight_codes(weight, 0, weight_scales(weight, 0)), [[127, 0, 2, 2, 0]])


def test_a_bias_past_int32_saturates() -> None:
    scales = bias_scales(np.array([1e-9, 1e-9], np.float32), 1.0)
    np.testing.assert_array_equal(bias_codes(np.array([5.0, -5.0], np.float32), scales), [2**31 - 1, -(2**31 - 1)])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_version_that_is_not_finite_is_refused(bad: float) -> None:
    flat = np.zeros(TABLE.num_values, np.float32)
    TABLE.views(flat)["norm"][1] = bad
    with pytest.raises(InvalidVersion, match="FN-0359"):
        fill_slots(SLOTS, TABLE, flat)


def manifest_with(*slots: Slot) -> Manifest:
    """Return a manifest that lists these slots."""
    return Manifest(
        name="toy",
        batch_size=1,
        num_classes=2,
        table=TABLE,
        signatures={name: Signature(inputs=(), outputs=(), graphs={"onnx": "graph"}) for name in DEVICE_SIGNATURES},
        slots={"onnx": slots},
        artifacts={"parameters": artifact_of(b"any"), "graph": artifact_of(b"one for all")},
        initial="parameters",
    )


def test_slots_survive_the_manifest() -> None:
    assert parse_manifest(dump_manifest(manifest_with(*SLOTS))).slots == {"onnx": SLOTS}


@pytest.mark.parametrize(
    ("index", "facts", "message"),
    [
        (0, {"parameter": "gone"}, "names unknown parameters \\['gone'\\]"),
        (0, {"permutation": ()}, r"got shape \(2, 3\), expected \(3, 2\)"),
        (0, {"axis": 1}, "got axis 1, expected that of the weight_scale slot of 'weight', 0"),
        (0, {"axis": 2}, "got axis 2, expected one of 2 dimensions"),
        (0, {"input_scale": 1.0}, "expected a weight, and either an activation or an input_scale"),
        (1, {"shape": (2,)}, r"got shape \(2,\), expected \(3,\)"),
        (1, {"permutation": (1, 0)}, "expected one of . dimensions, and of a weight or a float only"),
        (2, {"weight": ""}, "expected a weight, and either an activation or an input_scale"),
        (2, {"input_scale": 0.0}, "expected a weight, and either an activation or an input_scale"),
        (2, {"input_scale": MIN_INPUT_SCALE / 2}, "expected a weight, and either an activation or an input_scale"),
        (2, {"input_scale": float("nan")}, "expected a weight, and either an activation or an input_scale"),
        (2, {"parameter": "norm", "shape": (2,)}, r"got a bias of shape \(2,\), expected \(3,\)"),
        (2, {"weight": "norm"}, "got a bias of shape"),
        (4, {"permutation": (1, 0)}, "expected one of . dimensions, and of a weight or a float only"),
        (4, {"initializer": "bias.bias"}, "two slots name the same initializer"),
    ],
)
def test_a_slot_that_does_not_fit_is_refused(index: int, facts: dict[str, object], message: str) -> None:
    slots = list(SLOTS)
    slots[index] = replace(slots[index], **facts)
    with pytest.raises(InvalidBundle, match=message):
        manifest_with(*slots)


def test_bias_scales_are_products_in_float64() -> None:
    scales = np.random.default_rng(0).uniform(1e-3, 1e-2, 2000).astype(np.float32)
    expected = (scales.astype(np.float64) * 0.1).astype(np.float32)
    np.testing.assert_array_equal(bias_scales(scales, 0.1), expected)
    # Products computed in float32 differ in some channels.
    assert (scales * np.float32(0.1) != expected).any()


def test_codes_of_a_weight_are_symmetric_for_any_scale() -> None:
    for sign in (-1.0, 1.0):
        assert weight_codes(np.float32([[sign]]), 0, np.float32([1 / 200])).tolist() == [[127 * sign]]

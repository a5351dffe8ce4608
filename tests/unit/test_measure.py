"""``edge.runtimes.measure``: the loss of quality by int8, and the limit above which an export is refused."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manifests import manifest
from support.values import PUBLISHER

from fanin.edge.bundles.bundle import Bundle, SignedManifest
from fanin.edge.bundles.keys import BUNDLE_CONTEXT
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.runtimes.base import BatchEvaluation, Evaluate, MeasureRanges, PaddedBatch, Predict, VersionValues
from fanin.edge.runtimes.measure import compare, measure
from fanin.edge.runtimes.quality import LabelDrop, Quality, check_drop
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidVersion

NO_VALUES = VersionValues(parameters=np.zeros(0, np.float32))
WORSE = Quality(
    num_examples=10_000,
    loss_sum=50.0,
    num_predictions=20_000,
    num_correct_float=19_000,
    num_correct_int8=18_700,
    num_agreeing=19_600,
)
"""Its 400 different labels have a sampling error of 0.16 points."""
VALUES = Quality(num_examples=4, loss_sum=2.0, squares_float=2.0, squares_int8=2.3, squares_wanted=100.0)


def test_the_text_has_points_and_shares() -> None:
    assert WORSE.drop_points == pytest.approx(1.5)
    assert str(WORSE) == "float 95.00 %, int8 93.50 %, agreeing 98.00 % on 20000 labels"
    assert str(VALUES) == "mean loss 0.5000 on 4 examples, int8's squared error +15.00 %"
    text = "mean loss 0.5000 (int8 +0.0250) on 4 examples, int8's squared error +15.00 %"
    assert str(replace(VALUES, loss_sum_int8=2.1)) == text


@pytest.mark.parametrize("limit", [0.0, 1.0, 1.3, float("nan")])
def test_more_than_the_limit_is_refused_and_no_number_is_no_limit(limit: float) -> None:
    with pytest.raises(InvalidVersion, match="FN-0375"):
        check_drop("here", WORSE, limit)


def test_less_than_the_limit_is_fine() -> None:
    assert check_drop("here", WORSE, 1.5) == check_drop("here", VALUES, 15.1) == ""


def sample(num_labels: int, num_lost: int, num_different: int) -> Quality:
    """Return the quality of a sample on which float is right."""
    return Quality(
        num_examples=num_labels,
        loss_sum=1.0,
        num_predictions=num_labels,
        num_correct_float=num_labels,
        num_correct_int8=num_labels - num_lost,
        num_agreeing=num_labels - num_different,
    )


def test_one_label_of_a_small_sample_is_chance_and_the_note_says_so() -> None:
    assert check_drop("here", sample(64, 1, 1)) == (
        "here: int8 loses 1 of 64 labels, 1.56 points with a sampling error of 2.57; one label is 1.6 points. The "
        "limit is 1, and this sample cannot judge the difference of 0.56 points; use at least 1337 labels"
    )
    for num in (2, 3):
        assert "this sample cannot judge" in check_drop("here", sample(64, num, num))
    with pytest.raises(
        InvalidVersion,
        match=r"here: int8 is 6\.25 points worse than float .*: int8 loses 4 of 64 labels, 6\.25 points with a "
        r"sampling error of 5\.14; one label is 1\.6 points, expected at most 1;",
    ):
        check_drop("here", sample(64, 4, 4))
    # Of the same shares, so many labels judge the difference.
    num = 1337
    assert LabelDrop(num_labels=num * 64, num_lost=num, num_different=num).exceeds(1.0)


def test_a_drop_that_equals_the_limit_fails_on_about_one_sample_of_twenty() -> None:
    rng = np.random.default_rng(0)
    for num_labels, is_lost, is_won in ((200, 0.03, 0.02), (1000, 0.05, 0.04), (5000, 0.02, 0.01)):
        draws = rng.multinomial(num_labels, [is_lost, is_won, 1.0 - is_lost - is_won], size=4000)
        drops = [
            LabelDrop(num_labels=num_labels, num_lost=int(lost - won), num_different=int(lost + won))
            for lost, won, _ in draws
        ]
        assert 0.03 < np.mean([drop.exceeds(1.0) for drop in drops]) < 0.07


@pytest.mark.parametrize("limit", [None, 14.9, float("nan")])
def test_values_have_a_limit_in_percent_of_their_squared_error(limit: float | None) -> None:
    with pytest.raises(InvalidVersion, match="FN-0375"):
        check_drop("here", VALUES, limit)
    check_drop("here", replace(VALUES, squares_int8=2.19), None)


def test_targets_of_another_form_have_a_limit_on_the_difference_of_the_outputs() -> None:
    other = replace(VALUES, squares_float=0.0, squares_int8=0.2, has_other_targets=True, loss_sum_int8=2.1)
    message = (
        "here: the mean square of the difference between int8's and float's outputs is 20.00 % of a hundredth of the "
        "variance of float's (mean loss 0.5000 (int8 +0.0250) on 4 examples, int8's outputs differ from float's by "
        "20.00 %), expected at most 10; "
    )
    with pytest.raises(InvalidVersion, match=re.escape(message)):
        check_drop("here", other)


def test_an_error_that_is_next_to_nothing_counts_as_a_hundredth_of_the_spread() -> None:
    assert replace(VALUES, squares_float=0.0, squares_int8=0.05).rise_percent == pytest.approx(5.0)
    flat = replace(VALUES, squares_float=0.0, squares_wanted=0.0)
    assert replace(flat, squares_int8=0.0).rise_percent == 0.0
    assert replace(flat, squares_int8=1e-9).rise_percent == math.inf


class Twins:
    """A runtime whose float model returns its input, and whose int8 model adds ``off``."""

    def __init__(self, off: np.ndarray) -> None:
        self._off = off

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        """Return a function with a loss of 1 a sample."""
        has_classes = bundle.manifest.num_classes

        def evaluate(parameters: Float32s, batch: PaddedBatch, *, with_logits: bool = False) -> BatchEvaluation:
            predictions = batch.inputs["x"].argmax(axis=-1).astype(np.int32) if has_classes else batch.inputs["x"]
            return BatchEvaluation(loss_sum=float(batch.mask.sum()), predicted=predictions)

        return evaluate

    def open_predict(self, bundle: Bundle, parameters: Float32s, ranges: Float32s | None = None) -> Predict:
        """Return the int8 model."""
        return lambda inputs: inputs["x"] + self._off

    def open_ranges(self, bundle: Bundle, parameters: Float32s) -> MeasureRanges:
        raise AssertionError("no ranges are measured here")


def bundle_with(num_classes: int) -> Bundle:
    """Return a Bundle with this number of classes; nothing else of it is used."""
    data = dump_manifest(replace(manifest(), num_classes=num_classes))
    signed = SignedManifest(data=data, public_key=PUBLISHER.public, signature=PUBLISHER.sign(BUNDLE_CONTEXT, data))
    return Bundle.open(signed, trusted=[PUBLISHER.public], read={}.__getitem__)


def batches_of(x: np.ndarray, y: np.ndarray) -> list[PaddedBatch]:
    """Return batches of 4; the padding of the last one would change the result if it counted."""
    pad = -len(x) % 4
    mask = np.concatenate([np.ones(len(x), np.float32), np.zeros(pad, np.float32)])
    x, y = (np.concatenate([part, np.repeat(100 * part[:1], pad, axis=0)]) for part in (x, y))
    return [
        PaddedBatch(inputs={"x": x[start : start + 4]}, y=y[start : start + 4], mask=mask[start : start + 4])
        for start in range(0, len(x), 4)
    ]


@given(
    num=st.integers(1, 11), shift=st.floats(-1000.0, 1000.0), off=st.floats(-1.0, 1.0, width=16), seed=st.integers(0, 9)
)
def test_values_are_measured_as_all_of_them_at_once_would_be(num: int, shift: float, off: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num, 3)).astype(np.float32)
    y = (x + shift + rng.standard_normal((num, 3))).astype(np.float32)
    runtime = Twins(np.full(3, off, np.float32))
    quality = measure(runtime, bundle_with(0), NO_VALUES, batches_of(x, y))
    exact, targets = x.astype(np.float64), y.astype(np.float64)
    assert (quality.num_examples, quality.loss_sum, quality.num_predictions) == (num, num, 0)
    assert quality.squares_float == pytest.approx(((exact - targets) ** 2).sum(), rel=1e-6)
    assert quality.squares_int8 == pytest.approx((((x + np.float32(off)) - targets) ** 2).sum(), rel=1e-6)
    assert quality.squares_wanted == pytest.approx(((targets - targets.mean(axis=0)) ** 2).sum(), rel=1e-6, abs=1e-9)
    comparison = compare(runtime, bundle_with(0), NO_VALUES, batches_of(x, np.zeros_like(y)))
    if num > 1:
        spread = ((exact - exact.mean(axis=0)) ** 2).sum()
        gap = (((x + np.float32(off)).astype(np.float64) - exact) ** 2).sum()
        assert comparison.relative_error == pytest.approx(math.sqrt(gap / spread), rel=1e-6, abs=1e-9)


def test_values_of_several_lengths_have_a_spread_for_each_length() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((8, length)).astype(np.float32) for length in (2, 5)]
    batches = [batch for x in parts for batch in batches_of(x, x + np.float32(1.0))]
    runtime = Twins(np.full(1, 0.5, np.float32))
    quality = measure(runtime, bundle_with(0), NO_VALUES, batches)
    spread = sum(np.square(x - x.mean(axis=0, dtype=np.float64)).sum() for x in parts)
    assert (quality.num_examples, quality.squares_float) == (16, pytest.approx(8 * 7.0, rel=1e-6))
    assert quality.squares_wanted == pytest.approx(spread, rel=1e-6)
    comparison = compare(runtime, bundle_with(0), NO_VALUES, batches)
    assert comparison.relative_error == pytest.approx(math.sqrt(0.25 * 8 * 7.0 / spread), rel=1e-6)


@pytest.mark.parametrize(
    ("changed", "agreement", "is_good"), [(0, 1.0, True), (1, 0.99, True), (4, 0.96, True), (8, 0.92, False)]
)
def test_classes_are_compared_by_how_often_both_choose_the_same(changed: int, agreement: float, is_good: bool) -> None:
    x = np.tile(np.array([0.0, 1.0], np.float32), (100, 1))
    x[:changed] = [0.0, 0.1]
    comparison = compare(
        Twins(np.array([0.5, 0.0], np.float32)),
        bundle_with(2),
        NO_VALUES,
        batches_of(x, np.zeros(100, np.int32)),
    )
    assert (comparison.num_examples, comparison.agreement, comparison.is_good) == (
        100,
        pytest.approx(agreement),
        is_good,
    )
    assert (
        str(comparison) == f"int8 and float agree on {100 * agreement:.2f} % of the labels on 100 calibration examples"
    )


def test_any_error_of_values_that_are_all_alike_is_large() -> None:
    x = np.ones((4, 2), np.float32)
    exact, inexact = (
        compare(
            Twins(np.full(2, off, np.float32)),
            bundle_with(0),
            NO_VALUES,
            batches_of(x, x),
        )
        for off in (0.0, 0.1)
    )
    assert exact.is_good and not inexact.is_good


def test_a_difference_of_outputs_that_hardly_vary_is_told_by_their_size() -> None:
    x = np.full((4, 2), 2.0, np.float32)
    x[0, 0] += np.float32(1e-6)
    comparison = compare(Twins(np.full(2, 0.1, np.float32)), bundle_with(0), NO_VALUES, batches_of(x, x))
    assert not comparison.is_good and comparison.relative_error == pytest.approx(5.0, rel=1e-3)
    assert str(comparison) == (
        "the outputs hardly vary: float's spread is below 1 % of their size, and int8 differs by 5 % of it on 4 "
        "calibration examples"
    )

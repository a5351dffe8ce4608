"""Evaluations of a Version: the fold of the devices' reports equals one evaluation over all their examples."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.edge.runtimes.evaluations import SQUARES_FLOAT, SQUARES_INT8, counts_of
from fanin.edge.runtimes.quality import Quality
from fanin.protos import messages as m
from fanin.protos.messages import Evaluation
from fanin.server.aggregation.statistics import MAX_RISE, evaluation_of, with_examples


def test_sums_become_means_and_shares() -> None:
    counts = {
        m.EVAL_EXAMPLES: 8,
        m.EVAL_PREDICTIONS: 8,
        m.EVAL_LOSS: 4 * m.LOSS_UNIT,
        m.EVAL_CORRECT_FLOAT: 6,
        m.EVAL_CORRECT_INT8: 5,
        m.EVAL_AGREE: 7,
    }
    assert evaluation_of(with_examples(counts), 10) == Evaluation(
        num_examples=8, loss=0.5, accuracy_float=0.75, accuracy_int8=0.625, int8_agreement=0.875, num_labels=8
    )


def test_shares_are_of_the_requested_predictions() -> None:
    # Two sequences of 8 places each, 3 of them without a token.
    counts = counts_of(Quality(num_examples=2, loss_sum=1.0, num_predictions=13, num_correct_float=13), 20)
    evaluation = evaluation_of(with_examples(counts), 20)
    assert evaluation == Evaluation(
        num_examples=2, loss=0.5, accuracy_float=1.0, accuracy_int8=0.0, int8_agreement=0.0, num_labels=13
    )


@pytest.mark.parametrize("counts", [{}, {m.EVAL_EXAMPLES: 0, m.EVAL_LOSS: 5}, {m.EVAL_EXAMPLES: -3}])
def test_without_validation_there_is_no_evaluation(counts: dict[str, int]) -> None:
    assert evaluation_of(with_examples(counts), 10) is None


SCALES = st.integers(-24, 30).map(lambda exponent: 2.0**exponent)


@given(
    rows=st.lists(st.tuples(st.integers(1, 99), st.floats(0.1, 9.0), st.floats(-0.1, 9.0)), min_size=1, max_size=6),
    scale=SCALES,
)
def test_the_rise_over_all_devices_is_that_of_all_examples_at_any_scale(
    rows: list[tuple[int, float, float]], scale: float
) -> None:
    counts: Counter[str] = Counter()
    for num_examples, error, increase in rows:
        device = Quality(
            num_examples=num_examples,
            loss_sum=0.5,
            squares_float=error * scale,
            squares_int8=(error + increase) * scale,
            squares_wanted=num_examples * scale,
        )
        counts.update(with_examples(m.Statistics(counts=counts_of(device, 0)).counts))
    total = Quality(
        num_examples=sum(row[0] for row in rows),
        loss_sum=0.5 * len(rows),
        squares_float=sum(row[1] for row in rows) * scale,
        squares_int8=sum(row[1] + row[2] for row in rows) * scale,
        squares_wanted=sum(row[0] for row in rows) * scale,
    )
    evaluation = evaluation_of(counts, 0)
    assert evaluation is not None and evaluation.int8_rise_percent is not None
    assert evaluation.int8_rise_percent == pytest.approx(total.rise_percent, rel=1e-3, abs=1e-3)
    assert (evaluation.num_examples, evaluation.accuracy_float, evaluation.accuracy_int8) == (
        total.num_examples,
        0.0,
        0.0,
    )


@pytest.mark.parametrize("error", [float("inf"), float("nan"), 1e300])
def test_an_error_without_bound_is_reported_as_the_maximum(error: float) -> None:
    counts = counts_of(Quality(num_examples=1, loss_sum=0.0, squares_float=1.0, squares_int8=error), 0)
    assert m.Statistics(counts=counts).counts[SQUARES_INT8] == m.MAX_SUM
    evaluation = evaluation_of(with_examples(counts), 0)
    assert evaluation is not None and evaluation.int8_rise_percent == MAX_RISE


def test_without_a_float_error_any_int8_error_is_reported_as_the_maximum() -> None:
    evaluation = evaluation_of(with_examples(counts_of(Quality(num_examples=1, loss_sum=0.0, squares_int8=0.5), 0)), 0)
    assert evaluation is not None and evaluation.int8_rise_percent == MAX_RISE


def test_a_classifier_reports_no_squares() -> None:
    evaluation = evaluation_of(with_examples(counts := counts_of(Quality(num_examples=1, loss_sum=0.0), 3)), 3)
    assert SQUARES_FLOAT not in counts
    assert evaluation is not None and evaluation.int8_rise_percent is None


def test_no_device_determines_the_kind_of_a_model() -> None:
    counts = counts_of(Quality(num_examples=1, loss_sum=0.0), 3) | {SQUARES_INT8: m.MAX_SUM}
    evaluation = evaluation_of(with_examples(counts), 3)
    assert evaluation is not None and evaluation.int8_rise_percent is None


@pytest.mark.parametrize("loss", [1e30, -1e30])
def test_a_loss_of_any_scale_can_be_reported(loss: float) -> None:
    counts = counts_of(Quality(num_examples=1, loss_sum=loss), 0)
    assert m.Statistics(counts=counts).counts[m.EVAL_LOSS] == (m.MAX_SUM if loss > 0 else -m.MAX_SUM)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_classifier_reports_at_most_the_loss_that_is_accepted(sign: int) -> None:
    for loss, expected in ((3.5, 7 * m.LOSS_UNIT // 2), (1e30, 3 * m.MAX_LOSS * m.LOSS_UNIT)):
        counts = counts_of(Quality(num_examples=3, loss_sum=sign * loss), 10)
        assert counts[m.EVAL_LOSS] == sign * expected

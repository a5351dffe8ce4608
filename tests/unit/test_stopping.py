"""When a Run rests, and what the sums of a Round say."""

import pytest

from fanin.protos import messages as m
from fanin.protos.plans import StopPlan
from fanin.protos.runs import Evaluation
from fanin.server.stopping import evaluation_of, reason_to_rest, train_loss_of

PATIENT = StopPlan(max_rounds=100, patience=2, min_delta=0.1)


@pytest.mark.parametrize(
    ("losses", "num_rounds", "stop", "reason"),
    [
        ([], 0, StopPlan(max_rounds=3), ""),
        ([], 2, StopPlan(max_rounds=3), ""),
        ([], 3, StopPlan(max_rounds=3), "3 of 3 rounds done"),
        ([1.0] * 50, 50, StopPlan(max_rounds=100), ""),
        ([1.0, 1.0], 2, PATIENT, ""),
        ([1.0, 1.0, 0.95], 3, PATIENT, "validation loss flat for 2 rounds (best 1.0000, since 0.9500)"),
        ([1.0, 1.0, 0.85], 3, PATIENT, ""),
        ([1.0, 0.85, 1.0], 3, PATIENT, ""),
        ([1.0, 0.5, 2.0, 2.0], 4, PATIENT, "validation loss flat for 2 rounds (best 0.5000, since 2.0000)"),
        ([1.0, 0.5, 0.5], 3, StopPlan(max_rounds=100, patience=1), ""),
        (
            [1.0, 0.5, 0.6],
            3,
            StopPlan(max_rounds=100, patience=1),
            "validation loss flat for 1 rounds (best 0.5000, since 0.6000)",
        ),
    ],
)
def test_when_a_run_rests(losses: list[float], num_rounds: int, stop: StopPlan, reason: str) -> None:
    assert reason_to_rest(losses, num_rounds, stop.max_rounds, stop) == reason


def test_sums_become_means_and_shares() -> None:
    counts = {
        m.EVAL_EXAMPLES: 8,
        m.EVAL_PREDICTIONS: 8,
        m.EVAL_LOSS: 4 * m.LOSS_UNIT,
        m.EVAL_CORRECT_FLOAT: 6,
        m.EVAL_CORRECT_INT8: 5,
        m.EVAL_AGREE: 7,
        m.EXAMPLES: 4,
        m.TRAIN_LOSS: 10 * m.LOSS_UNIT,
    }
    assert evaluation_of(counts) == Evaluation(
        num_examples=8, loss=0.5, accuracy_float=0.75, accuracy_int8=0.625, int8_agreement=0.875
    )
    assert train_loss_of(counts) == 2.5


def test_shares_are_of_what_was_asked_for() -> None:
    # Two sequences of 8 places each, 3 of them without a token.
    counts = {
        m.EVAL_EXAMPLES: 2,
        m.EVAL_PREDICTIONS: 13,
        m.EVAL_LOSS: m.LOSS_UNIT,
        m.EVAL_CORRECT_FLOAT: 13,
        m.EVAL_CORRECT_INT8: 0,
        m.EVAL_AGREE: 0,
    }
    found = evaluation_of(counts)
    assert found == Evaluation(num_examples=2, loss=0.5, accuracy_float=1.0, accuracy_int8=0.0, int8_agreement=0.0)


def test_values_have_a_loss_and_nothing_to_be_right_about() -> None:
    found = evaluation_of({m.EVAL_EXAMPLES: 4, m.EVAL_LOSS: m.LOSS_UNIT})
    assert found == Evaluation(num_examples=4, loss=0.25, accuracy_float=0.0, accuracy_int8=0.0, int8_agreement=0.0)


@pytest.mark.parametrize("counts", [{}, {m.EVAL_EXAMPLES: 0, m.EVAL_LOSS: 5}, {m.EVAL_EXAMPLES: -3}])
def test_without_validation_there_is_no_evaluation(counts: dict[str, int]) -> None:
    assert evaluation_of(counts) is None
    assert train_loss_of(counts) == 0.0

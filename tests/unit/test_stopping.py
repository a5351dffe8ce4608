"""The end of a Run, and the statistics derived from the sums of a Round."""

from collections import Counter

import pytest

from fanin.protos import messages as m
from fanin.protos.plans import StopPlan
from fanin.server.aggregation.statistics import (
    MAX_RUNTIMES,
    OTHER_RUNTIMES,
    evaluation_of,
    runtimes_of,
    train_loss_of,
    with_loss_examples,
)
from fanin.server.runs.driving.stopping import reason_to_rest

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
            "validation loss flat for 1 round (best 0.5000, since 0.6000)",
        ),
    ],
)
def test_when_a_run_rests(losses: list[float], num_rounds: int, stop: StopPlan, reason: str) -> None:
    assert reason_to_rest(losses, num_rounds, stop.max_rounds, stop) == reason


def test_the_training_loss_is_a_mean_over_examples() -> None:
    assert train_loss_of(with_loss_examples({m.EXAMPLES: 4, m.TRAIN_LOSS: 10 * m.LOSS_UNIT})) == 2.5


def test_a_device_without_a_loss_does_not_count_as_one_without_error() -> None:
    updates = (
        {m.EXAMPLES: 4, m.TRAIN_LOSS: 10 * m.LOSS_UNIT, m.EVAL_EXAMPLES: 2, m.EVAL_LOSS: 3 * m.LOSS_UNIT},
        {m.EXAMPLES: 96, m.EVAL_EXAMPLES: 50},
    )
    sums = sum((Counter(with_loss_examples(counts)) for counts in updates), Counter[str]())
    assert train_loss_of(sums) == 2.5
    evaluation = evaluation_of(sums, 0)
    assert evaluation is not None and (evaluation.num_examples, evaluation.loss) == (2, 1.5)


@pytest.mark.parametrize("counts", [{}, {m.EXAMPLES: 0, m.TRAIN_LOSS: 5}, {m.EXAMPLES: -3, m.TRAIN_LOSS: 5}])
def test_without_examples_there_is_no_training_loss(counts: dict[str, int]) -> None:
    assert train_loss_of(with_loss_examples(counts)) == 0.0


def test_runtimes_that_devices_invent_are_counted_together() -> None:
    assert runtimes_of(["b 1", "a 1", "b 1"]) == {"b 1": 2, "a 1": 1}
    assert runtimes_of([]) == {}
    counts = runtimes_of([*["good 1"] * 5, *(f"invented {number}" for number in range(1000))])
    assert (len(counts), counts["good 1"], sum(counts.values())) == (MAX_RUNTIMES + 1, 5, 1005)
    assert counts[OTHER_RUNTIMES] == 1005 - 5 - (MAX_RUNTIMES - 1)

"""The end of a Run, and the statistics derived from the sums of a Round."""

from collections import Counter
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.protos import messages as m
from fanin.protos.messages import Evaluation, LoggedEvent, RoundFailed, RunEvent, RunResumed, VersionPublished
from fanin.protos.plans import StopPlan
from fanin.server.aggregation.statistics import (
    MAX_RUNTIMES,
    OTHER_RUNTIMES,
    evaluation_of,
    runtimes_of,
    train_loss_of,
    with_examples,
)
from fanin.server.runs.driving.stopping import History, reason_to_rest

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


def version_of(loss: float | None, round_number: int = 1) -> VersionPublished:
    evaluation = None
    if loss is not None:
        evaluation = Evaluation(num_examples=9, loss=loss, accuracy_float=0.5, accuracy_int8=0.5, int8_agreement=1.0)
    return VersionPublished(
        number=1, version_sha256="0" * 64, parent=0, round=round_number, evaluation=evaluation, rounds=0
    )


FAILED = RoundFailed(round=1, reason="no data")
EXCUSED = RoundFailed(round=1, reason="a few devices", others_wait=True)
EVENTS = st.one_of(
    st.floats(0.0, 3.0).map(version_of),
    st.just(version_of(None)),
    st.just(FAILED),
    st.just(EXCUSED),
    st.just(RunResumed()),
    st.just(RunResumed(rounds=9)),
    st.just(version_of(None, 0)),
    st.just(replace(version_of(None, 0), rounds=7)),
)


@given(events=st.lists(EVENTS, max_size=30), patience=st.integers(0, 4), max_rounds=st.integers(1, 20))
def test_a_history_decides_as_the_list_of_all_events_does(
    events: list[RunEvent], patience: int, max_rounds: int
) -> None:
    stop = StopPlan(max_rounds=100, patience=patience, min_delta=0.1)
    history = History(stop)
    for number, event in enumerate(events):
        history.add([LoggedEvent(sequence=number, time=0.0, event=event)])
        since = events[: number + 1]
        start = max((place for place, each in enumerate(since) if getattr(each, "rounds", 0)), default=0)
        since = since[start:]
        outside = max((place for place, each in enumerate(since) if getattr(each, "round", 1) == 0), default=0)
        later = [each for each in since[outside:] if isinstance(each, VersionPublished) and each.round]
        losses = [each.evaluation.loss for each in later if each.evaluation is not None]
        num_rounds = sum(isinstance(each, VersionPublished) and bool(each.round) for each in events[: number + 1])
        # A failure while others wait neither counts nor ends the row.
        row = list(takewhile(lambda each: isinstance(each, RoundFailed), reversed(since)))
        if row.count(FAILED) >= 3:
            expected = f"3 rounds in a row: {row[0].reason}"
        else:
            expected = reason_to_rest(losses, num_rounds, max_rounds, stop)
        rest = history.rest_of(max_rounds)
        assert (rest.reason if rest else "") == expected


def test_a_history_does_not_grow_with_the_rounds() -> None:
    history = History(StopPlan(max_rounds=10**6, patience=5))

    history.add(LoggedEvent(sequence=0, time=0.0, event=version_of(1.0)) for _ in range(1000))
    assert all(len(value) <= 6 for value in vars(history).values() if isinstance(value, list))


def test_the_training_loss_is_a_mean_over_examples() -> None:
    assert train_loss_of(with_examples({m.EXAMPLES: 4, m.TRAIN_LOSS: 10 * m.LOSS_UNIT})) == 2.5


def test_a_device_without_a_loss_does_not_count_as_one_without_error() -> None:
    updates = (
        {m.EXAMPLES: 4, m.TRAIN_LOSS: 10 * m.LOSS_UNIT, m.EVAL_EXAMPLES: 2, m.EVAL_LOSS: 3 * m.LOSS_UNIT},
        {m.EXAMPLES: 96, m.EVAL_EXAMPLES: 50},
    )
    sums = sum((Counter(with_examples(counts)) for counts in updates), Counter[str]())
    assert train_loss_of(sums) == 2.5
    evaluation = evaluation_of(sums, 0)
    assert evaluation is not None and (evaluation.num_examples, evaluation.loss) == (2, 1.5)


@pytest.mark.parametrize("counts", [{}, {m.EXAMPLES: 0, m.TRAIN_LOSS: 5}, {m.EXAMPLES: -3, m.TRAIN_LOSS: 5}])
def test_without_examples_there_is_no_training_loss(counts: dict[str, int]) -> None:
    assert train_loss_of(with_examples(counts)) == 0.0


def test_runtimes_that_devices_invent_are_counted_together() -> None:
    assert runtimes_of(["b 1", "a 1", "b 1"]) == {"b 1": 2, "a 1": 1}
    assert runtimes_of([]) == {}
    counts = runtimes_of([*["good 1"] * 5, *(f"invented {number}" for number in range(1000))])
    assert (len(counts), counts["good 1"], sum(counts.values())) == (MAX_RUNTIMES + 1, 5, 1005)
    assert counts[OTHER_RUNTIMES] == 1005 - 5 - (MAX_RUNTIMES - 1)

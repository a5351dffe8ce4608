"""The fault model of simulated devices: lies and their refusals, broken connections, absences and slow work."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.scenarios import CALM, PATIENT_S, outcome_of
from support.virtual import plan

from fanin.protos.messages import RoundClosed
from fanin.simulation import Habits, Lie

REFUSED = {
    Lie.DIGEST: "InvalidUpdate: update: chunk 0: digest mismatch",
    Lie.RANGE: "InvalidUpdate: update: got 2 shifts up to 63, expected 2 up to 0",
    Lie.COUNT: "InvalidUpdate: update: got examples = -1, expected at least 1",
    Lie.ROUND: "InvalidUpdate: update: got run 'run' round ",
    Lie.FOREIGN: "NotFound: assignment run.",
}
"""A repeated Update is not refused: the coordinator reports again that it counts in its own Round."""


@pytest.mark.parametrize("lie", list(Lie), ids=lambda lie: lie.name.lower())
def test_a_liar_is_refused_and_changes_nothing(tmp_path: Path, lie: Lie) -> None:
    run_plan = plan(deadline_s=PATIENT_S, max_rounds=3)
    honest = outcome_of(tmp_path / "honest", run_plan, [CALM] * 4)
    liar = replace(CALM, lie=0.6, lies=(lie,))
    outcome = outcome_of(tmp_path / "liar", run_plan, [CALM, CALM, CALM, liar], seed=3)
    assert outcome.digests == honest.digests
    messages = [entry.what for entry in outcome.log if entry.who == "device-3"]
    assert f"lies: {lie.value}" in messages
    answers = [message for message in messages if message.startswith("is refused: ")]
    if lie in REFUSED:
        assert answers and all(message.startswith(f"is refused: {REFUSED[lie]}") for message in answers), answers
    else:
        # Before the device had an earlier Assignment, it claimed another Round, which is not refused.
        assert len(answers) < messages.count(f"lies: {lie.value}")
    assert not any("is refused" in entry.what for entry in outcome.log if entry.who != "device-3")


def test_a_connection_breaks_before_within_and_after_a_call(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, plan(deadline_s=PATIENT_S), [replace(CALM, cut=0.4, piece_s=1.0)] * 4, seed=2)
    broken = {entry.what for entry in outcome.log if entry.what.startswith("connection broke")}
    expected = {
        f"connection broke: {call}, {moment}" for call in ("check-in", "upload") for moment in ("before", "after")
    }
    assert expected | {"connection broke: upload, within", "connection broke: download, within"} <= broken


def test_a_device_that_leaves_comes_back_with_its_cache(tmp_path: Path) -> None:
    leaver = replace(CALM, stay_s=60.0, away_s=(5.0, 6.0), work_s=(20.0, 40.0))
    outcome = outcome_of(tmp_path, plan(deadline_s=PATIENT_S), [CALM, CALM, CALM, leaver], seed=4)
    messages = [entry.what for entry in outcome.log if entry.who == "device-3"]
    assert "is back" in messages
    # The Bundle's graph and Version 0 once, then one Version a Round. No cached Chunk was downloaded again.
    calm = outcome_of(tmp_path / "calm", plan(deadline_s=PATIENT_S), [CALM] * 4, seed=4)
    assert sum(version.bytes_down for version in outcome.versions) <= sum(
        version.bytes_down for version in calm.versions
    )


def test_lost_devices_stay_away_and_a_quorum_continues(tmp_path: Path) -> None:
    run_plan = plan(quorum=2, deadline_s=500.0, max_rounds=2)
    lost = replace(CALM, stay_s=1.0, lost=1.0)
    outcome = outcome_of(tmp_path, run_plan, [CALM, CALM, lost, lost])
    assert {entry.who for entry in outcome.log if entry.what == "is gone for good"} == {"device-2", "device-3"}
    closings = [record.event for record in outcome.events if isinstance(record.event, RoundClosed)]
    assert [set(event.accepted) for event in closings] == [{"device-0", "device-1"}] * 2


def test_slow_work_is_longer_by_its_factor() -> None:
    rng = random.Random(0)
    assert {Habits(work_s=(2.0, 2.0), slow=1.0, slow_times=5.0).work(rng, 1) for _ in range(3)} == {10.0}
    assert {Habits(work_s=(2.0, 2.0)).work(rng, 1) for _ in range(3)} == {2.0}
    assert (
        Habits(work_s=(2.0, 2.0), epoch_examples=6, examples_per_s=2.0, slow=1.0, slow_times=5.0).work(rng, 4) == 70.0
    )
    assert next(Habits().stays(rng))[0] is None
    assert next(Habits(stay_s=1.0, lost=1.0).stays(rng))[1] is None


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"slow": 1.5}, "got slow 1.5, expected a share"),
        ({"cut": -0.1}, "got cut -0.1, expected a share"),
        ({"lie": float("nan")}, "got lie nan, expected a share"),
        ({"work_s": (3.0, 2.0)}, "got work_s 3.0 to 2.0"),
        ({"epoch_examples": -1}, "got epoch_examples -1"),
        ({"bytes_up_per_s": 0.0}, "got bytes_up_per_s 0.0"),
        ({"away_s": (1.0, float("inf"))}, "got away_s 1.0 to inf"),
        ({"stay_s": 0.0}, "got stay_s 0.0"),
        ({"slow_times": 0.5}, "slow_times 0.5"),
        ({"lie": 0.1, "lies": ()}, "no lie to tell"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_habits_out_of_range_are_refused(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Habits(**wrong)

"""The schedule of a Plan: the training settings of each Round."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.errors import raises
from support.virtual import PUBLISHER, bundle_in, plan

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.clients.planfile import parse_plan
from fanin.clients.testing import Member, SyntheticTrainer
from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import MIN_RATE, ScheduledChange
from fanin.simulation import Scenario, play

TOML = """
app = "digits"
[cohort]
concurrency = 2
[training]
learning_rate = 0.5
epochs = 2
[[schedule]]
from_round = 3
decay = 0.5
[[schedule]]
from_round = 6
epochs = 4
[[schedule]]
from_round = 8
learning_rate = 0.25
batch_size = 4
[stop]
max_rounds = 9
"""


def test_each_round_has_the_settings_of_the_changes_before_it() -> None:
    run_plan = parse_plan(TOML, "plan.toml").plan
    settings = [run_plan.training_in(number) for number in range(1, 10)]
    assert [each.learning_rate for each in settings] == [0.5, 0.5, 0.5, 0.25, 0.125, 0.0625, 0.0625, 0.25, 0.25]
    assert [each.epochs for each in settings] == [2, 2, 2, 2, 2, 4, 4, 4, 4]
    assert [each.batch_size for each in settings] == [0] * 7 + [4, 4]
    assert {each.seed for each in settings} == {run_plan.training.seed}
    assert replace(run_plan, schedule=()).training_in(7) == run_plan.training


def test_a_rate_that_decays_for_long_stays_within_float32() -> None:
    run_plan = replace(plan(), schedule=(ScheduledChange(from_round=1, decay=0.5),))
    assert run_plan.training_in(4_000_000_000).learning_rate == MIN_RATE
    slow = replace(plan(), schedule=(ScheduledChange(from_round=1, learning_rate=1.0, decay=0.99),))
    assert slow.training_in(101).learning_rate == pytest.approx(0.99**100, rel=1e-12)


@dataclass(frozen=True, kw_only=True)
class RecordingTrainer(SyntheticTrainer):
    """A Trainer that records the settings of each Assignment by Round."""

    settings: dict[int, tuple[float, int]] = field(default_factory=dict)

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        self.settings[assignment.round] = (assignment.training.learning_rate, assignment.training.epochs)
        return super().train(model, assignment, should_continue)


def test_devices_receive_the_settings_of_their_round(tmp_path: Path) -> None:
    changes = (ScheduledChange(from_round=2, learning_rate=0.5, decay=0.25, epochs=3),)
    trainers = [RecordingTrainer(partition=number) for number in range(4)]
    scenario = Scenario(
        plan=replace(plan(), schedule=changes),
        bundle=bundle_in(tmp_path),
        publisher=PUBLISHER,
        members=tuple(Member(device=f"device-{each.partition}", trainer=each) for each in trainers),
        seed=1,
    )
    assert len(play(scenario).versions) == 3
    for trainer in trainers:
        assert trainer.settings == {1: (0.1, 1), 2: (0.5, 3), 3: (0.125, 3)}


@pytest.mark.parametrize(
    ("rounds", "rate", "message"),
    [
        (
            [3, 2],
            0.0,
            "plan: schedule: got the Rounds [3, 2], expected at most 64 in increasing order, each once; sort",
        ),
        (
            [2, 2],
            0.0,
            "plan: schedule: got the Rounds [2, 2], expected at most 64 in increasing order, each once; sort",
        ),
        ([2], 1e-40, "plan: schedule: got learning_rate 1e-40 from Round 2 on, expected 0.0 or at least 1.1754943508"),
    ],
)
def test_a_wrong_schedule_is_refused(rounds: list[int], rate: float, message: str) -> None:
    changes = tuple(ScheduledChange(from_round=number, learning_rate=rate) for number in rounds)
    with pytest.raises(InvalidPlan) as excinfo:
        replace(plan(), schedule=changes)
    assert str(excinfo.value).startswith(message)


def test_a_key_of_a_change_has_its_range() -> None:
    text = TOML.replace("decay = 0.5", "decay = 1.5")
    with raises(
        InvalidPlan,
        "plan.toml: schedule.0.decay: got 1.5, expected a number above 0 and at most 1; docs/plan.md describes the key",
    ):
        parse_plan(text, "plan.toml")

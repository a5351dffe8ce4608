"""The schedule of a Plan: the training settings of each Round."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.errors import raises
from support.virtual import PUBLISHER, bundle_in, plan

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.clients.planfile import parse_plan
from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import MIN_RATE, ScheduledChange
from fanin.protos.plans.schedule import outer_factor_in
from fanin.simulation import Member, Scenario, SyntheticTrainer, play

TOML = """
app = "digits"
[cohort]
concurrency = 2
[flower.config]
local-epochs = 1
name = "sgd"
[training]
learning_rate = 0.5
epochs = 2
proximal_weight = 0.5
optimizer = { momentum = 0.9, weight_decay = 0.125 }
warmup_steps = 3
[[schedule]]
from_round = 3
decay = 0.5
optimizer = { momentum = 0.5 }
flower.config = { name = "adam", local-epochs = 2 }
[[schedule]]
from_round = 6
epochs = 4
proximal_weight = 0.0
warmup_steps = 0
step_decay = "cosine"
flower.config = { local-epochs = 4 }
[[schedule]]
from_round = 8
learning_rate = 0.25
batch_size = 4
optimizer = { weight_decay = 0.0 }
step_decay = ""
[stop]
max_rounds = 9
"""


def test_each_round_has_the_settings_of_the_changes_before_it() -> None:
    run_plan = parse_plan(TOML, "plan.toml").plan
    settings = [run_plan.training_in(number) for number in range(1, 10)]
    assert [each.learning_rate for each in settings] == [0.5, 0.5, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.25, 0.25]
    assert [each.epochs for each in settings] == [2, 2, 2, 2, 2, 4, 4, 4, 4]
    assert [each.batch_size for each in settings] == [0] * 7 + [4, 4]
    assert [each.proximal_weight for each in settings] == [0.5] * 5 + [0.0] * 4
    assert [each.optimizer["momentum"] for each in settings] == [0.9] * 2 + [0.5] * 7
    assert [each.optimizer["weight_decay"] for each in settings] == [0.125] * 7 + [0.0] * 2
    assert [each.warmup_steps for each in settings] == [3] * 5 + [0] * 4
    assert [each.step_decay for each in settings] == [""] * 5 + ["cosine"] * 2 + [""] * 2
    configs = [run_plan.flower_in(number).config for number in range(1, 10)]
    assert [config["local-epochs"] for config in configs] == [1, 1, 2, 2, 2, 4, 4, 4, 4]
    assert [config["name"] for config in configs] == ["sgd"] * 2 + ["adam"] * 7
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

    settings: dict[int, m.Training] = field(default_factory=dict)

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        self.settings[assignment.round] = assignment.training
        return super().train(model, assignment, should_continue)


def test_devices_receive_the_settings_of_their_round_also_after_a_restart(tmp_path: Path) -> None:
    changes = (ScheduledChange(from_round=2, learning_rate=0.5, decay=0.25, epochs=3, warmup_steps=2),)
    trainers = [RecordingTrainer(partition=number) for number in range(4)]
    scenario = Scenario(
        plan=replace(plan(), schedule=changes),
        bundle=bundle_in(tmp_path),
        publisher=PUBLISHER,
        members=tuple(Member(device=f"device-{each.partition}", trainer=each) for each in trainers),
        seed=1,
        stops_s=(150.0,),
    )
    outcome = play(scenario, tmp_path / "coordinator")
    assert [verdict.problem for verdict in outcome.verdicts] == [""] * 4
    for trainer in trainers:
        changed = replace(plan().training, epochs=3, warmup_steps=2)
        rounds = {2: replace(changed, learning_rate=0.5), 3: replace(changed, learning_rate=0.125)}
        assert trainer.settings == {1: plan().training, **rounds}


@pytest.mark.parametrize(
    ("rounds", "shown"),
    [([3, 2], "[3, 2]"), ([2, 2], "[2, 2]"), (range(1, 66), str([*range(1, 66)]))],
)
def test_rounds_that_do_not_increase_or_are_too_many_are_refused(rounds: Sequence[int], shown: str) -> None:
    changes = tuple(ScheduledChange(from_round=number) for number in rounds)
    text = f"plan: schedule: got the Rounds {shown}, expected at most 64 in increasing order, each once; sort them or "
    with raises(InvalidPlan, text + "remove some"):
        replace(plan(), schedule=changes)


SEE = "; docs/reference/plan.md describes the key"
RATE_RULE = f"expected a number from 1.2e-38 to 1.7e+38{SEE}"
UNKNOWN = (
    "unknown key, expected one of from_round, learning_rate, decay, epochs, proximal_weight, batch_size, optimizer, "
    "warmup_steps, step_decay, outer_factor, outer_decay, [flower]"
)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("decay = 1.5", f"schedule.0.decay: got 1.5, expected a number above 0 and at most 1{SEE}"),
        ("learning_rate = 0.0", f"schedule.0.learning_rate: got 0.0, {RATE_RULE}"),
        ("learning_rate = 1e-40", f"schedule.0.learning_rate: got 1e-40, {RATE_RULE}"),
        (
            "outer_factor = 0.0",
            f"schedule.0.outer_factor: got 0.0, expected a number from 1.2e-38 to 1.7e+38{SEE}",
        ),
        ("outer_decay = 2.0", f"schedule.0.outer_decay: got 2.0, expected a number above 0 and at most 1{SEE}"),
        (
            "outer_decay = 0.5\n[flower]\nstrategy = 'm:s'",
            (
                "schedule.0: got outer_factor or outer_decay with flower.strategy 'm:s', expected none: a strategy "
                "makes the next parameters itself; remove them"
            ),
        ),
        ("epochs = 0", f"schedule.0.epochs: got 0, expected an integer from 1 to 10000{SEE}"),
        ("proximal_weight = -1.0", f"schedule.0.proximal_weight: got -1.0, expected a number from 0 to 1.7e+38{SEE}"),
        ("batch_size = 2.0", f"schedule.0.batch_size: got 2.0, expected an integer from 0 to 4294967295{SEE}"),
        ("optimizer = { momentum = 'a' }", f"schedule.0.optimizer.momentum: got 'a', expected a finite number{SEE}"),
        (
            "step_decay = 'square'",
            f"schedule.0.step_decay: got 'square', expected one of \"\", linear, cosine, step{SEE}",
        ),
        (
            "momentum = 0.5",
            f"schedule.0.momentum: {UNKNOWN}; did you mean schedule.0.optimizer.momentum?",
        ),
        ("seed = 5", f"schedule.0.seed: {UNKNOWN}; did you mean training.seed?"),
        (
            "flower.config = { local_epochs = 2 }",
            (
                "schedule.0.flower.config.local_epochs: got 2, but flower.config has no entry 'local_epochs' for the "
                "Rounds before, expected one of ['local-epochs', 'name']; add it to flower.config"
            ),
        ),
        (
            "flower.config = { local-epochs = 2.0 }",
            "schedule.0.flower.config.local-epochs: got 2.0, expected an integer as in flower.config; write both alike",
        ),
    ],
)
def test_a_wrong_key_of_a_change_raises_one_error(keys: str, message: str) -> None:
    head = TOML.partition("[[schedule]]")[0]
    if "[flower]" in keys:
        head = head.replace('[flower.config]\nlocal-epochs = 1\nname = "sgd"\n', "")
    with raises(InvalidPlan, f"plan.toml: {message}"):
        parse_plan(f"{head}[[schedule]]\nfrom_round = 2\n{keys}", "plan.toml")


def test_the_outer_factor_decays_like_the_learning_rate() -> None:
    schedule = (
        ScheduledChange(from_round=2, learning_rate=0.5, decay=0.5, outer_factor=0.5, outer_decay=0.5),
        ScheduledChange(from_round=5, epochs=2),
        ScheduledChange(from_round=7, learning_rate=4.0, outer_factor=4.0),
    )
    scheduled = replace(plan(), training=replace(plan().training, learning_rate=1.0), schedule=schedule)
    factors = [outer_factor_in(schedule, number) for number in range(1, 10)]
    assert factors == [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 4.0, 4.0, 4.0]
    assert factors == [scheduled.training_in(number).learning_rate for number in range(1, 10)]


def test_a_change_after_the_last_round_is_noted() -> None:
    run_plan = parse_plan(TOML, "plan.toml").plan
    assert run_plan.notes == ()
    assert parse_plan(TOML, "plan.toml", ["stop.max_rounds=8"]).plan.notes == ()
    (note,) = parse_plan(TOML, "plan.toml", ["stop.max_rounds=7"]).plan.notes
    assert note == (
        "schedule.2: from_round is 8, and the last Round of the plan is 7 (stop.max_rounds); the change applies only "
        "if Rounds fail, which count too, or if more Rounds are added (fanin resume --rounds)"
    )


def test_an_option_sets_a_schedule() -> None:
    option = "schedule=[{from_round = 2, flower.config.local-epochs = 8, optimizer.momentum = 0.25}]"
    run_plan = parse_plan(TOML, "plan.toml", [option]).plan
    assert [run_plan.flower_in(number).config["local-epochs"] for number in (1, 2, 9)] == [1, 8, 8]
    assert [run_plan.training_in(number).optimizer["momentum"] for number in (1, 2, 9)] == [0.9, 0.25, 0.25]
    message = "--set: schedule: got 5, expected a list of tables, as in --set 'schedule=[{from_round=5}]'"
    with raises(InvalidPlan, message):
        parse_plan(TOML, "plan.toml", ["schedule=5"])

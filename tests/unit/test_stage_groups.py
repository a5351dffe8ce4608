"""A group of a stage may have any name: ``check_stage``, the Run and ``fanin verify`` agree."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.stage_runs import scaffold
from support.virtual import PUBLISHER, SHAPES, plan

from fanin.edge.codecs.contract import check_stage
from fanin.edge.codecs.scaffold import CONTROL, Scaffold
from fanin.edge.codecs.stage import StageContext, State
from fanin.edge.codecs.stages import GROUP
from fanin.edge.codecs.vector import Group, Vector
from fanin.edge.tensors import Float32s, Float64s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import Plan
from fanin.protos.plans.named import passing
from fanin.server.aggregation.verify import verify_run
from fanin.server.folder import open_archive
from fanin.simulation import Member, Outcome, Scenario, SyntheticTrainer, play, synthetic_bundle

NUM_DEVICES = 3


class Renamed:
    """SCAFFOLD whose group has another name."""

    tensors = (CONTROL,)

    def __init__(self, name: str, scaffold: Scaffold) -> None:
        self._name, self._scaffold = name, scaffold
        self.groups = tuple(Group(name=name, weighting=group.weighting) for group in scaffold.groups)

    def prepare(self, state: State, downlink: Mapping[str, Float32s]) -> Mapping[str, Float32s]:
        return self._scaffold.prepare(state, {CONTROL: downlink[self._name]})

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        def send(inner: Vector) -> Mapping[str, Float64s]:
            decoded = context.send({(self._name if key == CONTROL else key): value for key, value in inner.items()})
            return {**decoded, CONTROL: decoded[self._name]}

        downlink = {CONTROL: context.downlink[self._name]}
        return self._scaffold.apply(vector, state, replace(context, send=send, downlink=downlink))

    def advance(self, auxiliary: Float64s, aggregate: Float64s, num_updates: int) -> Float64s:
        return self._scaffold.advance(auxiliary, aggregate, num_updates)


def played(folder: Path, run_plan: Plan, *, has_control: bool = True) -> Outcome:
    members = tuple(
        Member(device=f"device-{index}", trainer=SyntheticTrainer(partition=index)) for index in range(NUM_DEVICES)
    )
    bundle = synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES, scaffold=has_control)
    return play(Scenario(plan=run_plan, bundle=bundle, publisher=PUBLISHER, members=members, seed=3), folder / "run")


def staged(spec: m.StageSpec) -> Plan:
    return plan(stages=(spec,), concurrency=NUM_DEVICES, buffer=NUM_DEVICES, quorum=NUM_DEVICES)


@pytest.mark.parametrize("name", ["variate", "first-group", "z:9.+_-", "examples"])
def test_a_group_of_any_name_gives_the_parameters_of_scaffold(tmp_path: Path, name: str) -> None:
    stage = Renamed(name, Scaffold(num_devices=NUM_DEVICES))
    check_stage(stage)
    expected = played(tmp_path / "scaffold", staged(scaffold(NUM_DEVICES)))

    def own() -> Renamed:
        return stage

    with passing({(GROUP, "passed.own"): own}):
        outcome = played(tmp_path / "own", staged(m.StageSpec(name="passed.own")))
        verdicts = list(verify_run(open_archive(tmp_path / "own" / "run" / "state"), "run"))
        with pytest.raises(InvalidPlan, match=r"got the stage 'passed\.own', but the train graph has no inputs"):
            played(tmp_path / "plain", staged(m.StageSpec(name="passed.own")), has_control=False)
    assert outcome.digests == expected.digests and len(verdicts) == 4
    assert [verdict.problem for verdict in verdicts if verdict.problem] == []


class Unread(Renamed):
    """Has a group named ``control``, and sets no input of the train graph."""

    def prepare(self, state: State, downlink: Mapping[str, Float32s]) -> Mapping[str, Float32s]:
        return {}


def test_a_group_named_control_needs_no_input_of_the_train_graph(tmp_path: Path) -> None:
    stage = Unread(CONTROL, Scaffold(num_devices=NUM_DEVICES))
    check_stage(stage)

    def own() -> Unread:
        return stage

    with passing({(GROUP, "passed.own"): own}):
        outcome = played(tmp_path, staged(m.StageSpec(name="passed.own")), has_control=False)
    assert len(set(outcome.digests)) == len(outcome.digests) == np.size(outcome.digests) > 1

"""Rules, outer optimizers, stages and codecs as objects in the plan of a simulation, without a package."""

import logging
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from support.digits_fedavg import NUM_CLIENTS, PLAN, app_of, clients_of, network
from support.errors import raises
from support.virtual import PUBLISHER, bundle_in, plan

from fanin.edge.codecs.fixed import CODECS, Encoded, Integers
from fanin.edge.codecs.known import known_stages
from fanin.edge.codecs.stage import StageContext, State
from fanin.edge.codecs.vector import PARAMETERS, Vector
from fanin.edge.tensors import Float32s, Float64s, Int64s, TensorTable
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.plans import Plan
from fanin.protos.plans.keys import Key
from fanin.protos.plans.named import blamed, passing
from fanin.server.aggregation.checked import optimizer_of
from fanin.server.aggregation.outer import GROUP, FedAvg, OuterOptimizer
from fanin.server.aggregation.verify import verify_run
from fanin.server.folder import open_archive
from fanin.simulation import Member, Result, RunStopped, Scenario, SimulationSettings, SyntheticTrainer, play, simulate


class Middle:
    """The mean without the smallest and the largest value: ``trimmed_mean`` that cuts one Update at each end."""

    num_passes = 1

    def begin(self, num_updates: int) -> dict[str, np.ndarray]:
        return {}

    def look(self, state: Any, columns: Int64s, number: int) -> Any:
        raise AssertionError("one pass")

    def reduce(self, state: Any, columns: Int64s) -> Float64s:
        return np.sort(columns, axis=1)[:, 1:-1].sum(axis=1).astype(np.float64) / (columns.shape[1] - 2)


class Half(FedAvg):
    def __init__(self, rate: Annotated[float, Key(text="The rate.", above=0, at_most=1)] = 0.5) -> None:
        super().__init__(rate)


class Twice:
    """Sends the double of each change."""

    tensors = ()

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        context.send({**vector, PARAMETERS: vector[PARAMETERS] * np.float32(2.0)})
        return {}


class Copied:
    """The codec ``fixed32`` by another name."""

    bits, is_stochastic = 32, CODECS["fixed32"].is_stochastic

    def encode(
        self, table: TensorTable, update: Float32s, grid: Any, max_shift: int, rng: np.random.Generator
    ) -> Encoded:
        return CODECS["fixed32"].encode(table, update, grid, max_shift, rng)

    def decode(self, payload: memoryview) -> Integers:
        return CODECS["fixed32"].decode(payload)


def half(plan: Plan, *, rate: float = 0.5) -> OuterOptimizer:
    return FedAvg(rate)


def trained(**keys: object) -> Result:
    changes = {key.replace("__", "."): value for key, value in keys.items()}
    settings = SimulationSettings(plan=PLAN | {"training.epochs": 1} | changes, quiet=True, validation_fraction=0.0)
    return simulate(app_of(network()), clients_of(), cohort=NUM_CLIENTS, rounds=2, settings=settings)


def test_objects_of_every_kind_train_like_installed_parts() -> None:
    """A stage that doubles each change and an optimizer that halves it cancel."""
    options: dict[str, Any] = {"aggregation.rule_options": {"trim": 1.0 / NUM_CLIENTS + 0.01}}
    known = trained(aggregation__rule="trimmed_mean", cohort__quorum=NUM_CLIENTS, **options)
    passed = trained(
        aggregation__rule=Middle(), aggregation__outer_optimizer=Half(0.5), codec__name=Copied(), stages=[Twice()],
        cohort__quorum=NUM_CLIENTS,
    )  # fmt: skip
    assert passed.failures == () and len(passed.rounds) == 3
    for name, value in known.module.state_dict().items():
        torch.testing.assert_close(passed.module.state_dict()[name], value, rtol=0.0, atol=1e-5)
    assert "passed.Twice" not in known_stages(), "the names end with the simulation"


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", [Half, half])
def test_a_class_and_a_function_have_options(optimizer: object) -> None:
    plain = trained(aggregation__outer_options={"learning_rate": 0.25}, aggregation__outer_optimizer="fedavg")
    own = trained(aggregation={"outer_optimizer": optimizer, "outer_options": {"rate": 0.25}})
    assert own.digests == plain.digests


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"aggregation.outer_optimizer": Half, "aggregation.outer_options.rate": 2.0},
            "aggregation.outer_options.rate: got 2.0",
        ),
        (
            {"aggregation.outer_optimizer": Half(), "aggregation.outer_options.rate": 0.5},
            "aggregation.outer_options.rate: unknown option, expected none",
        ),
        (
            {"aggregation.rule": 3},
            "aggregation.rule: 'passed.int': got int, expected an object with the members of Rule",
        ),
        ({"stages": [{"name": Half()}]}, "stages: passed.Half: got Half, expected an object with the members of Stage"),
        ({"aggregation.rule": lambda plan: Middle()}, "aggregation.rule: got the function <lambda>, expected one with"),
    ],
)
def test_a_wrong_object_is_one_error_before_the_export(keys: dict[str, object], text: str) -> None:
    with pytest.raises((InvalidPlan, InvalidInput)) as error:
        trained(**keys)
    assert f"plan: {text}" in str(error.value)


class BrokenRule(Middle):
    def reduce(self, state: Any, columns: Int64s) -> Float64s:
        return np.concatenate([columns, np.zeros(3)]).astype(np.float64)


class BrokenOptimizer(Half):
    def step(self, state: Any, parameters: Float64s, aggregate: Float64s, number: int) -> tuple[Any, Float64s]:
        raise ZeroDivisionError("half of nothing")


def broken_policy(waiting: Any, num_places: int, round_number: int, rng: Any) -> Any:
    raise KeyError("nobody")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("rule BrokenRule: reduce raised ValueError: ", {"plan": {"aggregation.rule": BrokenRule()}}),
        (
            "step raised ZeroDivisionError: half of nothing",
            {"plan": {"aggregation.outer_optimizer": BrokenOptimizer()}},
        ),
        ("raised KeyError: 'nobody'", {"selection": broken_policy}),
    ],
)
def test_an_error_of_ones_own_part_has_its_kind_and_its_line(
    kind: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    keys = PLAN | {"cohort.quorum": NUM_CLIENTS, **changes.get("plan", {})}
    settings = SimulationSettings(
        plan=keys, quiet=True, validation_fraction=0.0, selection=changes.get("selection"), engine="graph"
    )
    with pytest.raises(RunStopped) as error:
        simulate(app_of(network()), clients_of(), cohort=NUM_CLIENTS, rounds=1, settings=settings)
    text = str(error.value)
    assert kind in text and re.search(r"\(\S*test_passed_parts\.py:\d+\)", text), text
    assert "log has the details" not in text
    assert [record for record in caplog.records if record.name.startswith("fanin.server")] == []
    assert logging.getLogger("fanin.server").level == logging.NOTSET


def test_an_error_outside_of_a_simulation_names_no_path() -> None:
    with pytest.raises(InvalidPlan) as error, blamed("stage x", "correct the stage"):
        Twice().apply({}, {}, None)  # type: ignore[arg-type]  # it raises
    assert ".py" not in str(error.value)


def test_verify_says_what_it_needs_of_a_record_with_a_passed_object(tmp_path: Path) -> None:
    run_plan = plan(outer_optimizer="passed.half", concurrency=2, buffer=2, quorum=2)
    members = tuple(Member(device=f"device-{i}", trainer=SyntheticTrainer(partition=i)) for i in range(2))
    scenario = Scenario(plan=run_plan, bundle=bundle_in(tmp_path), publisher=PUBLISHER, members=members, seed=1)
    with passing({(GROUP, "passed.half"): half}):
        play(scenario, tmp_path)
        archive = open_archive(tmp_path / "state")
        assert [each.problem for each in verify_run(archive, "run")] == [""] * 4
    text = (
        "plan: aggregation.outer_optimizer: got 'passed.half', an object that a simulation passed without a package, "
        "so its code is not in the record; install a package whose entry point 'passed.half' in the group "
        "fanin.outer_optimizers is its factory"
    )
    with raises(InvalidPlan, text):
        list(verify_run(archive, "run"))
    with raises(InvalidPlan, text):
        optimizer_of(run_plan)

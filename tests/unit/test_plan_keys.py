"""The arguments of ``simulate`` that are refused by their type, and keys of a Plan in tables and by dotted names."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn

from fanin.clients.data.examples import Examples
from fanin.edge.export import App, squared_error
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.plans import Plan
from fanin.simulation import Iid, Partition, SimulationSettings, partition, simulate
from fanin.simulation.arguments import plan_of

RATE = {"training.learning_rate": 0.1}


def regression() -> tuple[App, Partition]:
    x = np.ones((12, 3), np.float32)
    app = App(name="values", module=nn.Linear(3, 1), calibration=torch.ones(4, 3), batch_size=2, loss=squared_error)
    return app, partition(Examples(inputs={"x": x}, y=np.ones((12, 1), np.float32)), 2, Iid())


def planned(plan: Mapping[str, object], seed: int = 0) -> Plan:
    settings = SimulationSettings(plan=plan, seed=seed)
    return plan_of("values", 2, {"cohort": 2, "rounds": 3}, settings)


def test_tables_and_dotted_keys_are_merged_in_any_order() -> None:
    keys = {
        "training.epochs": 5,
        "training": {"learning_rate": 0.1, "optimizer.momentum": 0.5},
        "aggregation": {"outer_optimizer": "fedavgm", "outer_options": {"momentum": 0.5}},
        "aggregation.outer_options.learning_rate": 0.25,
        "cohort": {"quorum": 2},
        "stop": {},
    }
    plan = planned(keys, seed=7)
    assert plan == planned(dict(reversed(keys.items())), seed=7)
    assert (plan.training.epochs, plan.training.seed, plan.training.optimizer) == (5, 7, {"momentum": 0.5})
    assert plan.aggregation.outer_options == {"momentum": 0.5, "learning_rate": 0.25}
    assert (plan.cohort.concurrency, plan.cohort.quorum, plan.stop.max_rounds) == (2, 2, 3)


def test_names_of_a_free_table_keep_their_dots() -> None:
    roles = {"layer.*": "statistic", "b=c": "counter"}
    plan = planned(RATE | {"flower": {"roles": roles}, 'flower.roles."x.y"': "statistic"})
    assert sorted(plan.flower.roles) == ["b=c", "layer.*", "x.y"]


@pytest.mark.parametrize(
    "keys",
    [
        RATE | {"training.epochs": 5, "training": {"epochs": 5}},
        RATE | {"aggregation": {"outer_options": {"momentum": 0.5}}, "aggregation.outer_options.momentum": 0.1},
        {"training": {"learning_rate": 0.1, "seed": 3}},
        RATE | {"cohort": {"concurrency": 2}},
    ],
)
def test_a_key_that_is_set_twice_is_refused(keys: Mapping[str, object]) -> None:
    with pytest.raises(InvalidPlan, match=r"simulate: plan: got [a-z_.]+ ") as error:
        planned(keys)
    assert error.value.code == "FN-1175"


@pytest.mark.parametrize(
    ("keys", "form"),
    [
        ({"stages": ["error_feedback"]}, r'stages\.0: .*\{"stages": \[\{"name": "error_feedback"\}\]\}'),
        ({"evaluation.metrics": ["auc"]}, r'metrics\.0: .*\{"evaluation\.metrics": \[\{"name": "auc"\}\]\}'),
        ({"evaluation": {"metrics": [3]}}, r'metrics\.0: got 3, .*\{"evaluation\.metrics": \[\{"name": "NAME"\}\]\}'),
    ],
)
def test_a_name_in_a_list_of_tables_is_refused_with_the_form_of_that_name(
    keys: Mapping[str, object], form: str
) -> None:
    with pytest.raises(InvalidPlan, match=form):
        planned(RATE | keys)


@pytest.mark.parametrize("keys", [{"stop": {"target": 0.5}}, {"int8.ranges": "data"}])
def test_keys_that_need_data_ask_for_test_examples(keys: Mapping[str, object]) -> None:
    with pytest.raises(InvalidInput, match="set test in the settings") as error:
        planned(RATE | keys)
    assert error.value.code == "FN-1887"
    test = regression()[1].examples
    plan = plan_of("values", 2, {"cohort": 2, "rounds": 3}, SimulationSettings(plan=RATE | keys, test=test))
    assert plan.evaluation.data


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("test", {}),
        ("plan", "plan.toml"),
        ("plan", None),
        ("seeds", ()),
        ("keep", "head.*"),
        ("keep", 5),
        ("baseline", "yes"),
        ("resume", 3),
        ("validation_fraction", "0.1"),
        ("engine", None),
        ("processes", "2"),
        ("processes", 1.5),
        ("cluster", "ray://"),
        ("stop_on_failure", None),
        ("work", 0.5),
        ("on_round", None),
        ("on_version", 1),
        ("on_event", "print"),
        ("on_failure", []),
        ("quiet", 1),
    ],
)
def test_a_setting_of_another_type_is_refused_by_its_name(name: str, value: object) -> None:
    settings = SimulationSettings(**{"plan": RATE, name: value})  # type: ignore[arg-type]  # a mistake
    with pytest.raises(InvalidInput, match=f"simulate: {name}: got ") as error:
        simulate(*regression(), cohort=2, rounds=1, settings=settings)
    assert error.value.code == "FN-1714"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("test", 1),
        ("metrics", 1),
        ("selection", 1),
        ("seed", "1"),
        ("seeds", 1),
        ("initial", 1),
        ("trainer", 1),
        ("keep_versions", "1"),
        ("devices", 1),
    ],
)
def test_no_setting_of_another_type_raises_an_error_of_python(name: str, value: object) -> None:
    settings = SimulationSettings(**{"plan": RATE, name: value})  # type: ignore[arg-type]  # a mistake
    with pytest.raises(InvalidInput, match=f"simulate: .*{name}"):
        simulate(*regression(), cohort=2, rounds=1, settings=settings)


def test_settings_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidInput, match="settings: got") as error:
        simulate(*regression(), cohort=2, rounds=1, settings={"seed": 1})  # type: ignore[arg-type]  # a mistake
    assert error.value.code == "FN-1714"

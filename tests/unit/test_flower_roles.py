"""Roles of arrays of Flower apps: by the names of torch's buffers, and by ``[flower.roles]`` of the Plan."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from support.errors import raises

from fanin.clients.planfile import check_overrides, parse_plan
from fanin.edge.bundles.arrays import write_arrays
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.errors import FaninError, InvalidInput, InvalidPlan
from fanin.protos.roles import RoleKind, TensorRole
from fanin.simulation import Result, SimulationSettings, simulate

WEIGHTS: Final = (30, 10)
"""``num-examples`` of the two clients."""
PLAN: Final = {
    "training.learning_rate": 1.0,
    "aggregation.outer_optimizer": "nesterov",
    "aggregation.outer_options.learning_rate": 0.5,
    "aggregation.outer_options.momentum": 0.5,
    "cohort.quorum": 2,
}
NAMED: Final = {
    "w": np.zeros(2, np.float32),
    "bn.running_mean": np.zeros(2, np.float32),
    "bn.running_var": np.ones(2, np.float32),
    "bn.num_batches_tracked": np.zeros((), np.float32),
}
CHANGES: Final = {"w": (1.0, 1.0), "running_mean": (-0.5, 0.5), "running_var": (-0.25, 0.75), "tracked": (3000, 1001)}
MEANS: Final = {"w": 1.0, "running_mean": -0.25, "running_var": 0.0, "tracked": 2500.25}
HEAD: Final = 'bundle = "b"\n[cohort]\nconcurrency = 1\n[training]\nlearning_rate = 1.0\n'
"""The begin of a Plan."""
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    partition = int(context.node_config["partition-id"])
    arrays = {name: array.numpy().copy() for name, array in message.content["arrays"].items()}
    for name, values in arrays.items():
        values += next(change[partition] for end, change in CHANGES.items() if name.endswith(end))
    record = ArrayRecord({name: Array(values) for name, values in arrays.items()})
    metrics = MetricRecord({"num-examples": WEIGHTS[partition]})
    return Message(content=RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)


class Positional(NumPyClient):
    """A client whose arrays have no names: a weight and a variance."""

    def __init__(self, partition: int) -> None:
        self._partition = partition

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, object]) -> tuple[list[np.ndarray], int, dict]:
        weight, variance = parameters
        changed = [weight + np.float32(1.0), variance * np.float32(0.5)]
        return changed, WEIGHTS[self._partition], {}


def client_fn(context: Context) -> Client:
    return Positional(int(context.node_config["partition-id"])).to_client()


def simulated(client: object, initial: object, rounds: int = 2, **plan: object) -> Result:
    settings = SimulationSettings(initial=initial, plan={**PLAN, **plan}, quiet=True)
    return simulate(client, 2, cohort=2, rounds=rounds, settings=settings)


def test_names_of_torchs_buffers_have_their_roles_without_a_key() -> None:
    arrays = simulated(app, NAMED).arrays
    assert np.allclose(arrays["w"], 0.75 + 0.875)
    assert np.allclose(arrays["bn.running_mean"], 2 * MEANS["running_mean"])
    assert np.allclose(arrays["bn.running_var"], 1.0)
    assert arrays["bn.num_batches_tracked"].shape == ()
    assert arrays["bn.num_batches_tracked"] == 2 * 2500


def test_a_plan_gives_roles_to_arrays_without_names() -> None:
    initial = [np.zeros(3, np.float32), np.ones(3, np.float32)]
    roles = {"1": {"role": "statistic", "lowest": 0.0}}
    arrays = simulated(client_fn, initial, rounds=3, **{"flower.roles": roles}).arrays
    assert np.allclose(arrays["1"], 0.5**3)
    # Without the key, the momentum moves the variance below zero.
    assert simulated(client_fn, initial, rounds=9).arrays["1"].min() < 0.0


def test_a_plan_replaces_the_role_of_a_name() -> None:
    arrays = simulated(app, NAMED, **{"flower.roles": {"*.running_mean": "parameter"}}).arrays
    assert np.allclose(arrays["bn.running_mean"], -0.25 * (0.75 + 0.875))


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ({"running_*": "statistic"}, "plan: flower.roles: the pattern 'running_*' matches no array that travels"),
        ({"bn.*": "statistic", "*mean": "statistic"}, "match the array 'bn.running_mean', expected one"),
        ({"w": "trained"}, "flower.roles.w: got 'trained', expected one of parameter, statistic, counter"),
        ({"w": {"role": "statistic", "lowest": 1.0, "highest": 0.0}}, "flower.roles.w: got {'role': 'statistic'"),
        ({"w": {"role": "statistic", "lowest": 1.0}}, "tensor 'w': got 0, expected finite numbers of at least 1"),
    ],
)
def test_wrong_roles_are_refused_before_the_first_round(roles: Mapping[str, object], text: str) -> None:
    with pytest.raises(FaninError) as refusal:
        simulated(app, NAMED, **{"flower.roles": roles})
    assert text in str(refusal.value)


def test_a_schedule_has_no_roles() -> None:
    text = f'{HEAD}[[schedule]]\nfrom_round = 2\nflower.roles = {{ w = "counter" }}'
    reason = "an array has one role in all Rounds; move it to flower.roles"
    with raises(InvalidPlan, f"p.toml: schedule.0.flower.roles: got ['w'], expected none: {reason}"):
        parse_plan(text, "p.toml")


def test_a_table_of_roles_in_toml() -> None:
    table = '[flower.roles]\n"*.gate" = { role = "parameter", lowest = 0, highest = 1 }\n3 = "counter"'
    assert parse_plan(HEAD + table, "p.toml").plan.flower.roles == {
        "*.gate": TensorRole(role=RoleKind.PARAMETER, lowest=0.0, highest=1.0),
        "3": TensorRole(role=RoleKind.COUNTER),
    }


def test_initial_arrays_out_of_their_range_are_refused_by_name(tmp_path: Path) -> None:
    arrays = {**NAMED, "bn.running_var": np.array([1.0, -0.5], np.float32)}
    reason = "expected finite numbers of at least 0, because it is a statistic; correct its values"
    with raises(InvalidInput, f"tensor 'bn.running_var': got -0.5, {reason}"):
        write_arrays(arrays, tmp_path / "bundle", SigningKey.generate(), "named")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("key", ['flower.roles."layer.*"', "flower.roles.'layer.*'", "flower.roles.layer.*"])
def test_a_pattern_of_an_option_may_have_the_quotes_of_toml(key: str) -> None:
    expected = {"layer.*": TensorRole(role=RoleKind.STATISTIC)}
    assert parse_plan(HEAD, "p.toml", [f"{key}=statistic"]).plan.flower.roles == expected
    with pytest.raises(InvalidPlan, match="FN-0285"):
        parse_plan(HEAD, "p.toml", [f"{key}=trained"])


@pytest.mark.parametrize("key", ['flower.roles."layer.*', 'flower.roles.*."w"'])
def test_a_key_with_wrong_quotes_is_refused(key: str) -> None:
    with pytest.raises(InvalidPlan, match=rf"^--set {re.escape(key)}: got quotes that TOML does not read \("):
        check_overrides([f"{key}=statistic"])

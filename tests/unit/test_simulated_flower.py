"""Flower apps in ``simulate``: their clients, the state between Rounds, their errors, and wrong arguments."""

import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from traceback import format_exception
from typing import Final

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from support.errors import raises
from support.flower_apps import MESSAGE_APP, NUMPY_APP, write_app

from fanin.clients import Examples, FlowerSettings
from fanin.clients.flower.app import arrays_of
from fanin.protos.errors import InvalidInput, RuntimeMissing
from fanin.server.selection.policies import WaitingDevice, uniform
from fanin.simulation import (
    ClientFailed,
    DeviceModel,
    Fixed,
    Iid,
    Lognormal,
    Result,
    SimulationSettings,
    partition,
    simulate,
)
from fanin.simulation.progress import line_of

INITIAL: Final = {
    "layer.weight": np.zeros((2, 3), np.float32),
    "norm.num_batches_tracked": np.array(3, np.int64),
    "layer.bias": np.ones(2, np.float32),
}
PLAN: Final = {
    "training.learning_rate": 0.5,
    "codec.name": "fixed32",
    "statistics": [{"name": f"train.{name}", "bound": 1 << 40} for name in ("rounds", "norm")],
}
COUNTS: Final = MESSAGE_APP.replace('"rounds": len(seen) + 1,', '"rounds": len(seen) + 1, "norm": NORM,').replace(
    "NORM", 'int(arrays["norm.num_batches_tracked"])'
)


def settings_of(**changes: object) -> SimulationSettings:
    return replace(SimulationSettings(initial=INITIAL, plan=PLAN, quiet=True), **changes)


@pytest.fixture
def app(tmp_path: Path) -> FlowerSettings:
    folder = write_app(tmp_path / "app", "simulated_message_app", COUNTS)
    return FlowerSettings(app="simulated_message_app:app", folder=folder, run_config="scale=0.25")


def mean_of(result: Result, number: int, name: str) -> float:
    """Return a metric of a Round, averaged as in Flower."""
    row = result.rounds[number]
    return row.statistics[f"train.{name}"] / 65536 / row.num_examples


def test_an_upload_arrives_at_each_bandwidth_that_a_coordinator_allows(app: FlowerSettings) -> None:
    """A piece has the size of a real device's: at 4,500 bytes a second it arrives within the coordinator's 60 s."""
    initial = {**INITIAL, "table.weight": np.zeros(150_000, np.float32)}
    devices = DeviceModel(bytes_up_per_s=4500.0)
    result = simulate(app, 2, cohort=2, rounds=1, settings=settings_of(initial=initial, devices=devices))
    assert "connection lost" not in {event.event for event in result.events}
    assert result.rounds[-1].time_s > 600_000 / 4500


def test_a_client_keeps_its_state_and_its_local_arrays(app: FlowerSettings) -> None:
    result = simulate(app, 3, cohort=3, rounds=3, settings=settings_of())
    assert result.failures == ()
    assert (result.engine, result.app, result.best) == ("flower", None, None)
    # The weights are 10 * (partition-id + 1).
    assert [row.num_examples for row in result.rounds] == [0, 60, 60, 60]
    assert [mean_of(result, number, "rounds") for number in (1, 2, 3)] == [1, 2, 3]
    assert [mean_of(result, number, "norm") for number in (1, 2, 3)] == [4, 5, 6]
    assert {name: array.dtype for name, array in result.arrays.items()} == {k: v.dtype for k, v in INITIAL.items()}
    np.testing.assert_allclose(result.arrays["layer.bias"], 1 - 3 * 0.25, atol=1e-5)
    # The app reports a loss, and fanin predicts no labels with it.
    assert all(math.isnan(row.validation_accuracy) for row in (*result.rounds, *result.clients))
    assert all(math.isfinite(row.validation_loss) for row in result.rounds[1:])
    assert {row.client for row in result.clients} == {0, 1, 2}
    assert all(row.train_loss == pytest.approx(0.5) for row in result.clients)
    with pytest.raises(InvalidInput, match="FN-1196"):
        _ = result.module


PARTIAL: Final = (
    COUNTS.replace(
        '"train_loss": 0.5, "rounds": len(seen) + 1,',
        '**({} if partition == 0 else {"train_loss": 0.5 * partition, "rounds": partition}),',
    )
    .replace(
        '{"eval_loss": 2.0, "eval_acc": 0.75, "num-examples": weight.size}',
        '{"eval_acc": 0.75, "num-examples": weight.size} | '
        '({} if partition == 0 else {"eval_loss": 2.0 if partition == 1 else float("nan")})',
    )
    .replace(
        "def evaluate(msg, context):",
        'def evaluate(msg, context):\n    partition = context.node_config["partition-id"]',
    )
)


def test_the_means_of_a_round_are_over_the_clients_that_report(tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "simulated_partial_app", PARTIAL)
    app = FlowerSettings(app="simulated_partial_app:app", folder=folder)
    statistics = [*PLAN["statistics"], {"name": "evaluate.eval_acc", "bound": 1 << 40}]
    result = simulate(app, 3, cohort=3, rounds=1, settings=settings_of(plan={**PLAN, "statistics": statistics}))
    row, clients = result.rounds[1], result.clients
    # The clients have 10, 20 and 30 examples, and the first reports no loss.
    assert [client.train_loss for client in clients] == pytest.approx([math.nan, 0.5, 1.0], nan_ok=True)
    assert (row.num_examples, row.train_loss_examples) == (60, 50)
    assert row.train_loss == pytest.approx((20 * 0.5 + 30 * 1.0) / 50)
    assert row.means["train.rounds"] == pytest.approx((20 * 1 + 30 * 2) / 50)
    assert "train loss 0.8000 (of 50 of 60 examples)" in line_of(row)
    # All clients evaluate with a weight of 6. One of them has a finite loss.
    assert [client.validation_loss for client in clients] == pytest.approx([math.nan, 2.0, math.nan], nan_ok=True)
    assert row.validation_loss == pytest.approx(2.0)
    assert row.means["evaluate.eval_acc"] == pytest.approx(0.75)
    assert "  validation loss 2.0000  train.rounds 1.6000  " in line_of(row)


def test_a_client_that_misses_a_round_keeps_its_state(app: FlowerSettings) -> None:
    result = simulate(app, 4, cohort=2, rounds=6, settings=settings_of())
    num_trainings: dict[int, int] = {}
    for number in range(1, 7):
        rows = [row for row in result.clients if row.round == number]
        for row in rows:
            num_trainings[row.client] = num_trainings.get(row.client, 0) + 1
            assert row.statistics["train.rounds"] == 65536 * row.num_examples * num_trainings[row.client]
    assert len(num_trainings) > 2


def test_a_client_whose_update_is_stale_keeps_its_state(app: FlowerSettings) -> None:
    plan = {**PLAN, "cohort.buffer": 2, "cohort.quorum": 1, "aggregation.max_staleness": 4}
    devices = DeviceModel(bytes_up_per_s=Lognormal(median=20.0, sigma=1.5))
    result = simulate(app, 6, cohort=4, rounds=12, settings=settings_of(plan=plan, devices=devices))
    begun = {(event.client, event.round) for event in result.events if event.event == "training"}
    assert {(row.client, row.round) for row in result.clients} - begun, "an Update was stale"
    num_trainings: dict[int, int] = {}
    for row in result.clients:
        num_trainings[row.client] = num_trainings.get(row.client, 0) + 1
        assert row.statistics["train.rounds"] == 65536 * row.num_examples * num_trainings[row.client]


def test_worker_processes_are_bit_identical_to_one_process(app: FlowerSettings) -> None:
    single, parallel = (simulate(app, 3, cohort=3, rounds=2, settings=settings_of(processes=n)) for n in (1, 2))
    assert single.failures == parallel.failures == ()
    assert single.digests == parallel.digests
    assert mean_of(parallel, 2, "rounds") == 2


class Shifting(NumPyClient):
    """A client that adds its partition's number, with the number of partitions as its weight."""

    def __init__(self, partition_id: int, num_partitions: int) -> None:
        self._partition_id, self._num_partitions = partition_id, num_partitions

    def get_parameters(self, config: object) -> list[np.ndarray]:
        return [np.zeros(2, np.float32)]

    def fit(self, parameters: list[np.ndarray], config: object) -> tuple[list[np.ndarray], int, dict[str, float]]:
        if self._partition_id == 1:
            raise OSError("no pictures here")
        return [parameters[0] + self._partition_id], self._num_partitions, {}


def client_fn(context: Context) -> Client:
    return Shifting(context.node_config["partition-id"], context.node_config["num-partitions"]).to_client()


@pytest.mark.parametrize("app", [client_fn, ClientApp(client_fn=client_fn)])
def test_an_object_is_a_client_of_many_and_one_that_fails_is_named(app: object) -> None:
    settings = settings_of(initial=None, plan={"training.learning_rate": 1, "cohort.quorum": 1})
    result = simulate(app, 4, cohort=3, rounds=2, settings=settings)
    assert result.is_complete
    assert {row.num_examples for row in result.clients} == {4}
    # The app reports no loss.
    assert all(math.isnan(row.train_loss) for row in (*result.rounds, *result.clients))
    assert "loss" not in line_of(result.rounds[1])
    failures = {(failure.client, failure.round) for failure in result.failures}
    assert {client for client, _ in failures} == {1}
    assert "no pictures here" in result.failures[0].error
    assert 'raise OSError("no pictures here")' in result.failures[0].traceback
    clients = {row.client for row in result.clients if row.round == 1}
    (values,) = result.arrays.values()
    assert 1 not in clients
    assert values.min() > 0
    with pytest.raises(ClientFailed, match=r"client 1 in round 1: .*no pictures here"):
        simulate(app, 4, cohort=4, rounds=1, settings=replace(settings, stop_on_failure=True))


def lowest(
    waiting: Sequence[WaitingDevice], num_places: int, round_number: int, rng: random.Random
) -> Sequence[WaitingDevice]:
    """Select the clients with the lowest numbers."""
    return sorted(waiting, key=lambda device: int(device.device_id.removeprefix("client-")))[:num_places]


class Turns:
    """A policy that selects the clients with the lowest numbers that have not trained."""

    def __init__(self) -> None:
        self._selected: set[str] = set()

    def __call__(
        self, waiting: Sequence[WaitingDevice], num_places: int, round_number: int, rng: random.Random
    ) -> Sequence[WaitingDevice]:
        selection = lowest(
            [each for each in waiting if each.device_id not in self._selected], num_places, round_number, rng
        )
        self._selected |= {each.device_id for each in selection}
        return selection


@pytest.mark.parametrize(("policy", "numbers"), [(lowest, range(2, 5)), (Turns, range(6, 7))])
def test_a_custom_policy_selects_the_clients(app: FlowerSettings, policy: type[Turns], numbers: range) -> None:
    results = [
        simulate(app, 9, cohort=2, rounds=4, settings=settings_of(selection=policy, processes=processes))
        for processes in (1, 2)
    ]
    assert results[0].digests == results[1].digests
    for result in results:
        assert result.selection == policy.__name__
        # Round 1 opens while the first clients check in. Those that have just trained check in a little later.
        assert len({row.client for row in result.clients if row.round > 1}) in numbers


@pytest.mark.parametrize(
    ("selection", "plan", "error"),
    [
        (lambda *_: [], {}, "selection: got '<lambda>', expected .*; define a function with def"),
        ("uniform", {}, r"got str, expected a function \(waiting, num_places, round_number, rng\) or a class of such"),
        (uniform, {}, "selection: got a policy named 'uniform', which fanin has itself; rename yours"),
        (lowest, {"cohort.selection": "least_recent"}, "got lowest and the plan's cohort.selection 'least_recent'"),
    ],
)
def test_a_wrong_policy_raises_one_error(selection: object, plan: dict[str, object], error: str) -> None:
    settings = settings_of(plan={"training.learning_rate": 1} | plan, selection=selection)
    with pytest.raises(InvalidInput, match=error):
        simulate(client_fn, 4, cohort=2, rounds=1, settings=settings)


def test_an_app_that_always_fails_ends_the_simulation_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    partitions: list[object] = []

    def broken(context: Context) -> Client:
        partitions.append(context.node_config["partition-id"])
        raise OSError("no pictures here")

    settings = settings_of(plan={"training.learning_rate": 1})
    with pytest.raises(ClientFailed, match=r"the first trainings of 6 clients failed, .*no pictures here") as excinfo:
        simulate(broken, 6, cohort=2, rounds=3, settings=settings)
    assert excinfo.value.code == "FN-0905"
    assert set(partitions) == set(range(6))
    assert len(partitions) < 20
    assert "Traceback" not in caplog.text
    text = "".join(format_exception(excinfo.value))
    assert text.count('raise OSError("no pictures here")') == 1
    assert "no running event loop" not in text


def test_the_arrays_of_get_parameters_are_the_first_ones(tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "simulated_numpy_app", NUMPY_APP)
    app = FlowerSettings(app="simulated_numpy_app:app", folder=folder)
    result = simulate(app, 2, cohort=2, rounds=1, settings=settings_of(initial=None))
    assert result.arrays["0"].tolist() == [4.0] * 3
    assert result.rounds[1].train_loss == pytest.approx(0.25)


def data() -> Examples:
    return Examples(inputs={"x": np.zeros((4, 2), np.float32)}, y=np.zeros(4, np.int32))


NO_NUMBER: Final = (
    "with a Flower app, expected the number of clients, 1 or more: the app loads the data of its partition itself"
)
NO_ARRAYS: Final = "initial: got str, expected a torch module, a state dict, or a list of arrays"
OF_GRAPHS: Final = {
    "baseline": True,
    "resume": Path("record"),
    "engine": "vmap",
    "devices": DeviceModel(examples_per_s=Fixed(value=1)),
}
NO_GRAPHS: Final = (
    "simulate: got baseline, resume, engine, devices.examples_per_s with a Flower app, expected none of them: "
    "the app trains and evaluates by itself, and no graphs exist; remove them (docs/tutorials/from-flower.md)"
)


@pytest.mark.parametrize(
    ("clients", "changes", "error"),
    [
        (partition(data(), 2, Iid()), {}, f"simulate: clients: got Partition {NO_NUMBER}"),
        (0, {}, f"simulate: clients: got 0 {NO_NUMBER}"),
        (2, {}, "simulate: got a cohort of 3, expected at most the 2 clients"),
        (3, OF_GRAPHS, NO_GRAPHS),
        (3, {"initial": "x"}, NO_ARRAYS),
    ],
)
def test_a_wrong_argument_raises_one_error(clients: object, changes: dict[str, object], error: str) -> None:
    with raises(InvalidInput, error):
        simulate(client_fn, clients, cohort=3, rounds=1, settings=settings_of(**changes))  # type: ignore[arg-type]


def test_a_change_after_the_last_round_is_noted(app: FlowerSettings, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {**PLAN, "schedule": [{"from_round": 9}]}
    simulate(app, 2, cohort=2, rounds=1, settings=settings_of(plan=plan, quiet=False))
    note = "note: schedule.0: from_round is 9, and the last Round of the plan is 1 (stop.max_rounds); "
    assert note in capsys.readouterr().err


def test_a_message_app_needs_initial_arrays(app: FlowerSettings) -> None:
    with pytest.raises(InvalidInput, match="FN-1171"):
        simulate(app, 3, cohort=3, rounds=1, settings=settings_of(initial=None))


class Brain:
    """An object that is neither an App nor a Flower app."""


@pytest.mark.parametrize("app", [Brain(), 3, None])
def test_another_object_is_no_app(app: object) -> None:
    with pytest.raises(InvalidInput, match="FN-1170"):
        simulate(app, 3, cohort=3, rounds=1)


@pytest.mark.parametrize("as_arrays", [lambda tensor: [tensor], lambda tensor: {"0": tensor}])
def test_bfloat16_is_refused_by_name(as_arrays: object) -> None:
    import torch

    tensors: Sequence[object] | dict[str, object] = as_arrays(torch.zeros(2, dtype=torch.bfloat16))  # type: ignore[operator]
    with pytest.raises(InvalidInput, match="FN-0902"):
        arrays_of(tensors)


def test_the_config_of_the_plan_has_all_types_of_a_config_record() -> None:
    config = {"epochs": 2, "mu": 1.0, "name": "sgd", "deep": True, "key": b"\x00\xff", "sizes": [1, 2], "none": []}
    configs: list[dict[str, object]] = []
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        configs.append(dict(msg.content["config"]))
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": msg.content["arrays"], "metrics": metrics}), reply_to=msg)

    plan = {"training.learning_rate": 1, "flower.config": config}
    result = simulate(app, 1, cohort=1, rounds=1, settings=settings_of(plan=plan))
    assert result.failures == ()
    (values,) = configs
    assert values == {"lr": 1.0, **config, "server_round": 1, "current_round": 1, "round": 1, "server-round": 1}
    assert [type(values[name]) for name in config] == [type(value) for value in config.values()]


ALONE: Final = """
import sys

for name in ("torch", "onnxruntime", "onnx", "loky", "ray", "matplotlib"):
    sys.modules[name] = None
import numpy as np
from flwr.client import NumPyClient

from fanin.simulation import SimulationSettings, simulate


class Client(NumPyClient):
    def fit(self, parameters, config):
        return [parameters[0] + 1], 1, {}


settings = SimulationSettings(initial=[np.zeros(2, np.float32)], plan={"training.learning_rate": 1}, quiet=True)
result = simulate(lambda context: Client().to_client(), 2, cohort=2, rounds=1, settings=settings)
print(result.arrays["0"], result.failures)
"""


def test_the_extras_server_and_flower_are_enough() -> None:
    completed = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert completed.stdout == "[1. 1.] ()\n"


def test_flwr_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if flwr were never imported: a module that is None has no spec.
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(RuntimeMissing, match="FN-1104"):
        simulate(FlowerSettings(app="x:app", folder=Path.cwd()), 2, cohort=2, rounds=1, settings=settings_of())

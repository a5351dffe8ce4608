"""Rounds of a Flower app: precedence of configurations, the cap of the weight, and the status of a reply."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Code, EvaluateIns, EvaluateRes, FitIns, FitRes, Status
from support.flower_apps import NUMPY_APP, write_app
from support.values import PUBLISHER

from fanin.clients.device.contract import Countdown, example_assignment, example_model
from fanin.clients.flower.app import FlowerApp
from fanin.clients.flower.states import FlowerStates
from fanin.clients.flower.task import AppFailed, FlowerSettings
from fanin.clients.flower.trainer import FlowerTrainer
from fanin.edge.bundles.arrays import write_arrays
from fanin.protos import messages as m
from fanin.simulation import Result, RunStopped, SimulationSettings, simulate

INITIAL: Final = {"w": np.zeros(2, np.float32)}
CONFIG_APP: Final = """
import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg, context):
    metrics = {"num-examples": 1, "scale": context.run_config["scale"], "lr": msg.content["config"]["lr"]}
    metrics["round"] = msg.content["config"]["server-round"]
    return Message(RecordDict({"arrays": msg.content["arrays"], "metrics": MetricRecord(metrics)}), reply_to=msg)
"""


def settings_of(**plan: object) -> SimulationSettings:
    return SimulationSettings(initial=INITIAL, plan={"training.learning_rate": 1.0} | plan, quiet=True)


def sums_of(*names: str) -> list[dict[str, object]]:
    return [{"name": f"train.{name}", "bound": 1 << 40} for name in names]


@pytest.mark.parametrize(("run_config", "scale"), [("", 0.5), ("scale=0.25", 0.25)])
def test_device_options_override_pyproject_and_plan_options_override_fanin(
    tmp_path: Path, run_config: str, scale: float
) -> None:
    folder = write_app(tmp_path / "app", f"config_app_{len(run_config)}", CONFIG_APP)
    app = FlowerSettings(app=f"config_app_{len(run_config)}:app", folder=folder, run_config=run_config)
    config = {"lr": 0.125, "server-round": 77}
    names = sums_of("scale", "lr", "round")
    result = simulate(
        app, 1, cohort=1, rounds=1, settings=settings_of(**{"flower.config": config, "statistics": names})
    )
    assert result.failures == ()
    # The Plan's learning rate replaces fanin's. An option cannot change the number of the Round.
    sums = {name: value / 65536 for name, value in result.rounds[1].statistics.items()}
    assert sums == {"train.scale": scale, "train.lr": 0.125, "train.round": 1.0}


def weighted_app(partition: int, num_examples: int) -> ClientApp:
    """Return an app whose arrays equal the number of its partition; one partition has the weight ``num_examples``."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        arrays = ArrayRecord({"w": Array(np.full(2, number, np.float32))})
        metrics = MetricRecord({"num-examples": num_examples if number == partition else 10, "part": number})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    return app


def test_a_weight_beyond_the_cap_counts_as_the_cap_and_metrics_remain_means() -> None:
    plan = {"aggregation.max_examples": 30, "codec.name": "fixed32", "statistics": sums_of("part")}
    result = simulate(weighted_app(1, 1_000_000), 2, cohort=2, rounds=1, settings=settings_of(**plan))
    assert result.failures == ()
    np.testing.assert_allclose(result.arrays["w"], 30 / 40, atol=1e-4)
    assert [row.statistics["train.part"] for row in result.clients] == [0, 30 << 16]
    assert [row.means["train.part"] for row in result.clients] == [0, 1]
    assert result.rounds[1].means["train.part"] == 30 / 40
    # The examples of a row are those that the client trained on, not those that count.
    assert [row.num_examples for row in result.clients] == [10, 1_000_000]
    assert result.rounds[1].num_examples == 1_000_010
    (warning,) = [event.detail for event in result.events if event.event == "warning"]
    assert warning.startswith(
        "aggregation.max_examples = 30 cuts the weight of 1 of 2 updates of round 1: the largest has"
    )


class Counting(NumPyClient):
    """A client that adds its own row of values, with its own number of examples."""

    def __init__(self, partition: int, values: np.ndarray, examples: Sequence[int]) -> None:
        self._values, self._num = values[partition], examples[partition]

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, float]
    ) -> tuple[list[np.ndarray], int, dict[str, float]]:
        return [parameters[0] + self._values], self._num, {"loss": 2.0}


def simulated_mean(values: np.ndarray, examples: Sequence[int], **plan: object) -> Result:
    """Return one Round of clients with these changes (clients, params) and numbers of examples."""
    settings = SimulationSettings(
        initial=[np.zeros(values.shape[1], np.float32)], plan={"training.learning_rate": 0.1} | plan, quiet=True
    )

    def client_fn(context: Context) -> Client:
        return Counting(int(context.node_config["partition-id"]), values, examples).to_client()

    return simulate(client_fn, len(examples), cohort=len(examples), rounds=1, settings=settings)


@pytest.mark.parametrize(
    "examples", [(1_000, 60_000), (1, 4_096), (3, 1 << 32), (5_000_000, 90_000_000, 7, 400_000_000)], ids=str
)
@pytest.mark.parametrize("codec", ["fixed32", "int8"])
def test_the_mean_of_a_round_is_fedavgs_for_any_numbers_of_examples(examples: tuple[int, ...], codec: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.choice([-1.0, 1.0], (len(examples), 64)).astype(np.float32)
    result = simulated_mean(values, examples, **{"codec.name": codec})
    expected = np.average(values.astype(np.float64), axis=0, weights=examples)
    np.testing.assert_allclose(result.arrays["0"], expected, atol=1e-6)
    assert result.rounds[1].num_examples == sum(examples)
    assert sorted(row.num_examples for row in result.clients) == sorted(examples)


def test_weights_beyond_the_head_room_are_scaled_together() -> None:
    values, examples = np.eye(4, dtype=np.float32), (1_000, 60_000, 200, 30_000)
    # 31 bits of a value and 20 of the shift leave 11: at most 2,048 steps.
    result = simulated_mean(values, examples, **{"codec.max_shift": 20})
    steps = np.array([16, 938, 3, 469])
    np.testing.assert_allclose(result.arrays["0"], steps / steps.sum(), atol=1e-6)
    assert result.rounds[1].num_examples == sum(examples)


def test_clients_without_examples_fill_no_place_of_the_others() -> None:
    values = np.array([[1, 2], [1, 2], [3, 4]], np.float32)
    result = simulated_mean(values, (0, 5, 15), **{"cohort.quorum": 2})
    assert ({each.client for each in result.failures}, result.arrays["0"].tolist()) == ({0}, [2.5, 3.5])
    assert [row.num_examples for row in result.clients] == [5, 15]
    text = r"1 device was refused, the last with: 'update: got examples = 0, expected at least 1; check in again when"
    with pytest.raises(RunStopped, match=text) as excinfo:
        simulated_mean(values[:2], (0, 5), **{"cohort.quorum": 2})
    assert len(excinfo.value.result.rounds) == 1 and excinfo.value.result.arrays["0"].tolist() == [0, 0]


class StatusClient(Client):
    """A client that returns the given status codes."""

    def __init__(self, fit: Code, evaluate: Code) -> None:
        self._fit, self._evaluate = fit, evaluate

    def fit(self, ins: FitIns) -> FitRes:
        status = Status(code=self._fit, message="no data\ntoday")
        return FitRes(status=status, parameters=ins.parameters, num_examples=3, metrics={})

    def evaluate(self, ins: EvaluateIns) -> EvaluateRes:
        return EvaluateRes(status=Status(code=self._evaluate, message=""), loss=0.5, num_examples=4, metrics={})


class WithoutFit(NumPyClient):
    """A client without ``fit``."""


def counts_of(client: Client, folder: Path) -> dict[str, int]:
    app = FlowerApp(FlowerSettings(app="own", folder=folder), ClientApp(client_fn=lambda context: client))
    bundle = write_arrays(INITIAL, folder / "bundle", PUBLISHER, "own")
    trainer = FlowerTrainer(app, FlowerStates(folder / "states"))
    return dict(trainer.train(example_model(bundle), replace(example_assignment(bundle), round=1), Countdown()).counts)


def test_an_evaluation_counts_if_its_status_is_ok(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    good = counts_of(StatusClient(Code.OK, Code.OK), tmp_path / "good")
    assert (good[m.EXAMPLES], good[m.EVAL_EXAMPLES], good[m.EVAL_LOSS]) == (3, 4, 2 * m.LOSS_UNIT)
    bad = counts_of(StatusClient(Code.OK, Code.EVALUATE_NOT_IMPLEMENTED), tmp_path / "bad")
    assert m.EVAL_EXAMPLES not in bad and m.EVAL_LOSS not in bad


@pytest.mark.parametrize(
    ("client", "text"),
    [
        (StatusClient(Code.FIT_NOT_IMPLEMENTED, Code.OK), "FIT_NOT_IMPLEMENTED (no data today)"),
        (WithoutFit().to_client(), "FIT_NOT_IMPLEMENTED (Client does not implement `fit`)"),
    ],
)
def test_a_training_whose_status_is_not_ok_is_no_update(tmp_path: Path, client: Client, text: str) -> None:
    with pytest.raises(AppFailed) as excinfo:
        counts_of(client, tmp_path)
    assert str(excinfo.value) == f"flower app own: train: got the status {text}, expected OK; correct fit"


def test_a_numpy_client_has_the_status_ok(tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "numpy_status_app", NUMPY_APP)
    result = simulate(
        FlowerSettings(app="numpy_status_app:app", folder=folder),
        1,
        cohort=1,
        rounds=1,
        settings=replace(settings_of(), initial=None),
    )
    assert result.failures == ()
    assert result.clients[0].validation_loss == 1.5

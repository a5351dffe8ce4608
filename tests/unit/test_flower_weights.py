"""Rounds of a Flower app: precedence of configurations, the cap of the weight, and the status of a reply."""

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

from fanin.clients.flower.app import FlowerApp
from fanin.clients.flower.states import FlowerStates
from fanin.clients.flower.task import AppFailed, FlowerSettings
from fanin.clients.flower.trainer import FlowerTrainer
from fanin.clients.testing import Countdown, example_assignment, example_model
from fanin.edge.bundles.arrays import write_arrays
from fanin.protos import messages as m
from fanin.simulation import SimulationSettings, simulate

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
    assert [row.num_examples for row in result.clients] == [10, 30]
    np.testing.assert_allclose(result.arrays["w"], 30 / 40, atol=1e-4)
    assert [row.statistics["train.part"] for row in result.clients] == [0, 30 << 16]
    assert result.rounds[1].statistics["train.part"] / 65536 / result.rounds[1].num_examples == 30 / 40


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

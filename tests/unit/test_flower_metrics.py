"""The metrics of a Flower app: numbers and lists are statistics, and everything else is named in the log."""

import re
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from house.tree import ROOT
from support.flower_apps import write_app

from fanin.clients.flower.app import FlowerApp
from fanin.clients.flower.task import AppFailed, FlowerSettings
from fanin.simulation import Result, SimulationSettings, simulate

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    partition = int(context.node_config["partition-id"])
    metrics = MetricRecord({"num-examples": partition + 1, "hist": [1.0, 2.0 * partition], "n": 3})
    records = {"arrays": message.content["arrays"], "metrics": metrics, "notes": ConfigRecord({"text": "x"})}
    return Message(RecordDict(records), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 2, "confusion": [1, 2, 3, 4]})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def simulated(client: object, names: tuple[str, ...]) -> Result:
    statistics = [{"name": name, "bound": 1 << 30} for name in names]
    settings = SimulationSettings(initial=[np.zeros(1)], plan={"statistics": statistics}, quiet=True)
    return simulate(client, 2, cohort=2, rounds=1, settings=settings)


def test_the_items_of_a_list_are_metrics(caplog: pytest.LogCaptureFixture) -> None:
    names = ("train.hist.0", "train.hist.1", "evaluate.confusion.0", "evaluate.confusion.3")
    result = simulated(app, names)
    assert result.failures == ()
    # The weights are 1 and 2, as Flower averages the items of a list.
    assert result.rounds[1].means == {
        "train.hist.0": 1.0,
        "train.hist.1": pytest.approx(2 * 2 / 3, abs=1e-4),
        "evaluate.confusion.0": 1.0,
        "evaluate.confusion.3": 4.0,
    }
    text = "metrics without [[statistics]] of these names in the plan are not sent: evaluate.confusion.1, "
    assert text in caplog.text
    assert "texts, bytes and ConfigRecords of a reply are not sent: notes" in caplog.text


class Texts(NumPyClient):
    """A client that reports a text."""

    def fit(self, parameters: list[np.ndarray], config: object) -> tuple[list[np.ndarray], int, dict[str, object]]:
        return parameters, 1, {"phase": "first", "ok": True}


def test_a_text_of_a_list_client_is_named(caplog: pytest.LogCaptureFixture) -> None:
    result = simulated(Texts, ("train.ok",))
    assert result.rounds[1].means == {"train.ok": 1.0}
    assert "texts, bytes and ConfigRecords of a reply are not sent: phase" in caplog.text


def measured_app() -> str:
    """Return the app of the docs that only evaluates."""
    page = (ROOT / "docs" / "howto" / "flower.md").read_text()
    (block,) = re.findall(r'^```python title="measured.py"\n(.*?)^```', page, re.DOTALL | re.MULTILINE)
    return str(block)


def test_an_app_without_a_function_for_train_is_refused_at_the_start(tmp_path: Path) -> None:
    text = measured_app()
    folder = write_app(tmp_path / "app", "only_evaluates", text[: text.index("@app.train()")])
    with pytest.raises(AppFailed, match=r"only_evaluates:app: has no @app\.train") as excinfo:
        FlowerApp(FlowerSettings(app="only_evaluates:app", folder=folder))
    assert excinfo.value.code == "FN-0924"


def test_the_app_of_the_docs_only_evaluates(tmp_path: Path) -> None:
    app = FlowerSettings(app="measured:app", folder=write_app(tmp_path / "app", "measured", measured_app()))
    settings = SimulationSettings(initial={"w": np.float32([1, 2, 3])}, quiet=True)
    result = simulate(app, 2, cohort=2, rounds=1, settings=settings)
    assert result.arrays["w"].tolist() == [1, 2, 3]
    assert result.rounds[1].validation_loss == pytest.approx(2.0)

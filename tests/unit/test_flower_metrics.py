"""The metrics of a Flower app: numbers and lists are statistics, and everything else is named in the log."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

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
    text = "metrics without [[statistics]] of these names in the plan stay on this device: evaluate.confusion.1, "
    assert text in caplog.text
    assert "texts, bytes and ConfigRecords of a reply stay on this device: notes" in caplog.text


class Texts(NumPyClient):
    """A client that reports a text."""

    def fit(self, parameters: list[np.ndarray], config: object) -> tuple[list[np.ndarray], int, dict[str, object]]:
        return parameters, 1, {"phase": "first", "ok": True}


def test_a_text_of_a_list_client_is_named(caplog: pytest.LogCaptureFixture) -> None:
    result = simulated(Texts, ("train.ok",))
    assert result.rounds[1].means == {"train.ok": 1.0}
    assert "texts, bytes and ConfigRecords of a reply stay on this device: phase" in caplog.text

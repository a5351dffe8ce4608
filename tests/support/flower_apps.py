"""Flower apps for tests, as source text. Their code does not refer to fanin."""

from pathlib import Path
from typing import Final

MESSAGE_APP: Final = """
import numpy as np
from flwr.app import ArrayRecord, Array, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg, context):
    arrays = {name: array.numpy().copy() for name, array in msg.content["arrays"].items()}
    partition, scale = context.node_config["partition-id"], context.run_config["scale"]
    lr = msg.content["config"]["lr"]
    arrays["layer.weight"] += lr * scale * (partition + 1) * np.random.standard_normal((2, 3)).astype("float32")
    arrays["layer.bias"] -= np.float32(0.25)
    arrays["norm.num_batches_tracked"] += 1
    seen = context.state["seen"]["rounds"] if "seen" in context.state else []
    context.state["seen"] = ConfigRecord({"rounds": [*seen, msg.content["config"]["server-round"]]})
    metrics = {"train_loss": 0.5, "rounds": len(seen) + 1, "num-examples": 10 * (partition + 1)}
    print("scale", scale, "config", dict(msg.content["config"]))
    record = ArrayRecord({name: Array(value) for name, value in arrays.items()})
    return Message(content=RecordDict({"arrays": record, "metrics": MetricRecord(metrics)}), reply_to=msg)


@app.evaluate()
def evaluate(msg, context):
    weight = msg.content["arrays"]["layer.weight"].numpy()
    metrics = {"eval_loss": 2.0, "eval_acc": 0.75, "num-examples": weight.size}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
"""
NUMPY_APP: Final = """
import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


class Client(NumPyClient):
    def get_parameters(self, config):
        return [np.full((3,), 2.0, "float32"), *(np.full((1,), index, "float32") for index in range(11))]

    def fit(self, parameters, config):
        parameters[0] = parameters[0] * 2
        parameters[2] = parameters[2] + 3
        return parameters, 7, {"loss": 0.25, "text": "x"}

    def evaluate(self, parameters, config):
        return 1.5, 4, {"accuracy": 0.5}


def client_fn(context):
    return Client().to_client()


app = ClientApp(client_fn=client_fn)
"""
PYPROJECT: Final = """
[tool.flwr.app.components]
clientapp = "tiny:app"

[tool.flwr.app.config]
scale = 0.5
"""


def write_app(folder: Path, name: str, text: str) -> Path:
    """Write the module ``name`` of an app and a pyproject.toml into a folder. Return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    return folder

"""A NumPyClient that keeps a layer of its own in ``context.state``, and evaluates with it."""

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Context

from support.flower_forms.data import Floats, table

HEAD = "own head"


def initial() -> list[Floats]:
    return [np.zeros(6), np.zeros(())]


class PersonalClient(NumPyClient):
    """The client."""

    def __init__(self, partition: int, state: RecordDict) -> None:
        self.x, self.y = table(partition)
        self.state = state

    def head(self) -> Floats:
        """Return the layer after the last training; zeros at first."""
        return self.state[HEAD].to_numpy_ndarrays()[0] if HEAD in self.state else np.zeros(6)

    def fit(self, parameters: list[Floats], config: dict[str, object]) -> tuple[list[Floats], int, dict[str, object]]:
        error = self.x @ (parameters[0] + self.head()) - self.y
        gradient = self.x.T @ error / len(self.x)
        self.state[HEAD] = ArrayRecord([self.head() - 0.05 * gradient])
        return [parameters[0] - 0.1 * gradient, np.asarray(parameters[1] + error.mean())], len(self.x), {}

    def evaluate(self, parameters: list[Floats], config: dict[str, object]) -> tuple[float, int, dict[str, object]]:
        error = self.x @ (parameters[0] + self.head()) - self.y
        return float((error**2).mean()), len(self.x), {"bias": float(error.mean())}


def client_fn(context: Context) -> Client:
    return PersonalClient(int(context.node_config["partition-id"]), context.state).to_client()


app = ClientApp(client_fn=client_fn)

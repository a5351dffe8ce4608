"""A NumPyClient of plain lists that reads the number of the round, and decays its step with it."""

import numpy as np
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Context

from support.flower_forms.data import Floats, table


def initial() -> list[Floats]:
    return [np.random.default_rng(5).standard_normal((4, 3)), np.zeros(2)]


class ListClient(NumPyClient):
    """The client."""

    def __init__(self, partition: int) -> None:
        self.features = table(partition)[0]

    def fit(self, parameters: list[Floats], config: dict[str, float]) -> tuple[list[Floats], int, dict[str, float]]:
        step = 0.5 / config["current_round"]
        weight = parameters[0] + step * (self.features[:4, :3] - parameters[0])
        return [weight, parameters[1] + step], len(self.features), {"step": step}


def client_fn(context: Context) -> Client:
    return ListClient(int(context.node_config["partition-id"])).to_client()


app = ClientApp(client_fn=client_fn)

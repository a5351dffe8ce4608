"""FedPer and FedBN by ``Recipe(local=...)`` agree with a plain program of each, client by client."""

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fanin.clients.data.examples import Examples
from fanin.edge.export import App, Recipe, Sgd
from fanin.simulation import Partition, Result, SimulationSettings, load_data, simulate

NUM_CLIENTS, ROUNDS, EPOCHS, RATE = 3, 4, 3, 0.2
SIZES = (32, 48, 64)
"""Examples of each client. One batch has all of them, so their order in an epoch has no effect."""
PLAN = {"training.learning_rate": RATE, "training.epochs": EPOCHS, "codec.name": "fixed32"}
Modules = list[nn.Module]


class Network(nn.Module):
    """A body, a norm over the batch and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.relu(self.norm(self.body(x.flatten(1)))))


def clients_data() -> Partition:
    data, ends = load_data("digits").train, np.cumsum(SIZES)
    count = int(ends[-1])
    images, labels = data.inputs["x"][:count].copy(), data.y[:count].copy()
    indices = tuple(np.split(np.arange(count), ends[:-1]))
    for client, rows in enumerate(indices):
        images[rows] *= 1.0 + client  # FedBN is for inputs that differ in scale,
        labels[rows] = (labels[rows] + client) % 10  # and FedPer for labels that contradict each other.
    return Partition(examples=Examples(inputs={"x": images}, y=labels), indices=indices)


def train(module: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()


def personal_training(module: nn.Module, data: Partition, is_personal: Callable[[str], bool]) -> Modules:
    """Train as FedPer and FedBN do: after each Round the clients' shared values become their mean, the rest stays.

    shared w:    w <- sum_k n_k / n w_k                   personal v_k:    v_k <- v_k of client k's own training
    """
    clients = [deepcopy(module).train() for _ in data.indices]
    weights = [len(rows) / sum(SIZES) for rows in data.indices]
    for _ in range(ROUNDS):
        for client, rows in zip(clients, data.indices, strict=True):
            train(
                client,
                torch.from_numpy(data.examples.inputs["x"][rows]),
                torch.from_numpy(data.examples.y[rows]).long(),
            )
        for name, value in clients[0].state_dict().items():
            if is_personal(name) or not value.is_floating_point():
                continue
            mean = sum(w * each.state_dict()[name] for w, each in zip(weights, clients, strict=True))
            for client in clients:
                client.state_dict()[name].copy_(mean)
    return clients


def simulated(local: list[str]) -> tuple[Result, nn.Module]:
    data = clients_data()
    torch.manual_seed(5)
    module = Network()
    app = App(
        name="digits",
        module=deepcopy(module),
        calibration=torch.from_numpy(data.examples.inputs["x"][: max(SIZES)]),
        batch_size=max(SIZES),
        num_classes=10,
        recipe=Recipe(optimizer=Sgd(momentum=0.0), local=local),
    )
    settings = SimulationSettings(plan=PLAN, seed=4, validation_fraction=0.0)
    return simulate(app, data, cohort=NUM_CLIENTS, rounds=ROUNDS, settings=settings), module


def values_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in module.state_dict().items() if value.is_floating_point()}


@pytest.mark.parametrize(("local", "prefix"), [(["head.*"], "head."), (["norm.*"], "norm.")], ids=["fedper", "fedbn"])
def test_each_client_has_the_parameters_of_the_plain_program(local: list[str], prefix: str) -> None:
    result, module = simulated(local)
    twins = personal_training(module, clients_data(), lambda name: name.startswith(prefix))
    for client, twin in enumerate(twins):
        ours, theirs = values_of(result.module_of(client)), values_of(twin)
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=0, atol=2e-5, err_msg=f"{client} {name}")
    # The comparison can fail: personal values of two clients are far from each other.
    name = f"{prefix}bias"
    assert np.abs(values_of(twins[0])[name] - values_of(twins[1])[name]).max() > 1e-2

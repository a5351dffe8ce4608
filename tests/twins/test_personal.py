"""FedPer, FedBN, FedRep and Ditto agree with a plain program of each, client by client."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
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


def rows_of(data: Partition, client: int) -> tuple[Tensor, Tensor]:
    rows = data.indices[client]
    return torch.from_numpy(data.examples.inputs["x"][rows]), torch.from_numpy(data.examples.y[rows]).long()


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
    for _ in range(ROUNDS):
        for number, client in enumerate(clients):
            train(client, *rows_of(data, number))
        average(clients, is_personal)
    return clients


MOMENTUM, OWN_EPOCHS, LAMBDA = 0.8, 2, 0.5
OWN_PLAN = PLAN | {"training.personal_epochs": OWN_EPOCHS}
DITTO_PLAN = OWN_PLAN | {"training.ditto_weight": LAMBDA}


def fedrep(module: nn.Module, data: Partition) -> Modules:
    """Train as FedRep does: algorithm 1 of arXiv 2102.07078, with each client in each Round.

    head h_k:   h_k <- GRD(f_k(phi^t, h), h_k)      for OWN_EPOCHS epochs, with the body phi^t fixed
    body phi:   phi_k <- GRD(f_k(phi, h_k), phi^t)  for EPOCHS epochs, with the head fixed;   phi <- sum_k n_k / n phi_k
    """
    clients = [deepcopy(module) for _ in data.indices]
    for _ in range(ROUNDS):
        for number, client in enumerate(clients):
            x, y = rows_of(data, number)
            for is_head, epochs in ((True, OWN_EPOCHS), (False, EPOCHS)):
                moving = [value for name, value in client.named_parameters() if name.startswith("head.") is is_head]
                optimizer = torch.optim.SGD(moving, lr=RATE, momentum=MOMENTUM)
                for _ in range(epochs):
                    client.zero_grad()
                    nn.functional.cross_entropy(client(x), y).backward()
                    optimizer.step()
        average(clients, is_personal=lambda name: name.startswith("head."))
    return clients


def ditto(module: nn.Module, data: Partition) -> tuple[nn.Module, Modules]:
    """Train as Ditto does: algorithm 1 of arXiv 2012.04221, with each client in each Round. Return (w, each v_k).

    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t))   for OWN_EPOCHS epochs;     w: FedAvg's
    """
    shared, own = deepcopy(module), [deepcopy(module) for _ in data.indices]
    for _ in range(ROUNDS):
        clients = [deepcopy(shared) for _ in data.indices]
        for number, (copy, client) in enumerate(zip(own, clients, strict=True)):
            x, y = rows_of(data, number)
            for model, epochs, weight in ((copy, OWN_EPOCHS, LAMBDA), (client, EPOCHS, 0.0)):
                optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
                for _ in range(epochs):
                    optimizer.zero_grad()
                    pairs = zip(model.parameters(), shared.parameters(), strict=True)
                    distance = sum(((v - w.detach()) ** 2).sum() for v, w in pairs)
                    (nn.functional.cross_entropy(model(x), y) + weight / 2 * distance).backward()
                    optimizer.step()
        average(clients, is_personal=lambda _: False)
        shared = clients[0]
    return shared, own


def average(clients: Modules, is_personal: Callable[[str], bool]) -> None:
    """Replace the shared values of all clients by their mean, weighted by examples."""
    for name, value in clients[0].state_dict().items():
        if not is_personal(name) and value.is_floating_point():
            pairs = zip(SIZES, clients, strict=True)
            mean = sum(size / sum(SIZES) * client.state_dict()[name] for size, client in pairs)
            for client in clients:
                client.state_dict()[name].copy_(mean)


def plain_network() -> nn.Module:
    """Return a body and a head: a norm over the batch has statistics, which no paper of these says how to treat."""
    layers = {"body": nn.Linear(64, 16), "relu": nn.ReLU(), "head": nn.Linear(16, 10)}
    torch.manual_seed(5)
    return nn.Sequential(OrderedDict(flat=nn.Flatten(), **layers))


def simulated(module: nn.Module, recipe: Recipe, plan: Mapping[str, object] = PLAN) -> Result:
    data = clients_data()
    app = App(
        name="digits",
        module=deepcopy(module),
        calibration=torch.from_numpy(data.examples.inputs["x"][: max(SIZES)]),
        batch_size=max(SIZES),
        num_classes=10,
        recipe=recipe,
    )
    settings = SimulationSettings(plan=plan, seed=4, validation_fraction=0.0, quiet=True)
    return simulate(app, data, cohort=NUM_CLIENTS, rounds=ROUNDS, settings=settings)


def values_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in module.state_dict().items() if value.is_floating_point()}


@pytest.mark.parametrize(("local", "prefix"), [(["head.*"], "head."), (["norm.*"], "norm.")], ids=["fedper", "fedbn"])
def test_each_client_has_the_parameters_of_the_plain_program(local: list[str], prefix: str) -> None:
    torch.manual_seed(5)
    module = Network()
    result = simulated(module, Recipe(optimizer=Sgd(momentum=0.0), local=local))
    twins = personal_training(module, clients_data(), lambda name: name.startswith(prefix))
    _check_equal(result, twins)
    # The comparison can fail: personal values of two clients are far from each other.
    name = f"{prefix}bias"
    assert np.abs(values_of(twins[0])[name] - values_of(twins[1])[name]).max() > 1e-2


def _check_equal(result: Result, twins: Modules) -> None:
    for client, twin in enumerate(twins):
        ours, theirs = values_of(result.module_of(client)), values_of(twin)
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=0, atol=2e-5, err_msg=f"{client} {name}")


def test_fedrep_trains_the_head_then_the_body() -> None:
    module = plain_network()
    recipe = Recipe(optimizer=Sgd(momentum=MOMENTUM), local=["head.*"])
    twins = fedrep(module, clients_data())
    _check_equal(simulated(module, recipe, OWN_PLAN), twins)
    # The order of the passes and the momentum matter: FedPer with as many epochs is far away.
    fedper = simulated(module, recipe, PLAN | {"training.epochs": EPOCHS + OWN_EPOCHS})
    assert np.abs(values_of(fedper.module_of(0))["head.bias"] - values_of(twins[0])["head.bias"]).max() > 1e-2


def test_ditto_trains_a_copy_beside_fedavg() -> None:
    module = plain_network()
    recipe = Recipe(optimizer=Sgd(momentum=MOMENTUM), proximal=True)
    shared, own = ditto(module, clients_data())
    result = simulated(module, recipe, DITTO_PLAN)
    _check_equal(result, own)
    for name, value in values_of(shared).items():
        np.testing.assert_allclose(values_of(result.module)[name], value, rtol=0, atol=2e-5, err_msg=name)
    assert np.abs(values_of(own[0])["head.bias"] - values_of(shared)["head.bias"]).max() > 1e-2
    # The shared model has the same bits as FedAvg's.
    np.testing.assert_array_equal(result.parameters, simulated(module, recipe).parameters)

"""Settings of training in a simulation's Plan: the optimizer's, those that change by Round, and refused ones."""

import copy
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Final

import numpy as np
import pytest
import torch
from flwr.client import NumPyClient
from support.errors import raises
from support.nightly import in_ci
from torch import nn

from fanin.clients.data.batching import batches
from fanin.clients.data.digits import load_digits
from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import memory_store
from fanin.edge.export import App, Recipe, Sgd
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidPlan
from fanin.simulation import (
    DeviceModel,
    Dirichlet,
    Iid,
    Result,
    SimulationSettings,
    load_data,
    partition,
    simulate,
)

NUM_CLIENTS = 4


@cache
def parameters(export_momentum: float, engine: str, **optimizer: float) -> Float32s:
    """Export an App with this momentum, train it with the Plan's settings, and return the last Version."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    app = App(
        name="digits",
        module=module,
        calibration=torch.from_numpy(load_digits().inputs["x"][:64]),
        batch_size=8,
        num_classes=10,
        recipe=Recipe(optimizer=Sgd(momentum=export_momentum)),
    )
    clients = partition(load_data("digits").train, NUM_CLIENTS, Dirichlet(alpha=0.5), seed=2)
    plan = {"training.learning_rate": 0.05, "training.optimizer": optimizer}
    settings = SimulationSettings(plan=plan, engine=engine, quiet=True)
    return simulate(app, clients, cohort=NUM_CLIENTS, rounds=2, settings=settings).parameters


@pytest.mark.parametrize("engine", in_ci(["graph", "vmap"], ["graph"]))
def test_a_plan_sets_the_optimizer_as_another_app_would(engine: str) -> None:
    """The settings are inputs of the graph, so both results are bit-identical."""
    assert np.array_equal(parameters(0.9, engine, momentum=0.5), parameters(0.5, engine))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"momentum": 1.5}, "got training.optimizer.momentum 1.5, expected at least 0 and below 1"),
        (
            {"beta1": 0.5, "decay": 0.5},
            "training.optimizer beta1, decay, but the settings .* are: momentum; export",
        ),
    ],
)
def test_a_setting_that_the_optimizer_lacks_or_excludes_is_refused(optimizer: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        parameters(0.9, "graph", **optimizer)


RATE, BATCH, SEED, SPEED = 0.1, 4, 5, 20.0
ROUNDS = {1: (1, 0.9, 0.0), 2: (4, 0.9, 0.5), 3: (4, 0.25, 0.5)}
"""Epochs, momentum and proximal weight by Round."""
PLAN = {
    "training.learning_rate": RATE,
    "training.optimizer": {"momentum": 0.9},
    "codec.name": "fixed32",
    "schedule": [
        {"from_round": 2, "epochs": 4, "proximal_weight": 0.5},
        {"from_round": 3, "optimizer": {"momentum": 0.25}},
    ],
}
NORMALS = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
CLIENTS = partition(Examples(inputs={"x": NORMALS}, y=np.argmax(NORMALS[:, :3], axis=1).astype(np.int32)), 2, Iid())


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(6, 3)


@pytest.fixture(scope="module")
def result() -> Result:
    recipe = Recipe(optimizer=Sgd(momentum=0.5), proximal=True)
    calibration = torch.from_numpy(NORMALS[:8])
    app = App(name="linear", module=network(), calibration=calibration, batch_size=BATCH, num_classes=3, recipe=recipe)
    settings = SimulationSettings(plan=PLAN, seed=SEED, quiet=True, devices=DeviceModel(examples_per_s=SPEED))
    return simulate(app, CLIENTS, cohort=len(CLIENTS), rounds=len(ROUNDS), settings=settings)


def federated_average(module: nn.Module, number: int) -> nn.Module:
    """Compute one Round of FedProx in eager torch, with all clients."""
    epochs, momentum, proximal_weight = ROUNDS[number]
    changes, total = {name: torch.zeros_like(value).double() for name, value in module.state_dict().items()}, 0
    for index in range(len(CLIENTS)):
        store, local = memory_store(CLIENTS[index], index, 0.1), copy.deepcopy(module)
        optimizer = torch.optim.SGD(local.parameters(), lr=RATE, momentum=momentum)
        rng = np.random.default_rng(np.random.SeedSequence((SEED, index, number)))
        for batch in (batch for _ in range(epochs) for batch in batches(store.train, BATCH, rng)):
            real = batch.mask > 0
            optimizer.zero_grad()
            outputs = local(torch.from_numpy(batch.inputs["x"][real]))
            loss = nn.functional.cross_entropy(outputs, torch.from_numpy(batch.y[real]).long())
            pairs = zip(local.parameters(), module.parameters(), strict=True)
            loss = loss + proximal_weight / 2 * sum((now - before.detach()).square().sum() for now, before in pairs)
            torch.autograd.backward(loss)
            optimizer.step()
        total += len(store.train)
        for name, value in local.state_dict().items():
            changes[name] += len(store.train) * (value - module.state_dict()[name]).double()
    average = copy.deepcopy(module)
    average.load_state_dict(
        {name: value + (changes[name] / total).float() for name, value in module.state_dict().items()}
    )
    return average


def test_scheduled_settings_end_where_eager_torch_ends(result: Result) -> None:
    expected = network()
    for number in ROUNDS:
        expected = federated_average(expected, number)
    ours = result.module.state_dict()
    for name, value in expected.state_dict().items():
        assert float((ours[name] - value).abs().max()) < 1e-5, name


def test_a_training_takes_the_epochs_of_its_round(result: Result) -> None:
    sizes = [len(memory_store(CLIENTS[client], client, 0.1).train) for client in range(len(CLIENTS))]
    for client, size in enumerate(sizes):
        own = [event for event in result.events if event.client == client]
        times = [
            after.time_s - before.time_s
            for before, after in pairwise(own)
            if (before.event, after.event) == ("training", "trained")
        ]
        assert times == pytest.approx([size / SPEED, 4 * size / SPEED, 4 * size / SPEED])


ARRAYS: Final = [np.zeros(2, np.float32)]


def test_the_config_of_an_app_changes_by_round() -> None:
    configs: list[dict[str, object]] = []

    class Recording(NumPyClient):
        def fit(
            self, parameters: list[np.ndarray], config: Mapping[str, object]
        ) -> tuple[list[np.ndarray], int, dict[str, float]]:
            configs.append(dict(config))
            return parameters, 1, {}

    plan = {
        "training.learning_rate": 0.5,
        "flower.config": {"local-epochs": 1, "mu": 0.0, "name": "sgd"},
        "schedule": [
            {"from_round": 2, "flower": {"config": {"local-epochs": 4, "name": "adam"}}},
            {"from_round": 3, "learning_rate": 0.25, "flower": {"config": {"mu": 0.5}}},
        ],
    }
    settings = SimulationSettings(initial=ARRAYS, plan=plan, quiet=True)
    result = simulate(lambda context: Recording().to_client(), 1, cohort=1, rounds=3, settings=settings)
    assert result.failures == ()
    rounds = [dict.fromkeys(("server_round", "current_round", "round", "server-round"), number) for number in (1, 2, 3)]
    assert configs == [
        {"lr": 0.5, "local-epochs": 1, "mu": 0.0, "name": "sgd"} | rounds[0],
        {"lr": 0.5, "local-epochs": 4, "mu": 0.0, "name": "adam"} | rounds[1],
        {"lr": 0.25, "local-epochs": 4, "mu": 0.5, "name": "adam"} | rounds[2],
    ]


OF_GRAPHS: Final = {
    "epochs": 2,
    "proximal_weight": 0.1,
    "batch_size": 4,
    "optimizer": {"momentum": 0.5},
    "warmup_steps": 1,
    "step_decay": "linear",
}


@pytest.mark.parametrize("key", OF_GRAPHS)
def test_a_scheduled_setting_of_graphs_is_refused(key: str) -> None:
    plan = {"training.learning_rate": 1, "schedule": [{"from_round": 2, key: OF_GRAPHS[key]}]}
    with raises(
        InvalidPlan,
        f"simulate: got schedule.0.{key}, but the bundle has no graphs: the code on the devices trains; remove this "
        "from the plan, and set it in the app (docs/howto/flower.md)",
    ):
        settings = SimulationSettings(initial=ARRAYS, plan=plan, quiet=True)
        simulate(lambda context: NumPyClient().to_client(), 2, cohort=2, rounds=2, settings=settings)

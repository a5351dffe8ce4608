"""Optimizer settings in a simulation's Plan, and settings that are refused."""

from functools import cache

import numpy as np
import pytest
import torch
from support.nightly import in_ci
from torch import nn

from fanin.clients.data.digits import load_digits
from fanin.edge.export import App, Recipe, Sgd
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidPlan
from fanin.simulation import Dirichlet, SimulationSettings, load_data, partition, simulate

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

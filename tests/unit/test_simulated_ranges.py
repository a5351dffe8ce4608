"""Simulations from an untrained module: int8 with the ranges of the export, and with those that devices count."""

import numpy as np
import pytest
import torch
from torch import nn

from fanin.edge.export import App
from fanin.protos.errors import InvalidInput
from fanin.simulation import Iid, Result, SimulationSettings, load_data, partition, simulate

pytestmark = pytest.mark.heavy
NUM_CLIENTS = 8


def digits_app() -> App:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    images = torch.from_numpy(load_data("digits").train.inputs["x"][:64])
    module = nn.Sequential(nn.Flatten(), *layers)
    return App(name="digits", module=module, calibration=images, batch_size=16, num_classes=10)


def run(ranges: str, *, rounds: int = 6, **settings: object) -> Result:
    data = load_data("digits")
    keys = {"training.learning_rate": 0.04, "training.epochs": 2, "int8.ranges": ranges}
    keys |= {"evaluation.data": "test"} if ranges == "data" else {}
    every = SimulationSettings(plan=keys, **({"engine": "graph", "test": data.test} | settings))
    return simulate(digits_app(), partition(data.train, NUM_CLIENTS, Iid()), cohort=4, rounds=rounds, settings=every)


def int8_loss(result: Result) -> float:
    """Return the share of the test data that int8 loses in the last Version."""
    return result.rounds[-1].test_accuracy - result.rounds[-1].test_accuracy_int8


def test_devices_and_test_data_refresh_the_ranges_of_a_model_that_is_trained_from_nothing() -> None:
    stale, counted, measured = run("export"), run("devices"), run("data")
    # Ranges change no parameter.
    assert stale.digests == counted.digests == measured.digests
    assert counted.rounds[-1].test_accuracy > 0.85
    assert int8_loss(stale) > 0.3
    assert abs(int8_loss(counted)) < 0.02
    # Those of the data set are of the Version itself, from the first one on.
    losses = [row.test_accuracy - row.test_accuracy_int8 for row in measured.rounds[1:]]
    assert np.abs(losses).max() < 0.02


def test_a_data_set_needs_test_data() -> None:
    with pytest.raises(InvalidInput) as refused:
        run("data", test=None)
    assert refused.value.code == "FN-1181"


@pytest.mark.parametrize("settings", [{"processes": 2}, pytest.param({"engine": "vmap"}, marks=pytest.mark.nightly)])
def test_ranges_are_those_of_the_graphs_in_every_engine(settings: dict[str, object]) -> None:
    here, there = run("devices", rounds=2), run("devices", rounds=2, **settings)
    values = [[row.test_accuracy_int8 for row in result.rounds] for result in (here, there)]
    np.testing.assert_allclose(values[0], values[1], atol=0.01)

"""Attacks in ``simulate``: the attackers of a ``DeviceModel``, on clients of digits and of a Flower app."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from support.digits_fedavg import NUM_CLIENTS, PLAN, app_of, clients_of, network

from fanin.protos.errors import InvalidInput
from fanin.simulation import (
    Alie,
    Attackers,
    Backdoor,
    DeviceModel,
    LabelFlip,
    Partition,
    Result,
    SimulationSettings,
    load_data,
    simulate,
)


def simulated(
    attackers: Attackers | None, clients: Partition | None = None, rounds: int = 1, plan: Mapping[str, object] = PLAN
) -> Result:
    settings = SimulationSettings(plan=plan, quiet=True, devices=DeviceModel(attackers=attackers))
    return simulate(app_of(network()), clients or clients_of(), cohort=NUM_CLIENTS, rounds=rounds, settings=settings)


def test_flipped_labels_are_those_of_the_attackers_data() -> None:
    attackers = Attackers(clients=[0, 3], attack=LabelFlip())
    clients = clients_of()
    y = clients.examples.y.copy()
    for client in attackers.clients:
        y[clients.indices[client]] = 9 - y[clients.indices[client]]
    poisoned = Partition(examples=type(clients.examples)(inputs=clients.examples.inputs, y=y), indices=clients.indices)
    assert simulated(attackers).digests == simulated(None, poisoned).digests


@pytest.mark.nightly
def test_colluding_attackers_are_the_same_in_processes() -> None:
    devices = DeviceModel(attackers=Attackers(clients=[1, 4], attack=Alie(z=2.0)))
    digests = []
    for processes in (1, 2):
        settings = SimulationSettings(plan=PLAN, quiet=True, devices=devices, processes=processes)
        digests.append(simulate(app_of(network()), clients_of(), cohort=6, rounds=2, settings=settings).digests)
    assert digests[0] == digests[1] != simulated(None, rounds=2).digests


@pytest.mark.nightly
def test_a_backdoor_enters_a_mean_and_no_bounded_mean() -> None:
    """An attacker of six replaces the model. A bound on the norm takes its advantage away."""
    backdoor = Backdoor(target=7, size=3, value=1.0, factor=6.0)
    attackers = Attackers(clients=[0], attack=backdoor)
    triggered = backdoor.triggered(load_data("digits").test)
    bounded = PLAN | {"aggregation.rule": "norm_bounding", "aggregation.rule_options": {"radius": 0.5}}
    accuracies = []
    for chosen, plan in ((None, PLAN), (attackers, PLAN), (attackers, bounded)):
        result = simulated(chosen, rounds=15, plan=plan)
        with torch.no_grad():
            predictions = result.module(torch.from_numpy(triggered.inputs["x"])).argmax(1).numpy()
        accuracies.append(float(np.mean(predictions == triggered.y)))
    honest, replaced, kept = accuracies
    assert honest < 0.2 and replaced > 0.8 and kept < 0.5, accuracies


def test_attackers_beyond_the_clients_and_poisoned_data_of_a_flower_app_are_refused() -> None:
    with pytest.raises(InvalidInput, match="got 6, expected indices below the number of clients, 6") as refused:
        simulated(Attackers(clients=[6], attack=Alie()))
    assert refused.value.code == "FN-1850"
    from flwr.client import NumPyClient

    devices = DeviceModel(attackers=Attackers(clients=[0], attack=LabelFlip()))
    with pytest.raises(InvalidInput, match="loads its own data") as refused:
        simulate(NumPyClient(), 4, cohort=2, rounds=1, settings=SimulationSettings(devices=devices, quiet=True))
    assert refused.value.code == "FN-1850"

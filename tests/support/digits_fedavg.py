"""FedAvg of a perceptron on the digits: the parts of a simulation, and the same computation in eager torch."""

import copy

import numpy as np
import torch
from torch import nn

from fanin.clients.data.batching import batches
from fanin.clients.data.digits import load_digits
from fanin.clients.data.stores import memory_store
from fanin.edge.export import App, Recipe, Sgd
from fanin.simulation import Dirichlet, Partition, load_data, partition

RATE, NUM_CLIENTS, BATCH = 0.1, 6, 8


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def app_of(module: nn.Module) -> App:
    images = torch.from_numpy(load_digits().inputs["x"][:64])
    recipe = Recipe(optimizer=Sgd(momentum=0.0))
    return App(name="digits", module=module, calibration=images, batch_size=BATCH, num_classes=10, recipe=recipe)


def clients_of(num_clients: int = NUM_CLIENTS) -> Partition:
    return partition(load_data("digits").train, num_clients, Dirichlet(alpha=0.5), seed=2)


PLAN = {"training.learning_rate": RATE, "training.epochs": 2, "codec.name": "fixed32"}


def federated_average(module: nn.Module, seed: int, round_number: int, validation_fraction: float = 0.1) -> nn.Module:
    """Compute one Round of FedAvg in eager torch, with all clients."""
    clients, sums, total = clients_of(), {}, 0
    for index in range(len(clients)):
        store = memory_store(clients[index], index, validation_fraction)
        local = copy.deepcopy(module)
        optimizer = torch.optim.SGD(local.parameters(), lr=RATE)
        rng = np.random.default_rng(np.random.SeedSequence((seed, index, round_number)))
        for _ in range(2):
            for batch in batches(store.train, BATCH, rng):
                real = batch.mask > 0
                optimizer.zero_grad()
                outputs = local(torch.from_numpy(batch.inputs["x"][real]))
                torch.autograd.backward(nn.functional.cross_entropy(outputs, torch.from_numpy(batch.y[real]).long()))
                optimizer.step()
        weight = len(store.train)
        total += weight
        for name, value in local.state_dict().items():
            sums[name] = sums.get(name, 0.0) + weight * value.double()
    average = copy.deepcopy(module)
    average.load_state_dict({name: (value / total).float() for name, value in sums.items()})
    return average

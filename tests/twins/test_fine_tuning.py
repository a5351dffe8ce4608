"""Fine-tuning after the last Round agrees with a plain program, for each client of a simulation."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fanin.clients import FineTuning
from fanin.edge.export import App, Recipe, Sgd
from fanin.simulation import Partition, Result, Shards, SimulationSettings, load_data, partition, simulate

NUM_CLIENTS, ROUNDS, RATE, EPOCHS, TUNING_RATE = 4, 3, 0.2, 6, 0.1
PLAN = {"training.learning_rate": RATE, "codec.name": "fixed32"}
DITTO = {**PLAN, "training.ditto_weight": 0.1, "training.personal_epochs": 2}
FINE_TUNING = FineTuning(epochs=EPOCHS, learning_rate=TUNING_RATE)


class Network(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.relu(self.body(x.flatten(1))))


def split() -> tuple[Partition, Partition]:
    data = load_data("digits").train
    return partition(data.take(np.arange(240)), NUM_CLIENTS, Shards(per_client=2), seed=1).split(0.25, seed=2)


def simulated(local: Sequence[str] = (), **changes: object) -> Result:
    train, test = split()
    torch.manual_seed(5)
    app = App(
        name="digits",
        module=Network(),
        calibration=torch.from_numpy(train.examples.inputs["x"][:64]),
        batch_size=max(train.sizes),  # One batch has all examples, so their order in an epoch has no effect.
        num_classes=10,
        recipe=Recipe(optimizer=Sgd(momentum=0.0), local=list(local), proximal=True),
    )
    settings = SimulationSettings(
        plan=PLAN, seed=4, validation_fraction=0.0, client_test=test, fine_tune=FINE_TUNING, quiet=True
    )
    return simulate(app, train, cohort=NUM_CLIENTS, rounds=ROUNDS, settings=replace(settings, **changes))  # type: ignore[arg-type]


def fine_tuned(module: nn.Module, train: Partition, client: int) -> nn.Module:
    """Train the last Version for one client: plain SGD over its own examples."""
    tuned, rows = deepcopy(module).train(), train.indices[client]
    x, y = torch.from_numpy(train.examples.inputs["x"][rows]), torch.from_numpy(train.examples.y[rows]).long()
    optimizer = torch.optim.SGD(tuned.parameters(), lr=TUNING_RATE)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(tuned(x), y).backward()
        optimizer.step()
    return tuned


def quality(module: nn.Module, test: Partition, client: int) -> tuple[float, float]:
    """Return loss and accuracy of a module on the test examples of one client."""
    rows = test.indices[client]
    x, y = torch.from_numpy(test.examples.inputs["x"][rows]), torch.from_numpy(test.examples.y[rows]).long()
    with torch.no_grad():
        logits = module.eval()(x)
    return float(nn.functional.cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean())


@pytest.mark.parametrize(
    ("local", "plan"),
    [
        ((), PLAN),
        pytest.param(("head.*",), PLAN, marks=pytest.mark.nightly),
        pytest.param((), DITTO, marks=pytest.mark.nightly),
    ],
    ids=["shared", "fedper", "ditto"],
)
def test_each_client_has_the_numbers_of_the_plain_program(local: tuple[str, ...], plan: dict[str, object]) -> None:
    result, (train, test) = simulated(local, plan=plan), split()
    for row in result.per_client:
        start = result.module_of(row.client) if local or plan is DITTO else result.module
        twin = fine_tuned(start, train, row.client)
        for ours, theirs in (
            (row.of_version, quality(result.module, test, row.client)),
            (row.personal, quality(twin, test, row.client)),
        ):
            np.testing.assert_allclose((ours["loss"], ours["accuracy"]), theirs, rtol=0, atol=2e-5)
    # The comparison can fail: the fine-tuning changes every client.
    assert all(abs(row.personal["loss"] - row.of_version["loss"]) > 1e-2 for row in result.per_client)
    assert [row.num_examples for row in result.per_client] == list(test.sizes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changes", "plan"),
    [({"engine": "vmap"}, PLAN), ({"processes": 2}, PLAN), ({"processes": 2}, DITTO)],
    ids=["vmap", "processes", "processes-ditto"],
)
def test_every_engine_fine_tunes_alike(changes: dict[str, object], plan: dict[str, object]) -> None:
    ours, theirs = simulated(**changes, plan=plan), simulated(plan=plan)
    for row, other in zip(ours.per_client, theirs.per_client, strict=True):
        assert row.personal["loss"] == pytest.approx(other.personal["loss"], abs=1e-5 if "engine" in changes else 0.0)


@pytest.mark.nightly
def test_fine_tuning_leaves_the_run_as_it_was() -> None:
    assert simulated().digests == simulated(fine_tune=None).digests

"""``SimulationSettings(trainer=...)``: the clients train by code of the user, in torch."""

import copy
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from support import digits_fedavg
from support.digits_fedavg import BATCH, NUM_CLIENTS, PLAN, RATE, app_of, clients_of, federated_average, network
from torch import nn

from fanin.clients.data.batching import batches
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change, Trainer
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput
from fanin.simulation import ClientFailed, Result, SimulationSettings, Study, simulate

SEED = 5


class TorchLoop:
    """Local SGD in eager torch, with the batches of ``federated_average``."""

    runtime, graph_format = "torch", "onnx"

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.num_trained = store, 0

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        training, table, local = assignment.training, model.bundle.manifest.table, network()
        local.load_state_dict({name: torch.tensor(each) for name, each in table.views(model.parameters).items()})
        optimizer, self.num_trained = torch.optim.SGD(local.parameters(), lr=training.learning_rate), 1
        seeds = np.random.SeedSequence((training.seed, self.store.partition, assignment.round))
        rng = np.random.default_rng(seeds)
        for _ in range(training.epochs):
            for batch in batches(self.store.train, BATCH, rng):
                should_continue()
                real = batch.mask > 0
                optimizer.zero_grad()
                outputs = local(torch.from_numpy(batch.inputs["x"][real]))
                torch.autograd.backward(nn.functional.cross_entropy(outputs, torch.from_numpy(batch.y[real]).long()))
                optimizer.step()
        values = table.flatten({name: each.numpy() for name, each in local.state_dict().items()})
        return Change(values=values - model.parameters, counts={m.EXAMPLES: len(self.store.train)})


def trained(trainer: Callable[[MemoryStore], Trainer], rounds: int = 2, **changes: object) -> Result:
    settings = SimulationSettings(plan=PLAN, seed=SEED, quiet=True, trainer=trainer, **changes)
    return simulate(app_of(network()), clients_of(), cohort=NUM_CLIENTS, rounds=rounds, settings=settings)


def test_a_loop_in_torch_is_federated_averaging_in_torch() -> None:
    """The loop equals plain torch, on each client, and the coordinator averages it."""
    stores: list[int] = []

    def factory(store: MemoryStore) -> Trainer:
        stores.append(store.partition)
        return TorchLoop(store)

    result = trained(factory)
    expected = network()
    for number in (1, 2):
        expected = federated_average(expected, SEED, number)
    assert (result.engine, result.failures) == ("trainer", ())
    assert sorted(stores) == list(range(NUM_CLIENTS)), "each client has one trainer for all rounds"
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(result.module.state_dict()[name], value, rtol=0.0, atol=1e-6)
    assert PLAN["training.learning_rate"] == RATE


def test_a_study_trains_by_a_loop_of_the_user(tmp_path: Path) -> None:
    settings = SimulationSettings(quiet=True, trainer=TorchLoop)
    study = Study(folder=tmp_path / "study", methods={"loop": PLAN})
    result = study.run(app_of(network()), clients_of(), cohort=NUM_CLIENTS, rounds=2, settings=settings)
    assert [point.error for point in result.points] == [""] and result.is_complete


@pytest.mark.nightly
def test_worker_processes_train_by_a_class_of_a_notebook_to_the_same_bits() -> None:
    # As a class of a notebook, whose module the workers cannot import.
    ours = (sys.modules[__name__], digits_fedavg)
    for module in ours:
        cloudpickle.register_pickle_by_value(module)
    try:
        assert trained(TorchLoop, processes=2).digests == trained(TorchLoop).digests
    finally:
        for module in ours:
            cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.nightly
def test_a_trainer_that_cannot_be_pickled_is_one_error() -> None:
    lock = threading.Lock()

    def factory(store: MemoryStore) -> Trainer:
        with lock:
            return TorchLoop(store)

    with pytest.raises(InvalidInput, match="trainer: cannot be sent to another process") as error:
        trained(factory, processes=2)
    assert error.value.code == "FN-1883"
    assert trained(factory, rounds=1).is_complete


class Nothing(TorchLoop):
    """Returns the new parameters, which is no Change."""

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        return model.parameters  # type: ignore[return-value]


class NoRuntime(TorchLoop):
    runtime = ""


@pytest.mark.nightly
def test_each_wrong_trainer_is_one_error() -> None:
    with pytest.raises(ClientFailed) as failed:
        trained(Nothing)
    assert (failed.value.code, failed.value.failure.error.split(",")[0]) == (
        "FN-1882",
        "training: the trainer returned ndarray",
    )
    for factory, text in ((lambda store: TorchLoop, "returned the class TorchLoop"), (NoRuntime, "got runtime ''")):
        with pytest.raises(InvalidInput, match=text) as error:
            trained(factory)
        assert error.value.code == "FN-1881"


@pytest.mark.parametrize(
    ("changes", "code"), [({"trainer": copy}, "FN-1881"), ({"trainer": TorchLoop, "resume": "record"}, "FN-1884")]
)
def test_settings_that_a_trainer_does_not_go_with_are_refused_before_the_export(
    changes: dict[str, object], code: str
) -> None:
    with pytest.raises(InvalidInput) as error:
        simulate(app_of(network()), clients_of(), cohort=2, rounds=1, settings=SimulationSettings(plan=PLAN, **changes))
    assert error.value.code == code

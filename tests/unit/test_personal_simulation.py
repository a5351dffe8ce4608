"""Personal parameters in a simulation: clients with contradictory labels learn more than one shared model can."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.errors import raises
from torch import Tensor, nn

from fanin.clients.data.examples import Examples
from fanin.edge.export import App, Recipe, Sgd
from fanin.protos.errors import InvalidInput, UnsupportedModel
from fanin.simulation import (
    DeviceModel,
    Iid,
    OnOff,
    Partition,
    Result,
    SimulationSettings,
    load_data,
    partition,
    simulate,
)

NUM_CLIENTS, ROUNDS, NUM_CLASSES = 3, 12, 10
PLAN = {"training.learning_rate": 0.1, "training.epochs": 2, "codec.name": "fixed32"}


class Network(nn.Module):
    """A shared body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.relu(self.body(x.flatten(1))))


def app_with(local: Sequence[str]) -> App:
    torch.manual_seed(3)
    images = torch.from_numpy(load_data("digits").train.inputs["x"][:64])
    recipe = Recipe(optimizer=Sgd(momentum=0.0), local=local)
    return App(
        name="digits", module=Network(), calibration=images, batch_size=16, num_classes=NUM_CLASSES, recipe=recipe
    )


def labels_of(client: int, labels: np.ndarray) -> np.ndarray:
    """Return the client's labels: each client maps digits to other labels, so no single model fits all clients."""
    return (labels + 3 * client) % NUM_CLASSES


def contradicting() -> Partition:
    clients = partition(load_data("digits").train, NUM_CLIENTS, Iid(), seed=2)
    y = clients.examples.y.copy()
    for client, indices in enumerate(clients.indices):
        y[indices] = labels_of(client, y[indices])
    return Partition(examples=Examples(inputs=clients.examples.inputs, y=y), indices=clients.indices)


def simulated(local: Sequence[str], **settings: object) -> Result:
    simulation_settings = SimulationSettings(plan=PLAN, seed=4, **settings)  # type: ignore[arg-type]
    return simulate(app_with(local), contradicting(), cohort=NUM_CLIENTS, rounds=ROUNDS, settings=simulation_settings)


@pytest.fixture(scope="module")
def personal() -> Result:
    return simulated(["head.*"])


def accuracy(module: nn.Module, client: int) -> float:
    test = load_data("digits").test
    with torch.no_grad():
        outputs = module(torch.from_numpy(test.inputs["x"]))
    return float((outputs.argmax(1).numpy() == labels_of(client, test.y)).mean())


def test_personal_heads_learn_labels_that_one_shared_model_cannot(personal: Result) -> None:
    shared = simulated([])
    assert shared.local == {}
    shared_accuracies = [accuracy(shared.module, client) for client in range(NUM_CLIENTS)]
    personal_accuracies = [accuracy(personal.module_of(client), client) for client in range(NUM_CLIENTS)]
    # For an image, at most one client's label equals the prediction.
    assert sum(shared_accuracies) <= 1.0
    assert min(personal_accuracies) > 0.85
    # The head of another client is no better than chance.
    assert accuracy(personal.module_of(0), 1) < 0.1
    # A client validates the Version with its own head.
    last = [row for row in personal.clients if row.round == ROUNDS]
    assert min(row.validation_accuracy for row in last) > 0.8
    assert max(row.validation_accuracy for row in shared.clients if row.round == ROUNDS) < 0.8


def test_only_the_shared_parameters_are_in_a_version(personal: Result) -> None:
    assert sorted(personal.arrays) == ["body.bias", "body.weight"]
    assert personal.parameters.size == 64 * 32 + 32
    assert {name: value.shape for name, value in personal.local[1].items()} == {
        "head.bias": (NUM_CLASSES,),
        "head.weight": (NUM_CLASSES, 32),
    }
    # A header for each client, and four bytes for each shared value.
    payload_bytes = NUM_CLIENTS * 4 * personal.parameters.size
    assert payload_bytes < personal.rounds[-1].bytes_up < payload_bytes + NUM_CLIENTS * 4 * 330
    head = dict(app_with([]).module.named_parameters())["head.weight"]
    module = dict(personal.module.named_parameters())
    assert torch.equal(module["head.weight"], head)


def test_a_client_without_personal_parameters_has_no_module_of_its_own(personal: Result) -> None:
    problem = (
        f"result: got client 7, expected one of the {NUM_CLIENTS} clients with personal parameters that have trained: "
        "those of Recipe(local=[...]), or Ditto's copy; a fine-tuned model is evaluated, and not kept"
    )
    with raises(InvalidInput, problem):
        personal.module_of(7)


def same(first: Result, second: Result) -> bool:
    heads = [
        {(client, name): value.tobytes() for client, tensors in each.local.items() for name, value in tensors.items()}
        for each in (first, second)
    ]
    return first.digests == second.digests and heads[0] == heads[1]


@pytest.mark.nightly
def test_a_resumed_simulation_has_the_same_personal_parameters(personal: Result, tmp_path: Path) -> None:
    recorded = simulated(["head.*"], resume=tmp_path / "record")
    assert same(recorded, personal)
    files = sorted((tmp_path / "record" / "trainings").iterdir())
    assert len(files) == NUM_CLIENTS * ROUNDS
    for path in files[::2]:
        path.unlink()
    assert same(simulated(["head.*"], resume=tmp_path / "record"), personal)


@pytest.mark.nightly
def test_worker_processes_and_absent_clients_keep_personal_parameters(personal: Result) -> None:
    assert same(simulated(["head.*"], processes=2), personal)
    away = DeviceModel(availability=OnOff(on_s=300.0, off_s=60.0))
    assert simulated(["head.*"], devices=away).local.keys() == {0, 1, 2}


def test_the_engine_vmap_is_refused_and_auto_uses_graph() -> None:
    with pytest.raises(UnsupportedModel, match="FN-0798"):
        simulated(["head.*"], engine="vmap")
    assert simulated(["head.*"], engine="auto").engine == "graph"


def test_the_engine_vmap_is_refused_for_copies_of_clients() -> None:
    app = replace(app_with([]), recipe=Recipe(optimizer=Sgd(momentum=0.0), proximal=True))
    plan = PLAN | {"training.ditto_weight": 0.1, "training.personal_epochs": 1}

    def engine_of(engine: str) -> str:
        settings = SimulationSettings(plan=plan, engine=engine, quiet=True)
        return simulate(app, contradicting(), cohort=NUM_CLIENTS, rounds=1, settings=settings).engine

    with pytest.raises(UnsupportedModel) as refusal:
        engine_of("vmap")
    assert refusal.value.code == "FN-1834"
    assert engine_of("auto") == "graph"


def compared(local: Sequence[str], **settings: object) -> Result:
    names = ("personal.accuracy", "global.accuracy", "evaluate.loss")
    plan = PLAN | {"statistics": [{"name": name, "bound": 4096 << 16} for name in names]}
    simulation_settings = SimulationSettings(plan=plan, seed=4, quiet=True, **settings)  # type: ignore[arg-type]
    return simulate(app_with(local), contradicting(), cohort=NUM_CLIENTS, rounds=4, settings=simulation_settings)


def test_a_round_compares_the_global_and_the_own_models() -> None:
    result = compared(["head.*"])
    last, clients = result.rounds[-1], [row for row in result.clients if row.round == 4]
    for name, of_client in (("personal.accuracy", 0.7), ("global.accuracy", 0.0)):
        sizes = [row.num_validation_examples for row in clients]
        values = [row.means[name] for row in clients]
        assert last.means[name] == pytest.approx(np.average(values, weights=sizes), abs=1e-4)
        assert min(values) >= of_client
    # With personal parameters, a client validates the Version with its own head.
    assert last.means["personal.accuracy"] == pytest.approx(last.validation_accuracy, abs=1e-4)
    assert last.means["evaluate.loss"] == pytest.approx(last.validation_loss, abs=1e-3)
    assert last.means["global.accuracy"] < 0.4


def test_a_comparison_needs_models_of_the_clients_and_validation_examples() -> None:
    with pytest.raises(InvalidInput) as refusal:
        compared([])
    assert refusal.value.code == "FN-1818"
    with pytest.raises(InvalidInput) as refusal:
        compared(["head.*"], validation_fraction=0.0)
    assert refusal.value.code == "FN-1179"


@pytest.mark.nightly
def test_test_data_and_the_baseline_see_the_initial_head(personal: Result) -> None:
    result = simulated(["head.*"], test=load_data("digits").test, baseline=True)
    assert same(result, personal)
    # The pooled training trains all parameters, and the labels contradict each other.
    assert len(result.baseline) == ROUNDS + 1
    assert result.rounds[-1].test_accuracy < 0.5

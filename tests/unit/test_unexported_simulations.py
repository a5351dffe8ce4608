"""Simulations of modules that no graph format can express: the engines vmap and auto train in torch alone."""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import samples
from support.nightly import in_ci
from torch import Tensor, nn

from fanin.clients.data.examples import Examples
from fanin.edge.export import App, Recipe, cross_entropy
from fanin.edge.runtimes.quality import MAX_RISE_PERCENT
from fanin.protos.errors import InvalidPlan, UnsupportedModel
from fanin.simulation import SimulationSettings, simulate
from fanin.simulation.data.partitioning import Partition


def clients_of(*sizes: int) -> Partition:
    x, y = samples(sum(sizes), seed=4)
    bounds = np.cumsum([0, *sizes])
    indices = tuple(np.arange(start, end) for start, end in pairwise(bounds))
    return Partition(examples=Examples(inputs={"x": x}, y=y), indices=indices)


class Modulus(nn.Module):
    """A layer with an operator that ONNX lacks."""

    def forward(self, x: Tensor) -> Tensor:
        """Return moduli of the shape of x."""
        return torch.hypot(x, x + 1.0)


class Inverse(nn.Module):
    """A layer with an operator of linear algebra that ONNX lacks."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the inverses of matrices of two rows (n, 4)."""
        return torch.linalg.inv(x.reshape(-1, 2, 2) + 3.0 * torch.eye(2)).reshape(-1, 4)


def unexported_app(layer: nn.Module, clients: Partition, **options: object) -> App:
    torch.manual_seed(0)
    return App(
        name="moduli",
        module=nn.Sequential(nn.Flatten(), nn.Linear(64, 4), layer),
        calibration=clients.examples.inputs["x"],
        batch_size=2,
        num_classes=4,
        **options,
    )


REFUSAL = (
    r"App moduli \(Sequential\): the train graph: cannot be converted to ONNX \(ONNX has no form of "
    r"aten\.hypot\.default\); module 2 \(Modulus\) at test_unexported_simulations\.py:\d+: replace it, or "
    r"give the App a form"
)


def test_the_engine_graph_refuses_a_module_that_cannot_be_exported_by_its_part_and_line() -> None:
    clients = clients_of(4, 4)
    settings = SimulationSettings(plan={"training.learning_rate": 0.1}, quiet=True)
    with pytest.raises(UnsupportedModel, match=f"^{REFUSAL}.*; or engine='vmap' simulates it without an export "):
        simulate(unexported_app(Modulus(), clients), clients, cohort=2, rounds=1, settings=settings)


class Branch(nn.Module):
    """A layer that torch cannot trace either."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x, with a sign that depends on its values."""
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("layer", "options"),
    [(Branch, {}), (Modulus, {"recipe": Recipe(local=("1.bias",))})],
    ids=["no trace", "personal parameters"],
)
@pytest.mark.parametrize("engine", ["graph", "vmap"])
def test_no_engine_is_advised_if_none_can_train(
    engine: str, layer: type[nn.Module], options: dict[str, object]
) -> None:
    clients = clients_of(4, 4)
    settings = SimulationSettings(engine=engine, plan={"training.learning_rate": 0.1}, quiet=True)
    with pytest.raises(UnsupportedModel) as excinfo:
        simulate(unexported_app(layer(), clients, **options), clients, cohort=2, rounds=1, settings=settings)
    assert "engine=" not in str(excinfo.value)


CASES = (("vmap", Modulus), ("auto", Modulus), ("vmap", Inverse), ("auto", Inverse))


@pytest.mark.parametrize("case", in_ci(CASES, CASES[-1:]))
def test_a_module_that_cannot_be_exported_trains_in_torch_alone(
    case: tuple[str, type[nn.Module]], capsys: pytest.CaptureFixture[str]
) -> None:
    engine, kind = case
    clients = clients_of(12, 3, 9)
    settings = SimulationSettings(engine=engine, plan={"training.learning_rate": 0.1}, test=clients.examples)
    result = simulate(unexported_app(kind(), clients), clients, cohort=3, rounds=2, settings=settings)
    assert result.engine == "vmap" and not result.failures
    assert "engine vmap without an export: the simulation trains and validates in torch; " in capsys.readouterr().err
    last = result.rounds[-1]
    module = result.module
    logits = module(torch.from_numpy(clients.examples.inputs["x"]))
    targets = torch.from_numpy(clients.examples.y).long()
    assert last.test_loss == pytest.approx(nn.functional.cross_entropy(logits, targets).item(), abs=1e-5)
    assert last.test_accuracy == pytest.approx((logits.argmax(1) == targets).double().mean().item())
    assert np.isfinite(last.validation_loss) and last.test_loss < result.rounds[0].test_loss
    assert np.isnan([last.test_accuracy_int8, last.validation_accuracy_int8]).all()


def test_int8_that_costs_too_much_for_an_export_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    clients = clients_of(4, 4)
    x, y = clients.examples.inputs["x"], clients.examples.y
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    # The calibration data has much smaller values than the validation data.
    app = App(
        name="wide", module=module, calibration=x / 100, batch_size=2, loss=cross_entropy, targets=y, validation=(x, y)
    )
    settings = SimulationSettings(engine="auto", plan={"training.learning_rate": 0.1})
    result = simulate(app, clients, cohort=2, rounds=1, settings=settings)
    assert result.engine == "graph" and not result.failures
    note = r"note: the initial model on the App's validation data: .* int8's outputs differ from float's by (\d+)"
    shown = re.search(note, capsys.readouterr().err)
    assert shown is not None and int(shown[1]) > MAX_RISE_PERCENT


@pytest.mark.nightly
def test_a_module_without_an_export_equals_its_exported_twin() -> None:
    """The train step of both is traced from the same module; a form of the operator makes the export possible."""
    clients = clients_of(12, 3, 9)
    decompositions = {torch.ops.aten.hypot.default: lambda self, other: torch.sqrt(self * self + other * other)}
    settings = SimulationSettings(engine="vmap", plan={"training.learning_rate": 0.1}, baseline=True, quiet=True)
    runs = [
        simulate(unexported_app(Modulus(), clients, **options), clients, cohort=3, rounds=2, settings=settings)
        for options in ({}, {"decompositions": decompositions})
    ]
    alone, exported = runs
    assert np.abs(alone.parameters - exported.parameters).max() < 1e-5
    assert alone.rounds[-1].validation_loss == pytest.approx(exported.rounds[-1].validation_loss, abs=1e-4)
    assert alone.baseline[-1].train_loss == pytest.approx(exported.baseline[-1].train_loss, abs=1e-4)


@pytest.mark.nightly
def test_a_plan_chooses_a_batch_size_without_an_export() -> None:
    clients = clients_of(12, 3, 9)
    plan = {"training.learning_rate": 0.1, "training.batch_size": 4}
    settings = SimulationSettings(engine="vmap", plan=plan, baseline=True, quiet=True)
    app = unexported_app(Modulus(), clients, other_batch_sizes=(4,))
    result = simulate(app, clients, cohort=3, rounds=1, settings=settings)
    # The clients train on 11, 2 and 8 examples.
    assert result.baseline[-1].num_steps == 3 + 1 + 2


@pytest.mark.nightly
def test_a_simulation_without_an_export_resumes_from_its_record(tmp_path: Path) -> None:
    clients = clients_of(4, 4)
    settings = SimulationSettings(
        engine="vmap", plan={"training.learning_rate": 0.1}, resume=tmp_path / "record", quiet=True
    )
    first, second = (
        simulate(unexported_app(Modulus(), clients), clients, cohort=2, rounds=1, settings=settings) for _ in range(2)
    )
    assert first.digests == second.digests


def test_what_needs_an_export_is_refused_with_the_reason_of_the_export() -> None:
    clients = clients_of(4, 4)
    app = unexported_app(Modulus(), clients, recipe=Recipe(local=("1.bias",)))
    settings = SimulationSettings(engine="vmap", plan={"training.learning_rate": 0.1}, quiet=True)
    with pytest.raises(UnsupportedModel, match=rf"^{REFUSAL}.*; torch alone cannot train the clients either: App mod"):
        simulate(app, clients, cohort=2, rounds=1, settings=settings)
    # An error that affects every format is reported once.
    broken_app = unexported_app(Modulus(), clients, recipe=Recipe(local=("nothing",)))
    with pytest.raises(UnsupportedModel, match="FN-1112") as excinfo:
        simulate(broken_app, clients, cohort=2, rounds=1, settings=settings)
    assert "torch alone" not in str(excinfo.value)
    plan = {"training.learning_rate": 0.1, "evaluation.best": "accuracy_int8", "stop.max_int8_drop": 1.0}
    settings = SimulationSettings(engine="vmap", plan=plan, test=clients.examples, quiet=True)
    with pytest.raises(InvalidPlan, match=r"got accuracy_int8, stop\.max_int8_drop, but without an export"):
        simulate(unexported_app(Modulus(), clients), clients, cohort=2, rounds=1, settings=settings)

"""The published comparisons: each script with small settings, its tuning, and the shape of the results."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data import images, labels, real_places, write_fashion_mnist

from fanin.clients import Examples
from fanin.edge.export import App, Recipe
from fanin.simulation import Iid, SimulationSettings, load_data, partition
from fanin.simulation.data.contract import check_partitioner

pytestmark = pytest.mark.heavy

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "published"
Script = Callable[[str], dict[str, Any]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Return the names of a script. It imports the modules next to it."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return lambda name: runpy.run_path(str(SCRIPTS / f"{name}.py"))


def rows_of(script: dict[str, Any], folder: Path, *words: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Run a script with its record in a folder. Return the rows of its report by panel and method."""
    out, figure = folder / "report.json", folder / "figure.svg"
    assert script["main"]([*words, "--folder", str(folder / "record"), "--json", str(out), "--plot", str(figure)]) == 0
    assert figure.read_text().startswith("<?xml")
    return {(row["panel"], row["method"]): row for row in json.loads(out.read_text())["rows"]}


@pytest.fixture
def random_fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random images in the place of Fashion-MNIST."""
    train, test = (labels(*(index % 10 for index in range(count))) for count in (1000, 100))
    write_fashion_mnist(tmp_path, images(1000), train, images(100, seed=1), test)
    monkeypatch.setenv("FANIN_DATA", str(tmp_path))


def test_fedavg_drops_stragglers_and_fedprox_keeps_their_work(script: Script, tmp_path: Path) -> None:
    words = ["--data", "1,1", "--stragglers", "0,0.9", "--rounds", "2", "--rates", "0.1", "--mus", "1", "--seeds", "1"]
    words += ["--examples", "12", "--epochs", "4"]
    rows = rows_of(script("fedprox"), tmp_path, *words)
    seeds = {(panel.split()[1], method): row["seeds"][0] for (panel, method), row in rows.items()}
    assert {key: seed["num_clients"] for key, seed in seeds.items()} == {
        ("0%", "FedAvg"): [0, 10, 10],
        ("0%", "FedProx"): [0, 10, 10],
        ("90%", "FedAvg"): [0, 1, 1],
        ("90%", "FedProx-mu0"): [0, 10, 10],
        ("90%", "FedProx"): [0, 10, 10],
    }
    # FedProx with mu = 0 is FedAvg with less work.
    losses = {key: seed["test_loss"][-1] for key, seed in seeds.items()}
    assert len(set(losses.values())) == 5
    assert rows_of(script("fedprox"), tmp_path, *words) == rows, "the points of the folder are kept"


def test_synthetic_devices_differ_by_their_kind_and_iid_ones_share_a_model(script: Script) -> None:
    fedprox = script("fedprox")
    devices_of, kinds = fedprox["devices_of"], fedprox["DATA"]
    for name, kind in kinds.items():
        devices = devices_of(kind, 40.0)
        xs = [devices.examples.inputs["x"][rows] for rows in devices.indices]
        assert len(xs) == 30 and 35 < np.mean(devices.sizes) < 41 and max(devices.sizes) > 3 * min(devices.sizes)
        # Means over the inputs of a device: 0 for all, or drawn for each device from N(B_k, 1).
        spread = np.std([x.mean(0) for x in xs])
        assert (spread < 0.2) == (name == "iid") and (spread > 0.7) == (name != "iid")
        assert np.array_equal(devices_of(kind, 40.0).examples.y, devices.examples.y)


@pytest.mark.usefixtures("random_fashion")
def test_methods_and_epochs_are_compared_by_similarity(script: Script, tmp_path: Path) -> None:
    words = ("--similarities", "0.1", "--methods", "SGD", "SCAFFOLD", "--epochs", "2", "--examples", "10")
    rows = rows_of(script("scaffold"), tmp_path, *words, "--rounds", "1", "--rates", "0.1", "--seeds", "1")
    assert list(rows) == [("similarity 10%", name) for name in ("SGD", "SCAFFOLD-2")]
    assert all(row["seeds"][0]["num_clients"] == [0, 20] for row in rows.values())


@pytest.mark.usefixtures("random_fashion")
def test_own_parameters_are_tuned_on_dirichlet_devices(script: Script, tmp_path: Path) -> None:
    words = ("--methods", "FedAvg", "FedYogi", "--rounds", "1", "--rates", "0.1", "--seeds", "1", "--examples", "10")
    rows = rows_of(script("dirichlet"), tmp_path, *words, "--alpha", "1")
    values = {method: row["values"] for (_, method), row in rows.items()}
    assert values["FedAvg"] == {"training.learning_rate": 0.1}
    assert values["FedYogi"]["aggregation.outer_options"]["learning_rate"] in (0.01, 0.03, 0.1)


def test_similarity_is_the_share_of_examples_at_random(script: Script) -> None:
    similarity = script("scaffold")["Similarity"]
    examples = Examples(inputs={"x": np.zeros((1000, 1), np.float32)}, y=np.arange(1000, dtype=np.int32) % 10)
    num_labels = {}
    for share in (0.0, 0.1, 1.0):
        check_partitioner(similarity(share=share))
        clients = partition(examples, 20, similarity(share=share))
        assert set(clients.sizes) == {50}
        num_labels[share] = np.mean([len(set(examples.y[rows])) for rows in clients.indices])
    assert num_labels[0.0] == 1.0 < 3.0 < num_labels[0.1] < 7.0 < 9.0 < num_labels[1.0]


def test_a_run_that_tunes_ends_when_it_cannot_be_the_best(script: Script, tmp_path: Path) -> None:
    tuning, data = script("tuning"), load_data("digits")
    torch = pytest.importorskip("torch")

    def app(recipe: Recipe) -> App:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        x = data.train.inputs["x"]
        return App(name="digits", module=net, calibration=x, batch_size=16, num_classes=10, recipe=recipe)

    plan = {"stop.target": 0.7, "evaluation.best": "accuracy"}
    comparison = tuning["Comparison"](
        folder=tmp_path,
        app=app,
        clients=partition(data.train, 10, Iid()),
        rounds=12,
        settings=SimulationSettings(test=data.test, plan=plan, validation_fraction=0.0, quiet=True),
        rates=(0.001, 0.3, 0.0001),
        seeds=(3, 4),
        score=tuning["rounds_score"](0.7),
    )
    curve = comparison.tuned("FedAvg", tuning["Entry"](cohort=5))
    assert curve.values == {"training.learning_rate": 0.3} and [point.seed for point in curve.points] == [3, 4]
    best = curve.points[0].first_round("test_accuracy", 0.7, higher_is_better=True)
    assert 1 <= best < 12 and curve.points[0].table["test_accuracy"][-1] >= 0.7
    files = (tmp_path / "FedAvg" / "points").iterdir()
    points = [json.loads(file.read_text()) for file in files]
    lasts = {point["values"]["training.learning_rate"]: point["table"]["round"][-1] for point in points}
    assert lasts[0.001] == 12 and lasts[0.0001] == best, "the third one has as many Rounds as the best one"
    assert tuning["rounds_text"](curve, 0.999, 12) == "> 12 (> 12, > 12)"


@pytest.mark.nightly
def test_partial_work_helps_with_90_percent_of_stragglers(script: Script, tmp_path: Path) -> None:
    words = ("--data", "1,1", "--stragglers", "0.9", "--rounds", "20", "--rates", "0.1", "--mus", "1", "--seeds", "3")
    rows = rows_of(script("fedprox"), tmp_path, *words)
    losses = {method: np.mean([seed["test_loss"][-1] for seed in row["seeds"]]) for (_, method), row in rows.items()}
    assert losses["FedProx"] < 0.8 * losses["FedAvg"] and losses["FedProx-mu0"] < 0.8 * losses["FedAvg"]


@pytest.mark.nightly
def test_control_variates_help_devices_with_one_label(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANIN_DATA", str(real_places("fashion-mnist").data))
    words = ("--similarities", "0", "--methods", "FedAvg", "SCAFFOLD", "--epochs", "10", "--seeds", "1")
    rows = rows_of(script("scaffold"), tmp_path, *words)
    num_rounds = {method: row["seeds"][0]["round"][-1] for (_, method), row in rows.items()}
    assert num_rounds["SCAFFOLD-10"] < num_rounds["FedAvg-10"]

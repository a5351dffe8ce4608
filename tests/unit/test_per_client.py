"""The quality of the last Version for each client: the split, the summary, the files and the refusals."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fanin.clients.data.examples import Examples
from fanin.clients.device.training.tuning import FineTuning
from fanin.commands.report.of_simulation import content_of_simulation
from fanin.edge.metrics.metric import Metric
from fanin.protos.errors import InvalidInput
from fanin.protos.plans import Training
from fanin.simulation.data.partitioners import Dirichlet
from fanin.simulation.data.partitioning import Partition, partition
from fanin.simulation.studies.per_client import ClientQuality, quality_columns, summary_of
from fanin.simulation.studies.tests import check_client_tests


def labelled(num: int = 400, num_labels: int = 4) -> Examples:
    labels = (np.arange(num) % num_labels).astype(np.int32)
    return Examples(inputs={"x": np.arange(num, dtype=np.float32)[:, None]}, y=labels)


def clients(num: int = 8) -> Partition:
    return partition(labelled(), num, Dirichlet(alpha=0.5), seed=3)


def test_a_split_has_each_example_once_and_the_mix_of_labels_of_its_client() -> None:
    parts = clients()
    train, test = parts.split(0.25, seed=1)
    for whole, kept, held in zip(parts.indices, train.indices, test.indices, strict=True):
        assert sorted([*kept, *held]) == whole.tolist()
        assert len(held) == round(0.25 * len(whole))
        for label in range(4):
            share = float((parts.examples.y[whole] == label).sum()) / 4
            assert abs((parts.examples.y[held] == label).sum() - share) <= 1.0


def test_a_split_follows_from_its_seed() -> None:
    first, again, other = (clients().split(0.25, seed=seed)[1].indices for seed in (1, 1, 2))
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert not all(np.array_equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, "half", True])
def test_a_wrong_share_is_refused(share: float) -> None:
    with pytest.raises(InvalidInput) as error:
        clients().split(share)
    assert error.value.code == "FN-1835"


def test_a_client_with_too_few_examples_is_named() -> None:
    few = Partition(examples=labelled(12), indices=(np.arange(4), np.arange(4, 6)))
    with pytest.raises(InvalidInput, match="2 examples of client 1") as error:
        few.split(0.5)
    assert error.value.code == "FN-1835"


def row(client: int, num: int, accuracy: float, loss: float, **own: float) -> ClientQuality:
    values = {"accuracy": accuracy, "loss": loss, **own}
    return ClientQuality(client=client, version=3, num_examples=num, of_version=values)


def test_the_summary_has_mean_weighted_mean_and_worst_decile() -> None:
    rows = [row(client, 10 + client, client / 10, 2.0 - client / 10, errors=float(client)) for client in range(11)]
    summary = summary_of(rows, {"errors": Metric(function=lambda p, t: 0.0, higher_is_better=False)})
    accuracy, sizes = np.arange(11) / 10, 10 + np.arange(11)
    assert summary["global.accuracy"].mean == pytest.approx(accuracy.mean())
    assert summary["global.accuracy"].weighted_mean == pytest.approx((accuracy * sizes).sum() / sizes.sum())
    # A tenth of 11 clients, rounded up, are 2 clients: the smallest accuracies, and the largest losses and errors.
    assert summary["global.accuracy"].worst_decile == pytest.approx((0.0 + 0.1) / 2)
    assert summary["global.loss"].worst_decile == pytest.approx((2.0 + 1.9) / 2)
    assert summary["global.errors"].worst_decile == pytest.approx((10.0 + 9.0) / 2)


def test_clients_without_examples_count_for_nothing() -> None:
    rows = [row(0, 4, 0.5, 1.0), ClientQuality(client=1, version=3, num_examples=0)]
    summary = summary_of(rows, {})
    assert summary["global.accuracy"].num_clients == 1
    assert summary["global.accuracy"].mean == 0.5
    assert not any(name.startswith("personal.") for name in summary)
    assert math.isnan(quality_columns(rows)["global.accuracy"][1])
    assert math.isnan(rows[1].personal_accuracy)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no epochs": (lambda: FineTuning(epochs=0), "FN-1836"),
    "half an epoch": (lambda: FineTuning(epochs=0.5), "FN-1836"),  # type: ignore[arg-type]
    "true": (lambda: FineTuning(epochs=True), "FN-1836"),
    "no rate": (lambda: FineTuning(epochs=1, learning_rate=0.0), "FN-1836"),
    "no rate at all": (lambda: FineTuning(epochs=1).training(Training(epochs=1, learning_rate=0.0)), "FN-1836"),
    "an int": (lambda: check_client_tests(clients(), 3, 8), "FN-1836"),
    "no test data": (lambda: check_client_tests(None, FineTuning(epochs=1), 8), "FN-1837"),
    "other clients": (lambda: check_client_tests(clients(4), None, 8), "FN-1837"),
    "no partition": (lambda: check_client_tests(labelled(), None, 8), "FN-1837"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_settings_are_refused(case: str) -> None:
    attempt, code = REFUSED[case]
    with pytest.raises(InvalidInput) as error:
        attempt()
    assert error.value.code == code


def test_a_fine_tuning_keeps_the_optimizer_of_the_plan_and_nothing_of_its_schedule() -> None:
    plan = Training(
        epochs=1, learning_rate=0.5, batch_size=4, proximal_weight=0.1, warmup_steps=3, step_decay="linear", seed=7
    )
    training = FineTuning(epochs=5).training(plan)
    assert training == Training(epochs=5, learning_rate=0.5, batch_size=4, seed=7)
    assert FineTuning(epochs=5, learning_rate=0.25).training(plan).learning_rate == 0.25


@pytest.mark.heavy
def test_the_command_writes_the_quality_of_each_client_and_the_report_shows_it(tmp_path: Path) -> None:
    from fanin.commands.simulation import simulate

    table, output = tmp_path / "clients.csv", tmp_path / "result.json"
    words = ["--clients", "6", "--cohort", "3", "--rounds", "1", "--client-test", "0.25", "--fine-tune", "2", "--quiet"]
    app = str(Path(__file__).parents[2] / "examples" / "digits" / "app.py:app")
    assert simulate([app, *words, "--per-client-csv", str(table), "--json", str(output)]) == 0
    with table.open() as file:
        rows = list(csv.DictReader(file))
    result = json.loads(output.read_text())
    assert [int(each["client"]) for each in rows] == list(range(6))
    for each, client in zip(rows, result["per_client"], strict=True):
        assert float(each["personal.accuracy"]) == client["personal"]["accuracy"]
    content = content_of_simulation(output)
    (grid,) = (table for table in content.tables if table.title == "Clients")
    mean = np.mean([float(each["personal.accuracy"]) for each in rows])
    (shown,) = (cells for cells in grid.rows if cells[0] == "personal.accuracy")
    assert shown[1] == f"{mean:.4f}"
    (chart,) = (chart for chart in content.charts if "each client" in chart.title)
    assert {name: len(points) for name, points in chart.series.items()} == {"global": 6, "personal": 6}


@pytest.mark.parametrize("option", [("--fine-tune", "2"), ("--per-client-csv", "x.csv")])
def test_the_command_refuses_options_of_test_examples_without_any(
    capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    from fanin.commands.simulation import simulate

    assert simulate(["app.py:app", "--clients", "6", *option]) != 0
    assert f"{option[0]}: got it without --client-test" in capsys.readouterr().err

"""The researcher's bench: several test sets, figures with bands over seeds, and studies that go on."""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn

from fanin.clients import Examples
from fanin.edge.export import App, Recipe
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.simulation import (
    Iid,
    Method,
    Partition,
    PlotForm,
    Result,
    SimulationSettings,
    Study,
    load_data,
    partition,
    plot_results,
    simulate,
)
from fanin.simulation.studies.comparison import points_of

RATE: Final = "training.learning_rate"


def app() -> App:
    torch.manual_seed(3)
    images = torch.from_numpy(load_data("digits").train.inputs["x"][:64])
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return App(
        name="digits", module=net, calibration=images, batch_size=8, num_classes=10, recipe=Recipe(proximal=True)
    )


def clients() -> Partition:
    return partition(load_data("digits").train, 4, Iid())


def two_sets() -> dict[str, Examples]:
    clean = load_data("digits").test
    rng = np.random.default_rng(5)
    noise = rng.normal(0, 0.5, clean.inputs["x"].shape).astype(np.float32)
    return {"clean": clean, "corrupted": Examples(inputs={"x": clean.inputs["x"] + noise}, y=clean.y)}


@pytest.fixture(scope="module")
def result() -> Result:
    """Two seeds with two test sets, evaluated at every second Version."""
    settings = SimulationSettings(
        test=two_sets(),
        plan={RATE: 0.1, "evaluation.every": 2, "evaluation.metrics": [{"name": "nll"}]},
        seeds=(0, 1),
        quiet=True,
    )
    return simulate(app(), clients(), cohort=2, rounds=3, settings=settings)


def test_each_test_set_has_its_values_and_the_first_is_the_test_data(result: Result) -> None:
    columns, sets = result.columns(), two_sets()
    for row in (row for each in result.repeats for row in each.rounds if row.version % 2 == 0):
        assert row.metrics["clean.accuracy"] == row.test_accuracy
        assert row.metrics["clean.nll"] == row.metrics["nll"]
        assert row.metrics["corrupted.loss"] > row.metrics["clean.loss"] or row.version == 0
    for row in (row for row in result.rounds if row.version % 2):
        assert math.isnan(columns["metrics.corrupted.accuracy"][row.version])
    # Version 2 is the last evaluated one; the values are those of a module with the parameters of the best Version.
    best = result.best
    assert best is not None and best.row.version == 2
    with torch.no_grad():
        logits = best.module(torch.from_numpy(sets["corrupted"].inputs["x"])).numpy()
    assert best.row.metrics["corrupted.accuracy"] == pytest.approx(np.mean(logits.argmax(1) == sets["corrupted"].y))
    assert {"metrics.clean.accuracy_int8", "metrics.corrupted.nll_int8"} <= set(columns)


def test_the_plot_of_a_result_has_a_line_for_each_further_test_set(result: Result, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure: Any = result.plot(tmp_path / "sets.png")
    labels = [line.get_label() for axes in figure.axes for line in axes.lines]
    assert "test accuracy, corrupted" in labels and "test accuracy, clean" not in labels


def test_results_are_compared_with_bands_over_their_seeds(result: Result, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    columns = ("metrics.clean.accuracy", "metrics.corrupted.accuracy")
    form = PlotForm(band="range", log="y")
    figure: Any = plot_results({"one": result, "other": result}, tmp_path / "two.png", columns=columns, form=form)
    assert len(figure.axes) == 2
    for axes, column in zip(figure.axes, columns, strict=True):
        assert axes.get_yscale() == "log"
        values = [[row.metrics[column.removeprefix("metrics.")] for row in each.rounds[::2]] for each in result.repeats]
        expected = [sum(pair) / 2 for pair in zip(*values, strict=True)]
        assert axes.lines[0].get_ydata().tolist() == pytest.approx(expected)
        assert axes.lines[0].get_xdata().tolist() == [0, 2]
        low, high = axes.collections[0].get_paths()[0].get_extents().get_points()[:, 1]
        assert (low, high) == pytest.approx((min(map(min, values)), max(map(max, values))))
    for arguments in ({"columns": "nothing"}, {"form": PlotForm(x="nowhere")}):
        with pytest.raises(InvalidInput, match="FN-1895"):
            plot_results({"one": result}, **arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="FN-1895"):
        PlotForm(band="wide")


def test_bands_are_the_range_the_deviation_or_the_standard_error() -> None:
    values = (1.0, 2.0, 6.0)
    table = {
        "seed": [0, 0, 1, 1, 2, 2],
        "round": [1, 2] * 3,
        "bytes_up": [10, 10, 20, 20, 30, 30],
        "y": [v for value in values for v in (value, math.nan)],
    }
    s = statistics.stdev(values)
    ends = {"range": (1, 6), "deviation": (3 - s, 3 + s), "error": (3 - s / 3**0.5, 3 + s / 3**0.5), "none": (3, 3)}
    for band, (low, high) in ends.items():
        (point,) = points_of(table, "y", PlotForm(band=band))
        assert (point.x, point.mean, point.low, point.high) == pytest.approx((1, 3, low, high))
    assert [point.x for point in points_of(table, "bytes_up", PlotForm(x="bytes_up", cumulative=True))] == [20, 40]
    assert points_of({**table, "y": [0.0] * 6}, "y", PlotForm(log="y")) == []


def weights_of(arrays: Mapping[str, Any]) -> dict[str, float]:
    return {"accuracy": float(np.mean([array.mean() for array in arrays.values()])), "num_arrays": len(arrays)}


def test_the_sets_of_a_flower_app_are_functions() -> None:
    pytest.importorskip("flwr")
    from flwr.client import NumPyClient

    class Adds(NumPyClient):
        def get_parameters(self, config: object) -> list[Any]:
            return [np.zeros(2, np.float32), np.zeros((1, 3), np.float32)]

        def fit(self, parameters: list[Any], config: object) -> tuple[list[Any], int, dict[str, float]]:
            return [array + 1 for array in parameters], 4, {}

    tests = {"clean": weights_of, "double": lambda arrays: {"accuracy": 2 * weights_of(arrays)["accuracy"]}}
    settings = SimulationSettings(test=tests, quiet=True)
    result = simulate(lambda context: Adds().to_client(), 2, cohort=2, rounds=2, settings=settings)
    assert [row.test_accuracy for row in result.rounds] == pytest.approx([0, 1, 2], abs=0.02)
    for row in result.rounds:
        assert row.metrics["num_arrays"] == row.metrics["clean.num_arrays"] == 2
        assert row.metrics["double.accuracy"] == 2 * row.test_accuracy
    with pytest.raises(InvalidInput, match="FN-1894"):
        simulate(Adds, 2, cohort=2, rounds=2, settings=SimulationSettings(test=load_data("digits").test))


def study(folder: Path, **keys: Any) -> Study:
    methods = {"FedAvg": {}, "FedProx": Method(plan={"training.proximal_weight": 0.5})}
    return Study(folder=folder, **({"grid": {RATE: (0.01, 0.1)}, "seeds": (0, 1), "methods": methods} | keys))


def test_a_study_goes_on_with_the_points_that_are_missing(tmp_path: Path) -> None:
    settings = SimulationSettings(test=load_data("digits").test, quiet=True)
    parts, model = clients(), app()
    first = study(tmp_path).run(model, parts, cohort=2, rounds=2, settings=settings)
    assert first.is_complete and not first.failures and len(first.points) == 8
    assert len({point.plan_sha256 for point in first.points}) == 8
    assert len(list(tmp_path.glob("app-*"))) == 1 and not list(tmp_path.glob("app-*/trainings/*"))
    # A point equals the simulation of its own.
    own = SimulationSettings(test=settings.test, plan={RATE: 0.1}, seed=1, quiet=True)
    alone = simulate(model, parts, cohort=2, rounds=2, settings=own)
    (point,) = (p for p in first.points if (p.method, p.values, p.seed) == ("FedAvg", {RATE: 0.1}, 1))
    assert point.table["test_loss"] == alone.columns()["test_loss"]
    # One file is lost and another one is cut: two points run again, and the others keep their durations.
    files = sorted((tmp_path / "points").glob("*.json"))
    files[0].unlink()
    files[1].write_text(files[1].read_text()[:20])
    again = study(tmp_path).run(model, parts, cohort=2, rounds=2, settings=settings)
    assert [p.table["test_loss"] for p in again.points] == [p.table["test_loss"] for p in first.points]
    assert sum(a.seconds != b.seconds for a, b in zip(first.points, again.points, strict=True)) == 2
    # More seeds are more points; another number of Rounds is another study in the same folder.
    assert (
        len(
            study(tmp_path, seeds=(0, 1, 2), methods={"FedAvg": {}})
            .run(model, parts, cohort=2, rounds=2, settings=settings)
            .points
        )
        == 6
    )
    best = first.best("test_accuracy")
    for index, method in enumerate(("FedAvg", "FedProx")):
        scores = [point.table["test_accuracy"][-1] for point in first.points[4 * index : 4 * index + 4]]
        means = {0.01: sum(scores[:2]) / 2, 0.1: sum(scores[2:]) / 2}
        assert best[method].mean("test_accuracy") == pytest.approx(max(means.values()))
        assert means[best[method].values[RATE]] == max(means.values())
        worst = first.best("test_accuracy", higher_is_better=False)[method]
        assert worst.mean("test_accuracy") == pytest.approx(min(means.values()))
    first.write_csv(tmp_path / "table.csv")
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 9
    pytest.importorskip("matplotlib")
    figure: Any = first.plot(tmp_path / "study.png", "test_accuracy")
    assert [line.get_label() for line in figure.axes[0].lines] == ["FedAvg", "FedProx"]


def test_a_failed_point_does_not_lose_the_others_and_runs_again(tmp_path: Path) -> None:
    def strict(predictions: Any, targets: Any) -> float:
        if (predictions == targets).mean() > 0.5:
            raise ArithmeticError("too good")
        return 0.0

    grid = {RATE: (1e-4, 0.3)}
    settings = SimulationSettings(test=load_data("digits").test, metrics={"strict": strict}, quiet=True)
    few = study(tmp_path, grid=grid, seeds=(0,), methods={"FedAvg": {}})
    result = few.run(app(), clients(), cohort=2, rounds=2, settings=settings)
    assert result.is_complete and [bool(point.error) for point in result.points] == [False, True]
    assert [point.values for point in result.failures] == [{RATE: 0.3}]
    assert "ArithmeticError: too good" in result.failures[0].error and result.failures[0].table["round"]
    assert list(result.best("train_loss", higher_is_better=False)) == ["FedAvg"]
    again = few.run(app(), clients(), cohort=2, rounds=2, settings=settings)
    assert [a.seconds == b.seconds for a, b in zip(again.points, result.points, strict=True)] == [True, False]


def test_a_wrong_study_is_one_error_before_the_first_simulation(tmp_path: Path) -> None:
    for keys in ({"grid": {RATE: 0.1}}, {"seeds": ()}, {"seeds": (1, 1)}, {"methods": {}}):
        with pytest.raises(InvalidInput, match="FN-1896"):
            study(tmp_path, **keys)
    for settings in (SimulationSettings(seed=3), SimulationSettings(processes=2), SimulationSettings(resume=tmp_path)):
        with pytest.raises(InvalidInput, match="FN-1896"):
            study(tmp_path).run(app(), clients(), cohort=2, rounds=2, settings=settings)
    with pytest.raises(InvalidPlan, match=r"training\.rate"):
        study(tmp_path, grid={"training.rate": (1,)}).run(app(), clients(), cohort=2, rounds=2)
    assert not list((tmp_path / "points").iterdir())

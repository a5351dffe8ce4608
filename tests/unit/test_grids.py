"""Studies: a grid of Plans for several methods and seeds, with one table."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.digits_fedavg import PLAN, app_of, clients_of, network

from fanin.clients import FineTuning
from fanin.edge.export import Recipe, Sgd
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.simulation import ClientWork, Method, SimulationSettings, Study, StudyData, StudyResult, load_data
from fanin.simulation.grids.points import StudyPoint

pytestmark = pytest.mark.heavy


def run(study: Study, **options: object) -> StudyResult:
    settings = SimulationSettings(**{"plan": PLAN, "quiet": True} | options)  # type: ignore[arg-type]
    return study.run(app_of(network()), clients_of(4), cohort=2, rounds=2, settings=settings)


def test_a_method_has_work_of_its_own_and_a_changed_work_is_another_point(tmp_path: Path) -> None:
    statistics = {"statistics": [{"name": "steps", "bound": 10**6}]}

    def steps(**methods: Method) -> dict[str, list[float]]:
        result = run(Study(folder=tmp_path / "study", methods={"all": {}, **methods}), plan=PLAN | statistics)
        assert not result.failures
        return {point.method: list(point.table["statistics.steps"])[1:] for point in result.points}

    one, two = (Method(work=ClientWork(steps=[num] * 4)) for num in (1, 2))
    first, second = steps(short=one), steps(short=two)
    assert first["short"] == [2, 2] and second["short"] == [4, 4]
    assert min(first["all"]) > 4 and first["all"] == second["all"]
    assert len(list((tmp_path / "study" / "points").iterdir())) == 3


def test_the_quality_for_each_client_is_in_the_row_of_the_last_round(tmp_path: Path) -> None:
    train, test = clients_of(4).split(0.25)
    settings = SimulationSettings(plan=PLAN, client_test=test, fine_tune=FineTuning(epochs=1), quiet=True)
    study = Study(folder=tmp_path / "study", grid={"training.learning_rate": (0.01, 0.1)})
    result = study.run(app_of(network()), train, cohort=2, rounds=2, settings=settings)
    assert not result.failures
    best = result.best("per_client.mean.personal.accuracy")["study"]
    (point,) = best.points
    assert point.last("per_client.worst_decile.personal.accuracy") <= point.last("per_client.mean.personal.accuracy")
    assert result.best("per_client.mean.personal.loss")["study"].mean("per_client.mean.personal.loss") == min(
        each.last("per_client.mean.personal.loss") for each in result.points
    )


def point(method: str, rate: float, seed: int, losses: list[float], data: str = "") -> StudyPoint:
    size = len(losses)
    table: dict[str, list[float]] = {
        "round": list(range(size)),
        "seed": [seed] * size,
        "test_loss": losses,
        "bytes_up": [1.0] * size,
    }
    table |= {"metrics.noisy.nll": losses, "metrics.own": losses}
    return StudyPoint(data=data, method=method, values={"rate": rate}, seed=seed, plan_sha256="", table=table)


def result_of(*points: StudyPoint, **directions: bool) -> StudyResult:
    return StudyResult(points=points, is_complete=True, directions=directions)


SLOW_AND_FAST = result_of(
    point("a", 0.1, 0, [3.0, 2.0, 1.0, 0.2]),
    point("a", 0.1, 1, [3.0, 2.0, 1.5, 0.2]),
    point("a", 0.9, 0, [3.0, 1.0, 1.0, 0.9]),
    point("a", 0.9, 1, [3.0, 1.0, 1.0, 0.9]),
    point("b", 0.1, 0, [3.0, 2.0, 2.0, 2.0]),
    point("b", 0.1, 1, [3.0, 0.5, 2.0, 2.0]),
    StudyPoint(method="c", values={"rate": 0.1}, seed=0, plan_sha256="", error="no such graph"),
)


def test_the_best_rate_may_be_that_with_the_fewest_rounds_to_a_target() -> None:
    assert SLOW_AND_FAST.best("test_loss")["a"].values == {"rate": 0.1}
    assert SLOW_AND_FAST.best("test_loss", target=1.0)["a"].values == {"rate": 0.9}


def test_a_seed_that_never_reaches_the_target_is_in_the_table(tmp_path: Path) -> None:
    first, second = SLOW_AND_FAST.rounds_to("test_loss", 1.0)
    assert (first.curve.method, first.rounds, first.median, first.mean) == ("a", (1, 1), 1, 1)
    assert (second.curve.method, second.rounds, second.num_reached) == ("b", (math.inf, 1), 1)
    assert second.median == second.mean == math.inf
    assert [str(first), str(second)] == ["median 1, mean 1 (2 of 2 seeds)", "not reached (1 of 2 seeds)"]
    SLOW_AND_FAST.write_csv(tmp_path / "table.csv", target=("test_loss", 1.0))
    with (tmp_path / "table.csv").open() as file:
        assert [row["rounds_to"] for row in csv.DictReader(file)] == ["2", "3", "1", "1", "never", "1", ""]


def test_the_better_direction_is_that_of_the_column_and_is_never_a_guess() -> None:
    for column in ("test_loss", "metrics.noisy.nll"):
        assert SLOW_AND_FAST.best(column)["a"].values == {"rate": 0.1}
    for column in ("bytes_up", "metrics.own"):
        with pytest.raises(InvalidInput, match="FN-1888"):
            SLOW_AND_FAST.best(column)
    own = result_of(*SLOW_AND_FAST.points, own=True)
    assert own.best("metrics.own")["a"].values == {"rate": 0.9}
    assert SLOW_AND_FAST.best("metrics.own", higher_is_better=False)["a"].values == {"rate": 0.1}


def test_each_data_set_has_best_values_and_axes_of_its_own() -> None:
    both = result_of(
        point("a", 0.1, 0, [3.0, 1.0], "iid"),
        point("a", 0.9, 0, [3.0, 2.0], "iid"),
        point("a", 0.1, 0, [3.0, 2.5], "skewed"),
        point("a", 0.9, 0, [3.0, 1.5], "skewed"),
    )
    with pytest.raises(InvalidInput, match="FN-1889"):
        both.best("test_loss")
    with pytest.raises(InvalidInput, match="FN-1889"):
        both.of("other")
    assert [both.of(data).best("test_loss")["a"].values["rate"] for data in both.data] == [0.1, 0.9]
    assert [row.curve.data for row in both.rounds_to("test_loss", 2.0)] == ["iid", "skewed"]
    pytest.importorskip("matplotlib")
    figure = both.plot(None, "test_loss")
    assert [axes.get_title() for axes in figure.axes] == ["iid", "skewed"]
    assert [np.asarray(axes.lines[0].get_ydata())[-1] for axes in figure.axes] == [1.0, 1.5]


@pytest.mark.nightly
def test_a_study_has_several_data_sets_each_with_test_data(tmp_path: Path) -> None:
    test = load_data("digits").test
    sets = {"few": StudyData(clients=clients_of(3), test=test), "many": clients_of(6)}
    study = Study(folder=tmp_path / "study")
    result = study.run(app_of(network()), sets, cohort=2, rounds=1, settings=SimulationSettings(plan=PLAN, quiet=True))
    assert not result.failures and result.data == ("few", "many")
    few, many = (result.of(data).points[0] for data in result.data)
    assert math.isfinite(few.last("test_loss")) and math.isnan(many.last("test_loss"))


SCAFFOLD = {"stages": [{"name": "scaffold", "options": {"num_devices": 4}}]}


@pytest.mark.parametrize(
    ("keys", "code"),
    [({"training.proximal_weight": 0.1}, "FN-0266"), (SCAFFOLD, "FN-0266"), ({"codec.name": "no"}, "FN-0210")],
)
def test_a_plan_that_the_app_cannot_carry_out_is_refused_before_the_first_point(
    tmp_path: Path, keys: dict[str, object], code: str
) -> None:
    study = Study(folder=tmp_path, methods={"FedAvg": {}, "FedProx, mu = 0.1": keys}, grid={"training.epochs": (1, 2)})
    with pytest.raises(InvalidPlan, match=r"^study: FedProx, mu = 0\.1, training\.epochs 1: ") as caught:
        run(study)
    assert caught.value.code == code
    assert not list((tmp_path / "points").iterdir()) and not (tmp_path / "app-0").exists()


def test_one_app_with_control_inputs_serves_fedavg_and_scaffold(tmp_path: Path) -> None:
    """FedAvg with zeros in the control inputs has the values of an App without them."""
    app = replace(app_of(network()), recipe=Recipe(optimizer=Sgd(momentum=0.0), scaffold=True))
    settings = SimulationSettings(plan=PLAN, quiet=True, test=load_data("digits").test)
    study = Study(folder=tmp_path, methods={"FedAvg": {}, "plain": Method(app=app_of(network())), "SCAFFOLD": SCAFFOLD})
    result = study.run(app, clients_of(4), cohort=2, rounds=3, settings=settings)
    assert not result.failures
    fedavg, plain, scaffold = (point.table["test_loss"] for point in result.points)
    assert fedavg == pytest.approx(plain, rel=1e-6) and fedavg[-1] < fedavg[0]
    assert abs(scaffold[-1] - fedavg[-1]) > 1e-4


def test_ctrl_c_in_a_point_keeps_the_points_before_it_and_a_second_call_goes_on(tmp_path: Path) -> None:
    study, num_rows = Study(folder=tmp_path, seeds=(0, 1)), 0

    def interrupt(_row: object) -> None:
        nonlocal num_rows
        num_rows += 1
        if num_rows > 3:
            raise KeyboardInterrupt

    stopped = run(study, on_round=interrupt)
    assert not stopped.is_complete and [point.seed for point in stopped.points] == [0]
    result = run(study)
    assert result.is_complete and [point.seed for point in result.points] == [0, 1]
    assert result.points[0].seconds == stopped.points[0].seconds


def test_the_name_of_a_method_is_any_line_of_text(tmp_path: Path) -> None:
    Study(folder=tmp_path, methods={"FedProx, μ = 0": {}})
    for name in ("", "two\nlines", "m" * 129):
        with pytest.raises(InvalidInput, match="FN-1403"):
            Study(folder=tmp_path, methods={name: {}})


def test_wrong_arguments_of_a_study_are_one_error_that_names_them(tmp_path: Path) -> None:
    for seeds in ("01", 3, (True,), (0.0,), (-1,), range(0), {0: 1}):
        with pytest.raises(InvalidInput, match=r"^study: "):
            Study(folder=tmp_path, seeds=seeds)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="study: settings: plan: got None, expected keys of the Plan as a dict"):
        run(Study(folder=tmp_path), plan=None)

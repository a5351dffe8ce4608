"""``simulate``: an App on simulated clients, compared with FedAvg in eager torch, and wrong arguments."""

import csv
import json
import math
import pickle
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.digits_fedavg import NUM_CLIENTS, PLAN, app_of, clients_of, federated_average, network
from support.errors import raises
from torch import nn

from fanin.clients.data.examples import Examples
from fanin.clients.planfile import parse_plan
from fanin.edge.export import App, squared_error
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.simulation import (
    ClientFailed,
    DeviceModel,
    Dirichlet,
    Iid,
    OnOff,
    Pareto,
    Result,
    RoundRow,
    SimulationSettings,
    load_data,
    partition,
    plot_results,
    simulate,
)


@pytest.fixture(scope="module")
def simulation() -> tuple[Result, list[RoundRow]]:
    rows: list[RoundRow] = []
    plan = PLAN | {"evaluation.metrics": [{"name": "balanced_accuracy"}]}
    settings = SimulationSettings(test=load_data("digits").test, plan=plan, seed=4, on_round=rows.append)
    return simulate(app_of(network()), clients_of(), cohort=NUM_CLIENTS, rounds=2, settings=settings), rows


def test_a_simulation_is_the_fedavg_of_eager_torch(simulation: tuple[Result, list[RoundRow]]) -> None:
    result, _ = simulation
    expected = network()
    for round_number in (1, 2):
        expected = federated_average(expected, 4, round_number)
    ours, theirs = result.module.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert float((ours[name] - value).abs().max()) < 1e-5, name


def test_the_rows_describe_the_rounds(simulation: tuple[Result, list[RoundRow]]) -> None:
    result, rows = simulation
    assert result.is_complete
    assert tuple(rows) == result.rounds
    assert [row.round for row in rows] == [0, 1, 2]
    assert len(result.digests) == 3
    assert math.isnan(rows[0].train_loss)
    assert rows[0].num_clients == 0
    assert rows[2].num_clients == NUM_CLIENTS
    assert rows[2].test_loss < rows[0].test_loss
    assert 0 < rows[1].time_s < rows[2].time_s
    test = load_data("digits").test
    with torch.no_grad():
        outputs = result.module(torch.from_numpy(test.inputs["x"]))
    accuracy = float((outputs.argmax(1).numpy() == test.y).mean())
    assert abs(rows[2].test_accuracy - accuracy) < 1.5 / len(test)
    recalls = [float((outputs.argmax(1).numpy() == label)[test.y == label].mean()) for label in range(10)]
    assert abs(rows[2].metrics["balanced_accuracy"] - np.mean(recalls)) < 0.02
    assert result.columns()["metrics.balanced_accuracy_int8"] == [row.metrics["balanced_accuracy_int8"] for row in rows]
    loss = float(nn.functional.cross_entropy(outputs, torch.from_numpy(test.y).long()))
    assert abs(rows[2].test_loss - loss) < 1e-4
    clients = [row for row in result.clients if row.round == 2]
    assert [row.client for row in clients] == list(range(NUM_CLIENTS))
    assert sum(row.num_examples for row in clients) == rows[2].num_examples
    mean_loss = sum(row.num_examples * row.train_loss for row in clients) / rows[2].num_examples
    assert abs(mean_loss - rows[2].train_loss) < 1e-3
    assert all(0.0 <= row.validation_accuracy <= 1.0 for row in clients)


def test_the_event_log_has_each_client_and_round(simulation: tuple[Result, list[RoundRow]], tmp_path: Path) -> None:
    result, _ = simulation
    for number in (1, 2):
        clients = {event.client for event in result.events if (event.event, event.round) == ("accepted", number)}
        assert clients == set(range(NUM_CLIENTS))
    assert (result.events[0].event, result.events[0].detail) == ("engine", result.engine)
    assert [event.round for event in result.events if event.event == "version published"] == [1, 2]
    assert [event.time_s for event in result.events] == sorted(event.time_s for event in result.events)
    result.write_events(tmp_path / "events.jsonl")
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == [event.event for event in result.events]


@pytest.mark.nightly
def test_the_same_seed_replays_slow_devices_that_leave() -> None:
    devices = DeviceModel(
        examples_per_s=Pareto(least=5.0, alpha=1.0), availability=OnOff(on_s=60.0, off_s=20.0), dropout=0.2
    )
    settings = SimulationSettings(plan=PLAN, seed=3, devices=devices)
    first, second = (simulate(app_of(network()), clients_of(), cohort=4, rounds=4, settings=settings) for _ in range(2))
    assert first.events == second.events
    assert first.digests == second.digests
    assert {"offline", "gave up"} <= {event.event for event in first.events}
    # A client that drops out is not a failed training.
    assert first.failures == ()


def test_a_result_can_be_pickled(simulation: tuple[Result, list[RoundRow]]) -> None:
    result, _ = simulation
    restored_result = pickle.loads(pickle.dumps(result))
    assert restored_result.rounds[1:] == result.rounds[1:]
    assert restored_result.digests == result.digests
    ours, theirs = result.module.state_dict(), restored_result.module.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_a_result_is_written_and_drawn(simulation: tuple[Result, list[RoundRow]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result, rows = simulation
    result.write_csv(tmp_path / "rounds.csv")
    result.write_clients_csv(tmp_path / "clients.csv")
    with (tmp_path / "rounds.csv").open() as file:
        assert [float(row["test_loss"]) for row in csv.DictReader(file)] == [row.test_loss for row in rows]
    with (tmp_path / "clients.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * NUM_CLIENTS
    assert result.columns()["version"] == [0, 1, 2]
    figure = result.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
    left, right = figure.axes  # type: ignore[attr-defined]
    assert left.lines[1].get_ydata().tolist() == [row.test_loss for row in rows]
    assert right.lines[0].get_ydata().tolist() == [row.test_accuracy for row in rows]


def test_several_results_are_drawn_together(simulation: tuple[Result, list[RoundRow]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result, rows = simulation
    untested_result = replace(
        result, rounds=tuple(replace(row, test_accuracy=math.nan, test_loss=math.nan) for row in result.rounds)
    )
    figure = plot_results({"one": result, "two": result}, tmp_path / "both.svg")
    (axes,) = figure.axes  # type: ignore[attr-defined]
    assert [line.get_label() for line in axes.lines] == ["one", "two"]
    assert axes.lines[1].get_ydata().tolist() == [row.test_accuracy for row in rows]
    (axes,) = plot_results({"one": result, "two": untested_result}).axes  # type: ignore[attr-defined]
    assert axes.get_ylabel() == "train loss"
    with raises(InvalidInput, "plot: got no results, expected at least one"):
        plot_results({})


@pytest.mark.nightly
def test_each_nth_version_is_evaluated_on_the_test_examples() -> None:
    x = np.ones((12, 3), np.float32)
    app = App(name="values", module=nn.Linear(3, 1), calibration=torch.ones(4, 3), batch_size=2, loss=squared_error)
    clients = partition(Examples(inputs={"x": x}, y=np.ones((12, 1), np.float32)), 2, Iid())
    plan = {
        "training.learning_rate": 0.1,
        "evaluation.data": "registered-elsewhere",
        "evaluation.every": 2,
        "evaluation.metrics": [{"name": "absolute_error"}],
    }
    settings = SimulationSettings(test=clients.examples, plan=plan, quiet=True)
    result = simulate(app, clients, cohort=2, rounds=3, settings=settings)
    columns = result.columns()
    for name in ("test_loss", "metrics.absolute_error", "metrics.absolute_error_int8"):
        assert [bool(np.isfinite(value)) for value in columns[name]] == [True, False, True, False]
    pytest.importorskip("matplotlib")
    (axes,) = plot_results({"one": result}).axes  # type: ignore[attr-defined]
    assert axes.get_ylabel() == "test loss"
    assert axes.lines[0].get_xdata().tolist() == [0, 2]
    with torch.no_grad():
        errors = result.module(torch.from_numpy(x)).numpy() - clients.examples.y
    # These are errors of the last Version. They are smaller than those of the last evaluated Version.
    assert np.abs(errors).mean() < columns["metrics.absolute_error"][2] < columns["metrics.absolute_error"][0]


@pytest.mark.nightly
def test_two_processes_end_in_the_versions_of_one(simulation: tuple[Result, list[RoundRow]]) -> None:
    result, _ = simulation
    settings = SimulationSettings(plan=PLAN, seed=4, processes=2)
    parallel_result = simulate(app_of(network()), clients_of(), cohort=NUM_CLIENTS, rounds=2, settings=settings)
    assert parallel_result.digests == result.digests
    # Without test data there are no test columns, and the training is the same.
    assert all(math.isnan(row.test_loss) for row in parallel_result.rounds)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("num_clients", "cohort", "rounds", "floor"),
    [(10, 8, 3, 0.4), (40, 20, 15, 0.7)],
)
def test_vmap_is_within_half_a_point_of_the_graph(num_clients: int, cohort: int, rounds: int, floor: float) -> None:
    data = load_data("digits")
    clients = partition(data.train, num_clients, Dirichlet(alpha=0.3), seed=2)
    accuracies = {}
    for engine in ("graph", "vmap"):
        settings = SimulationSettings(test=data.test, plan=PLAN, seed=4, engine=engine)
        result = simulate(app_of(network()), clients, cohort=cohort, rounds=rounds, settings=settings)
        assert result.events[0].detail == result.engine == engine
        accuracies[engine] = result.rounds[-1].test_accuracy
    assert accuracies["graph"] > floor
    assert abs(accuracies["graph"] - accuracies["vmap"]) <= 0.005


def test_ctrl_c_keeps_the_rounds_that_have_ended() -> None:
    def interrupt(row: RoundRow) -> None:
        if row.round == 2:
            signal.raise_signal(signal.SIGINT)

    settings = SimulationSettings(plan=PLAN, on_round=interrupt)
    result = simulate(app_of(network()), clients_of(), cohort=2, rounds=50, settings=settings)
    assert not result.is_complete
    assert [row.round for row in result.rounds] == [0, 1, 2]
    assert len(result.digests) == 3
    assert np.isfinite(result.parameters).all()


@pytest.mark.nightly
def test_raw_examples_are_preprocessed_for_clients_and_test() -> None:
    class Scaled(nn.Module):
        def forward(self, raw: torch.Tensor) -> torch.Tensor:
            return raw.to(torch.float32) / 16.0

    data = load_data("digits")
    raw, raw_test = (
        Examples(inputs={"x": np.rint(part.inputs["x"] * 16).astype(np.uint8)}, y=part.y)
        for part in (data.train, data.test)
    )
    app = replace(app_of(network()), preprocess=Scaled(), raw=torch.from_numpy(raw.inputs["x"][:16]))
    clients = partition(raw, NUM_CLIENTS, Dirichlet(alpha=0.5), seed=2)
    settings = SimulationSettings(test=raw_test, plan=PLAN, seed=4)
    result = simulate(app, clients, cohort=NUM_CLIENTS, rounds=2, settings=settings)
    scaled_result = simulate(
        app_of(network()),
        clients_of(),
        cohort=NUM_CLIENTS,
        rounds=2,
        settings=SimulationSettings(test=data.test, plan=PLAN, seed=4),
    )
    assert abs(result.rounds[2].test_loss - scaled_result.rounds[2].test_loss) < 1e-3


def test_a_module_is_no_app() -> None:
    error = (
        "simulate: got Sequential and Partition, expected an App and a Partition, or a Flower app and a number of "
        "clients; see fanin.edge.export.App and fanin.simulation.partition"
    )
    with raises(InvalidInput, error):
        simulate(network(), clients_of(), cohort=2, rounds=1)  # type: ignore[arg-type]


FAILURE = r"client \d in round 1: training: loss became nan after \d steps, expected a finite one; lower .* \(1e\+30\)"


@pytest.mark.nightly
def test_a_client_that_fails_is_named_and_ends_the_simulation_on_request() -> None:
    settings = SimulationSettings(plan=PLAN | {"training.learning_rate": 1e30})
    with pytest.raises(ClientFailed, match=f"^simulate: the first trainings of 6 clients failed, .*; {FAILURE}"):
        simulate(app_of(network()), clients_of(), cohort=2, rounds=2, settings=settings)
    with pytest.raises(ClientFailed, match=f"^simulate: {FAILURE}"):
        settings = replace(settings, stop_on_failure=True)
        simulate(app_of(network()), clients_of(), cohort=2, rounds=2, settings=settings)


FULL_PLAN = parse_plan('bundle = "b"\ncohort = {concurrency = 2}\ntraining = {learning_rate = 0.1}\n', "plan").plan


@pytest.mark.parametrize(
    ("arguments", "settings", "kind", "error"),
    [
        (
            {"cohort": 7, "rounds": 1},
            SimulationSettings(plan=PLAN),
            InvalidInput,
            "simulate: got a cohort of 7, expected at most the 6 clients",
        ),
        (
            {"cohort": 2},
            SimulationSettings(plan=PLAN),
            InvalidInput,
            "simulate: got no cohort or no rounds, expected both; pass them, or set plan to a Plan that has them",
        ),
        (
            {"cohort": 2, "rounds": 1},
            SimulationSettings(plan=FULL_PLAN),
            InvalidInput,
            "simulate: got a Plan and cohort or rounds, expected them in the Plan alone; remove the arguments",
        ),
        (
            {"cohort": 2, "rounds": 1},
            SimulationSettings(
                plan=PLAN, test=Examples(inputs={"x": np.zeros((4, 64), np.float32)}, y=np.zeros(4, np.int32))
            ),
            InvalidInput,
            "simulate: test: got x of shape (64,), expected (1, 8, 8)",
        ),
        (
            {"cohort": 2, "rounds": 1},
            SimulationSettings(
                plan=PLAN, test=Examples(inputs={"x": np.zeros((4, 1, 8, 8), np.int32)}, y=np.zeros(4, np.int32))
            ),
            InvalidInput,
            (
                "simulate: test: got x int32, expected float32 as in the App's calibration or raw data; write x = "
                "x.astype(np.float32)"
            ),
        ),
        (
            {"cohort": 2, "rounds": 1},
            SimulationSettings(plan=PLAN, validation_fraction=1.0),
            InvalidInput,
            (
                "simulate: got a validation fraction of 1, expected at least 0 and less than 1: the share of its "
                "examples on which each client evaluates the Versions"
            ),
        ),
        (
            {"cohort": 2, "rounds": 1},
            SimulationSettings(plan=PLAN, processes=0),
            InvalidInput,
            "simulate: got 0 processes, expected at least 1",
        ),
        (
            {"cohort": 2, "rounds": 1},
            SimulationSettings(plan=PLAN, seed=-1),
            InvalidInput,
            "simulate: got seed -1, expected an integer of 0 or more",
        ),
        (
            {"cohort": 2, "rounds": 1},
            SimulationSettings(plan={"training.learning_rat": 0.1}),
            InvalidPlan,
            (
                "simulate: plan: training.learning_rat: unknown key, expected one of epochs, learning_rate, seed, "
                "proximal_weight, batch_size, optimizer, warmup_steps, step_decay, decay_steps, decay_factor, "
                "schedule_rounds, min_work, personal_epochs, ditto_weight; did you mean training.learning_rate?"
            ),
        ),
    ],
)
def test_a_wrong_argument_is_one_error_before_the_export(
    arguments: dict[str, int], settings: SimulationSettings, kind: type[Exception], error: str
) -> None:
    with raises(kind, error):
        simulate(app_of(network()), clients_of(), **arguments, settings=settings)

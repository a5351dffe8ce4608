"""A simulation that ends before its last Round keeps its Rounds; and its best Version is that of the Plan's metric."""

import math
import random
from collections.abc import Mapping
from itertools import count

import pytest
import torch
from support.errors import raises
from torch import nn

from fanin.edge.export import App
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.simulation import (
    DeviceModel,
    Fixed,
    Iid,
    Result,
    RoundRow,
    RunStopped,
    SimulationSettings,
    Trace,
    load_data,
    partition,
    simulate,
)


def digits_app() -> App:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    images = torch.from_numpy(load_data("digits").train.inputs["x"][:64])
    return App(name="digits", module=module, calibration=images, batch_size=8, num_classes=10)


def run(rounds: int, plan: Mapping[str, object] | None = None, **settings: object) -> Result:
    """Simulate four clients, two in each Round."""
    every = SimulationSettings(plan={"training.learning_rate": 0.05, **(plan or {})}, **settings)
    return simulate(
        digits_app(), partition(load_data("digits").train, 4, Iid()), cohort=2, rounds=rounds, settings=every
    )


def test_a_run_whose_clients_never_come_back_keeps_its_rounds() -> None:
    # A training takes 1 s, so one Round ends before the clients leave.
    gone = Trace(changes=((0.0, True), (1.5, False)))
    with pytest.raises(RunStopped, match="FN-1188") as excinfo:
        run(4, devices=DeviceModel(availability=gone))
    result = excinfo.value.result
    assert not result.is_complete
    assert [row.round for row in result.rounds] == [0, 1]
    assert len(result.digests) == 2 and result.parameters.any()


def test_an_error_in_a_function_of_the_settings_keeps_the_rounds_before_it() -> None:
    calls = count()

    def metric(predictions: object, targets: object) -> float:
        # It is computed in float and in int8.
        return 0.5 if next(calls) < 4 else math.nan

    with pytest.raises(RunStopped, match="FN-0390") as excinfo:
        run(4, test=load_data("digits").test, metrics={"own": metric})
    assert [row.round for row in excinfo.value.result.rounds] == [0, 1]

    def track(row: RoundRow) -> None:
        if row.seed == 1 and row.round == 1:
            raise KeyError("tracker")

    with pytest.raises(RunStopped, match="FN-1189") as excinfo:
        run(2, on_round=track, seeds=(0, 1))
    assert isinstance(excinfo.value.__cause__, KeyError)
    assert [[row.round for row in each.rounds] for each in excinfo.value.result.repeats] == [[0, 1, 2], [0, 1]]


def test_the_best_version_is_that_of_the_plans_metric() -> None:
    calls = count()
    test = load_data("digits").test
    result = run(
        2,
        {"evaluation.best": "earliness"},
        test=test,
        metrics={"earliness": lambda predictions, targets: -float(next(calls))},
    )
    assert result.best is not None
    assert result.best.row.round == 0
    assert result.rounds[2].test_accuracy > result.rounds[0].test_accuracy
    lowest_loss = run(2, test=test)
    assert lowest_loss.best is not None
    assert lowest_loss.best.row == min(lowest_loss.rounds, key=lambda row: row.test_loss)


def test_a_best_version_by_an_unknown_metric_is_refused() -> None:
    names = ["accuracy", "accuracy_int8", "int8_agreement", "loss"]
    with raises(InvalidPlan, f"plan: evaluation.best: got 'nonsense', expected one of {names}"):
        run(1, {"evaluation.best": "nonsense"}, test=load_data("digits").test)


def test_a_number_is_the_speed_of_all_devices() -> None:
    for speed in (20, 20.0, Fixed(value=20.0)):
        assert DeviceModel(examples_per_s=speed).habits(0, 60, seed=1).work(random.Random(0), 2) == 6.0


@pytest.mark.parametrize("name", ["examples_per_s", "bytes_down_per_s", "bytes_up_per_s"])
@pytest.mark.parametrize("value", ["x", True, [1.0]])
def test_what_is_neither_a_number_nor_a_distribution_is_refused(name: str, value: object) -> None:
    error = (
        f"devices: {name}: got {value!r}, expected a number above 0, or a distribution such as "
        "Lognormal(median=50.0, sigma=1.0)"
    )
    with raises(InvalidInput, error):
        DeviceModel(**{name: value})


@pytest.mark.parametrize("value", [0, -3.0, float("nan")])
def test_a_speed_that_is_not_above_zero_is_refused(value: float) -> None:
    with pytest.raises(InvalidInput):
        DeviceModel(examples_per_s=value)


def test_other_parts_of_a_device_model_are_checked() -> None:
    with pytest.raises(InvalidInput, match="FN-1153"):
        DeviceModel(availability="x")
    with raises(InvalidInput, "devices: battery: got 5, expected Battery(work_s=..., charge_s=...)"):
        DeviceModel(battery=5)
    settings = SimulationSettings(plan={"training.learning_rate": 0.05}, devices="devices.toml")
    with raises(
        InvalidInput, "simulate: devices: got str, expected DeviceModel; read_devices(path) reads one from a file"
    ):
        simulate(digits_app(), partition(load_data("digits").train, 4, Iid()), cohort=2, rounds=1, settings=settings)

"""Models of simulated devices: their random draws, their files, and Runs of such devices. Without torch."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.errors import raises
from support.scenarios import CALM, PATIENT_S, SHAPES, bundle_in
from support.virtual import PUBLISHER, plan

from fanin.clients.device.contract import example_assignment, example_model
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.clients.flower.initial import read_initial
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput
from fanin.simulation import (
    Battery,
    ClientFailure,
    DailyWindow,
    DeviceModel,
    Federation,
    Fixed,
    Habits,
    Lognormal,
    Member,
    OnOff,
    Pareto,
    Rate,
    Scenario,
    SyntheticTrainer,
    Trace,
    Uniform,
    load_data,
    play,
    read_devices,
    read_traces,
    run_virtual,
    synthetic_bundle,
)
from fanin.simulation.devices.availability import Charge, Stay
from fanin.simulation.federation.observed import DeviceEvent
from fanin.simulation.trainers import ClientRuntime, ClientTrainer, Crew, SimulationEnded
from fanin.simulation.workers import PendingTraining

HOUR_S = 3600.0


def first_stays(pattern: DailyWindow | OnOff | Trace, num: int, seed: int = 0) -> list[Stay]:
    stays = pattern.stays(random.Random(seed))
    return [stay for _, stay in zip(range(num), stays, strict=False)]


def test_a_daily_window_opens_once_a_day() -> None:
    day = 24 * HOUR_S
    assert first_stays(DailyWindow(from_hour=8.0, hours=2.0), 2) == [(0.0, 8 * HOUR_S), (2 * HOUR_S, 22 * HOUR_S)]
    # The window is from 22 to 6 o'clock, so it is open at midnight.
    night = first_stays(DailyWindow(from_hour=22.0, hours=8.0), 2)
    assert night == [(6 * HOUR_S, 16 * HOUR_S), (8 * HOUR_S, 16 * HOUR_S)]
    assert first_stays(DailyWindow(from_hour=0.0, hours=24.0), 2) == [(None, None)]
    assert all(stay + away == day for stay, away in night[1:] if stay is not None and away is not None)


def test_a_device_that_comes_and_goes_has_its_mean_times() -> None:
    stays = first_stays(OnOff(on_s=100.0, off_s=300.0), 4000)[1:]
    on, off = (sum(each or 0.0 for each in column) / len(stays) for column in zip(*stays, strict=True))
    assert 95.0 < on < 105.0 and 285.0 < off < 315.0
    begins = sum(first_stays(OnOff(on_s=100.0, off_s=300.0), 1, seed)[0][0] == 0.0 for seed in range(400))
    assert 260 < begins < 340


def test_a_trace_is_followed() -> None:
    trace = Trace(changes=((0.0, True), (10.0, False), (30.0, True), (40.0, True), (50.0, False)))
    assert first_stays(trace, 9) == [(0.0, 0.0), (10.0, 20.0), (20.0, None)]
    assert first_stays(Trace(changes=((5.0, True),)), 9) == [(0.0, 5.0), (None, None)]


def test_a_battery_is_drained_by_training_and_charges_between() -> None:
    charge = Charge(Battery(work_s=10.0, charge_s=100.0))
    assert charge.begin(0.0, 6.0) is None
    assert charge.begin(6.0, 6.0) == 4.0  # empty at 10 s
    assert charge.begin(60.0, 5.0) is None  # 50 s of charging allow 5 s of training
    assert charge.begin(65.0, 1.0) == 0.0


def test_a_training_that_the_end_of_a_stay_cuts_off_drains_a_battery_until_then() -> None:
    charge = Charge(Battery(work_s=10.0, charge_s=1e6))
    assert charge.begin(0.0, 8.0, leaves_s=3.0) is None
    assert charge.begin(3.0, 20.0, leaves_s=9.0) is None
    assert charge.begin(9.0, 8.0, leaves_s=17.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "distribution",
    [Fixed(value=2.0), Uniform(low=1.0, high=3.0), Lognormal(median=2.0, sigma=0.5), Pareto(least=1.0, alpha=1.0)],
)
def test_half_of_the_devices_are_below_the_median(distribution: Fixed | Uniform | Lognormal | Pareto) -> None:
    rng = random.Random(1)
    draws = sorted(distribution.draw(rng) for _ in range(2001))
    assert 1.85 < draws[1000] < 2.15
    assert draws[0] > 0.0


def test_the_same_seed_gives_the_same_habits() -> None:
    model = DeviceModel(examples_per_s=Pareto(least=10.0, alpha=1.5), bytes_up_per_s=Uniform(low=1.0, high=2.0))
    assert model.habits(3, 100, 7) == model.habits(3, 100, 7)
    assert model.habits(3, 100, 7) != model.habits(3, 100, 8)
    # More examples need more time on the same device, and have no other effect.
    assert model.habits(3, 200, 7) == replace(model.habits(3, 100, 7), epoch_examples=200)


FILE = """
examples_per_s = { name = "lognormal", median = 50.0, sigma = 1.0 }
bytes_up_per_s = 1e6
dropout = 0.05
traces = "trace.csv"
battery = { work_s = 1800.0, charge_s = 7200.0 }
"""


def test_a_model_is_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "devices.toml").write_text(FILE)
    (tmp_path / "trace.csv").write_text("client,time,state\n10,0,on\n2,5.5,on\n2,9,off\n")
    model = read_devices(tmp_path / "devices.toml")
    assert model.examples_per_s == Lognormal(median=50.0, sigma=1.0)
    assert model.bytes_up_per_s == Fixed(value=1e6)
    assert model.battery == Battery(work_s=1800.0, charge_s=7200.0)
    assert model.habits(0, 10, 0).availability == Trace(changes=((5.5, True), (9.0, False)))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("speed = 1", "got the keys ['speed'], expected only examples_per_s, bytes_down_per_s, bytes_up_per_s"),
        ("examples_per_s = 'fast'", "examples_per_s: got 'fast', expected a number or a table with a name of fixed,"),
        (
            "examples_per_s = { name = 'pareto', least = 1.0 }",
            "examples_per_s: got {'least': 1.0} without alpha, expected numbers for least, alpha",
        ),
        ("examples_per_s = { name = ['pareto'] }", "examples_per_s: got {'name': ['pareto']}, expected a number or"),
        ("examples_per_s = { name = 'pareto', beta = 1.0 }", "examples_per_s: got {'beta': 1.0}, expected numbers for"),
        (
            "availability = { name = 'weekly' }",
            "availability: got {'name': 'weekly'}, expected a table with a name of daily_window, on_off and its",
        ),
        (
            "availability = 'trace.csv'",
            (
                "availability: got 'trace.csv', expected a table with a name of daily_window, on_off and its numbers; "
                'the key of recorded devices is traces = "FILE.csv"'
            ),
        ),
        ("availability = { name = ['on_off'] }", "availability: got {'name': ['on_off']}, expected a table"),
        ("availability = { name = 'on_off', on_s = 1, off_s = 0 }", "availability: got on_s 1, off_s 0, expected"),
        ("battery = 5", "battery: got 5, expected a table such as { work_s = 1800.0, charge_s = 7200.0 }"),
        ("battery = { work_s = 0, charge_s = 1 }", "battery: got work_s 0, charge_s 1, expected positive numbers"),
        ("dropout = true", "dropout: got True, expected a share from 0 to below 1"),
        ("dropout = 1.5", "dropout: got 1.5, expected a share from 0 to below 1"),
    ],
)
def test_a_wrong_key_raises_one_error(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput) as excinfo:
        read_devices(path)
    assert str(excinfo.value).startswith(f"{path}: {error}")


def test_a_missing_file_is_no_wrong_file(tmp_path: Path) -> None:
    with raises(InvalidInput, f"{tmp_path}/none.toml: cannot be read (No such file or directory)"):
        read_devices(tmp_path / "none.toml")
    with raises(InvalidInput, f"{tmp_path}/none.csv: cannot be read (No such file or directory)"):
        read_traces(tmp_path / "none.csv")
    with raises(InvalidInput, f"--initial: {tmp_path}/none.npz: cannot be read (No such file or directory)"):
        read_initial(str(tmp_path / "none.npz"), tmp_path)
    with raises(InvalidInput, f"{tmp_path}/none.csv: cannot be read (No such file or directory)"):
        load_data(str(tmp_path / "none.csv"))


def simulate_run(
    folder: Path, habits: Habits, num: int = 4, times_s: list[float] | None = None
) -> tuple[list[DeviceEvent], float]:
    """Return the events of a Run with these devices, and its virtual time. ``times_s`` receives those of the events."""
    events: list[DeviceEvent] = []
    bundle = synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES)

    def observe(event: DeviceEvent) -> None:
        events.append(event)
        if times_s is not None:
            times_s.append(asyncio.get_running_loop().time())

    async def run() -> float:
        async with Federation(seed=1, observe=observe) as federation:
            await federation.start_run("run", plan(deadline_s=PATIENT_S), bundle, PUBLISHER)
            for index in range(num):
                trainer = SyntheticTrainer(partition=index, num_examples=10)
                federation.join(Member(device=f"device-{index}", trainer=trainer, habits=habits), bundle)
            last = [entry async for entry in federation.watch("run")][-1]
            return last.time

    return events, run_virtual(run())


def test_a_device_reports_its_part_in_each_round(tmp_path: Path) -> None:
    events, _ = simulate_run(tmp_path, CALM)
    device_events = [(event.event, event.round) for event in events if event.device == "device-2"]
    assert device_events[:5] == [("assigned", 1), ("training", 1), ("trained", 1), ("uploading", 1), ("accepted", 1)]
    assert [event for event, number in device_events if number == 3][-1] == "accepted"


class Beginner(SyntheticTrainer):
    """A Trainer with a method of its own, whose name is that of an EarlyTrainer's."""

    def begin(self) -> None:
        raise AssertionError("called by this class only")


def test_a_trainer_may_have_a_method_begin_of_its_own(tmp_path: Path) -> None:
    members = tuple(Member(device=f"device-{index}", trainer=Beginner(partition=index)) for index in range(4))
    outcome = play(Scenario(plan=plan(), bundle=bundle_in(tmp_path), publisher=PUBLISHER, members=members), tmp_path)
    assert outcome.verdicts and not any(verdict.problem for verdict in outcome.verdicts)


def test_a_slow_connection_takes_longer(tmp_path: Path) -> None:
    steady = Habits(work_s=(1.0, 1.0))
    _, fast_s = simulate_run(tmp_path / "fast", steady)
    size_bytes = 4 * (40 * 100 + 7)
    slow = Habits(work_s=(1.0, 1.0), bytes_up_per_s=size_bytes / 20, bytes_down_per_s=size_bytes / 10)
    _, slow_s = simulate_run(tmp_path / "slow", slow)
    # Each of three Rounds has 20 s of upload and at least 10 s of download.
    assert slow_s - fast_s > 3 * 28.0


def test_a_device_whose_speed_changes_takes_the_time_of_each_speed(tmp_path: Path) -> None:
    size_bytes = 4 * (40 * 100 + 7)
    slow = Habits(work_s=(0.0, 0.0), epoch_examples=100, examples_per_s=1.0, bytes_up_per_s=size_bytes / 40)
    faster = replace(
        slow,
        examples_per_s=Rate(changes=((0.0, 1.0), (50.0, 10.0))),
        bytes_up_per_s=Rate(changes=((0.0, size_bytes / 40), (75.0, size_bytes / 4))),
    )
    _, slow_s = simulate_run(tmp_path / "slow", slow)
    _, faster_s = simulate_run(tmp_path / "faster", faster)
    assert 420.0 < slow_s < 423.0
    # Round 1 trains for 50 + 5 s, and sends for 20 + 2 s. Rounds 2 and 3 train for 10 s, and send for 4 s.
    assert 105.0 < faster_s < 108.0


@pytest.mark.parametrize("pattern", [Trace(changes=((0.0, True),)), DailyWindow(from_hour=0.0, hours=23.0)])
def test_a_device_that_is_present_from_the_beginning_does_not_leave_first(
    pattern: Trace | DailyWindow, tmp_path: Path
) -> None:
    events, _ = simulate_run(tmp_path, Habits(availability=pattern))
    assert next(event.event for event in events if event.device == "device-2") == "assigned"
    assert "offline" not in {event.event for event in events}


def test_devices_give_up_leave_and_charge(tmp_path: Path) -> None:
    habits = Habits(
        work_s=(50.0, 50.0),
        quit=0.3,
        availability=OnOff(on_s=400.0, off_s=100.0),
        battery=Battery(work_s=120.0, charge_s=600.0),
    )
    events, _ = simulate_run(tmp_path, habits)
    names = {event.event for event in events}
    assert {"gave up", "offline", "online", "battery empty", "accepted"} <= names
    assert {event.detail for event in events if event.event == "gave up"} == {"dropout"}
    repeated_events, _ = simulate_run(tmp_path / "again", habits)
    assert events == repeated_events


def test_a_device_whose_battery_is_empty_stays_away_until_it_is_full_also_over_an_absence(tmp_path: Path) -> None:
    battery = Battery(work_s=10.0, charge_s=1000.0)
    present = Trace(changes=((0.0, True), (100.0, False), (200.0, True), (300.0, False), (400.0, True)))
    times_s: list[float] = []
    events, _ = simulate_run(tmp_path, Habits(work_s=(8.0, 8.0), availability=present, battery=battery), 4, times_s)
    of_device = [(at_s, event.event) for at_s, event in zip(times_s, events, strict=True) if event.device == "device-2"]
    empty_s = next(at_s for at_s, event in of_device if event == "battery empty")
    next_s = next(at_s for at_s, event in of_device if event == "assigned" and at_s > empty_s)
    assert empty_s < 100.0 and {"offline", "online"} <= {event for _, event in of_device}
    assert empty_s + 1000.0 <= next_s < empty_s + 1010.0


def test_a_device_that_leaves_while_it_trains_keeps_the_rest_of_its_battery(tmp_path: Path) -> None:
    present = Trace(changes=((0.0, True), (5.0, False), (6.0, True)))
    habits = Habits(work_s=(8.0, 8.0), availability=present, battery=Battery(work_s=10.0, charge_s=1000.0))
    times_s: list[float] = []
    events, _ = simulate_run(tmp_path, habits, 4, times_s)
    names = [(event.device, event.event) for event in events]
    # It trains for 5 s until it leaves, and for the other 5 s when it is back.
    assert 10.0 < times_s[names.index(("device-2", "battery empty"))] < 12.0


class Failing:
    """Trainings that always raise an error."""

    def begin(self, client: int, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0) -> PendingTraining:
        def train() -> Change:
            raise KeyError("pixels")

        return train


def test_the_simulation_ends_if_no_client_can_train(tmp_path: Path) -> None:
    bundle = synthetic_bundle(tmp_path / "bundle", PUBLISHER, SHAPES)
    failures: list[ClientFailure] = []
    crew = Crew(
        trainings=Failing(),
        runtime=ClientRuntime(name="x", graph_format="onnx"),
        failures=failures,
        fail=failures.append,
        stops=False,
        num_failing=2,
    )
    model, assignment = example_model(bundle), example_assignment(bundle)

    def train(client: int) -> None:
        trainer = ClientTrainer(client, crew)
        trainer.begin(model, assignment)
        trainer.train(model, assignment, lambda: True)

    for _ in range(3):
        with pytest.raises(InvalidInput):
            train(7)
    with pytest.raises(
        SimulationEnded, match=r"^simulate: the first trainings of 2 clients failed, and none succeeded; "
    ):
        train(8)
    crew.has_trained = True
    with pytest.raises(InvalidInput):
        train(9)


@pytest.mark.parametrize("stops", [False, True])
def test_a_client_that_raises_is_recorded_with_its_traceback(tmp_path: Path, stops: bool) -> None:
    bundle = synthetic_bundle(tmp_path / "bundle", PUBLISHER, SHAPES)
    failures: list[ClientFailure] = []
    crew = Crew(
        trainings=Failing(),
        runtime=ClientRuntime(name="none", graph_format="onnx"),
        failures=failures,
        fail=failures.append,
        stops=stops,
        num_failing=2,
    )
    trainer, model, assignment = ClientTrainer(7, crew), example_model(bundle), example_assignment(bundle)
    trainer.begin(model, assignment)
    # The Round continues after InvalidInput, and ends after SimulationEnded.
    with pytest.raises(SimulationEnded if stops else InvalidInput):
        trainer.train(model, assignment, lambda: True)
    (failure,) = failures
    assert str(failure) == "client 7 in round 1: 'pixels'"
    assert 'raise KeyError("pixels")' in failure.traceback

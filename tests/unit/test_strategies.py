"""Flower strategies as the rule of a Round: results, state, errors, and what ``verify`` says of them."""

import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedMedian, FedTrimmedAvg
from support.commands import fanin_in_process
from support.flower_apps import NUMPY_APP, write_app
from support.strategies import (
    EXAMPLES,
    INITIAL,
    MODULE,
    TABLE,
    Place,
    begin,
    changes_in,
    events_of,
    open_strategies,
    strategy_plan,
    take_round,
    values_of,
    write_strategies,
)
from support.virtual import bundle_in, start

from fanin.clients import FlowerSettings
from fanin.commands.console.show import event_text
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import Adopt, Command, Pause, Resume, RoundFailed, RunRested, RunWarned, VersionPublished
from fanin.protos.plans import Plan
from fanin.server.aggregation.verify import verify_run
from fanin.server.strategies.process import Strategies
from fanin.server.strategies.records import prepare_flower
from fanin.simulation import RunStopped, SimulationSettings, simulate
from fanin.simulation.federation.clock import run_virtual

WRONG: Final = f"{MODULE}:ReturnsNone"
NOT_PURE: Final = "made the parameters, and the plan does not declare it pure"
TRAINED: Final = ("b", "w")


def played(folder: Path, run_plan: Plan, story: Callable[[Place], Awaitable[None]]) -> None:
    """Play a story with a Run of a strategy."""

    async def main() -> None:
        place = open_strategies(folder)
        try:
            await begin(place, folder, run_plan)
            await story(place)
        finally:
            await place.runs.stop()

    run_virtual(main())


def arrays_after(base: dict[str, np.ndarray], round_number: int) -> list[dict[str, np.ndarray]]:
    """Return the arrays of each device after its training in a Round, in the order of the devices."""
    changes = [TABLE.views(change) for change in changes_in(round_number)]
    return [{name: base[name] + change[name] for name in base} for change in changes]


@pytest.mark.parametrize("streams", [False, True])
def test_an_own_strategy_makes_each_version_and_keeps_its_state(tmp_path: Path, streams: bool) -> None:
    async def story(place: Place) -> None:
        expected = {name: value.copy() for name, value in INITIAL.items()}
        for number in (1, 2, 3):
            await take_round(place, number)
            replies = arrays_after(expected, number)
            for name in TRAINED:
                mean = sum(reply[name].astype(np.float64) for reply in replies) / len(replies)
                expected[name] = (mean + 0.25 * number).astype(np.float32)
            # A statistic gets the mean by examples under every rule.
            means = [count * reply["norm.running_mean"] for count, reply in zip(EXAMPLES, replies, strict=True)]
            expected["norm.running_mean"] = (sum(means) / sum(EXAMPLES)).astype(np.float32)
            values = await values_of(place)
            for name in TRAINED:
                assert np.array_equal(values[name], expected[name]), (number, name)
            assert np.allclose(values["norm.running_mean"], expected["norm.running_mean"], atol=1e-6)
            expected = {name: value.copy() for name, value in values.items()}
        events = await events_of(place, VersionPublished)
        assert [event.not_reproducible for event in events] == [True] * 3
        text = ", strategy: evaluate.acc 2, evaluate.round 1, train.replies 3, not reproducible"
        assert text in event_text(events[1])
        metrics = [dict(event.strategy_metrics) for event in events]
        assert metrics[0] == {"train.replies": 3.0}
        # The devices measure the Version before, as Flower's own loop does at the end of that round.
        assert metrics[1:] == [{"train.replies": 3.0, "evaluate.round": n, "evaluate.acc": 2.0} for n in (1.0, 2.0)]

    played(tmp_path, strategy_plan("Own", strategy_options={"step": 0.25}, strategy_streams=streams), story)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [(FedMedian, {}), (FedTrimmedAvg, {"beta": 0.34}), (FedAdam, {"eta": 0.1, "tau": 0.01})],
)
def test_a_strategy_of_flower_gets_the_bits_of_flower(
    tmp_path: Path, strategy: type[FedMedian], options: dict[str, float]
) -> None:
    prepare_flower()
    flower, expected = strategy(**options), {name: INITIAL[name] for name in ("w", "b")}

    class Nodes:
        def get_node_ids(self) -> list[int]:
            return [1, 2, 3]

    def reply(arrays: dict[str, np.ndarray], num_examples: int) -> Message:
        record = ArrayRecord({name: Array(value) for name, value in arrays.items()})
        content = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": num_examples, "gain": 0.25})})
        return Message(content, reply_to=Message(RecordDict(), dst_node_id=1, message_type="train"))

    async def story(place: Place) -> None:
        nonlocal expected
        for number in (1, 2, 3):
            await take_round(place, number)
            record = ArrayRecord({name: Array(value) for name, value in expected.items()})
            flower.configure_train(number, record, ConfigRecord({"lr": 0.1}), Nodes())
            replies = [
                reply(arrays, count) for arrays, count in zip(arrays_after(expected, number), EXAMPLES, strict=True)
            ]
            arrays, metrics = flower.aggregate_train(number, replies)
            expected = {name: array.numpy().astype(np.float32) for name, array in arrays.items()}
            values = await values_of(place)
            for name, value in expected.items():
                assert np.array_equal(values[name], value), (number, name)
            assert metrics["gain"] == 0.25
        events = await events_of(place, VersionPublished)
        assert [event.strategy_metrics["train.gain"] for event in events] == [0.25] * 3
        assert [(verdict.problem, verdict.not_reproducible) for verdict in verdicts(place, tmp_path)] == [("", "")] * 4

    where = f"flwr.serverapp.strategy:{strategy.__name__}"
    played(tmp_path, strategy_plan(where, strategy_options=options, strategy_is_pure=True), story)


def verdicts(place: Place, folder: Path, *, runs: bool = True) -> list[object]:
    strategies = Strategies(folder / "strategies", None)
    try:
        return list(verify_run(place.state, "run", strategies if runs else None))
    finally:
        strategies.close()


def test_verify_repeats_a_pure_strategy_and_names_another(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        for number in (1, 2):
            await take_round(place, number)
        pure = "is not run here" if is_pure else NOT_PURE
        without = verdicts(place, folder, runs=False)
        assert [each.problem for each in without] == [""] * 3
        assert [each.not_reproducible for each in without] == ["", *[f"the strategy {MODULE}:Own {pure}"] * 2]
        with_strategies = verdicts(place, folder)
        assert [each.problem for each in with_strategies] == [""] * 3
        assert [bool(each.not_reproducible) for each in with_strategies] == [False, not is_pure, not is_pure]

    for is_pure in (False, True):
        folder = tmp_path / str(is_pure)
        folder.mkdir()
        played(folder, strategy_plan("Own", strategy_is_pure=is_pure), story)


def test_the_command_verify_says_which_versions_it_did_not_recompute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    played(tmp_path, strategy_plan("Own"), lambda place: take_round(place, 1))
    outcome = fanin_in_process(capsys, monkeypatch)("verify", "run", "--state", tmp_path / "state")
    assert outcome.status == 0, outcome.err
    first, second = outcome.out.splitlines()
    assert first.endswith("(the publisher's initial version): verified")
    text = f"not reproducible: the strategy {MODULE}:Own {NOT_PURE}; the rest of its record is verified"
    assert second.endswith(f"(round 1, 3 updates): {text}")


def test_verify_finds_what_a_strategy_that_is_not_pure_did(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        await take_round(place, 1)
        (_, verdict) = verdicts(place, tmp_path)
        assert verdict.problem.startswith("round 1: recomputed ")

    played(tmp_path, strategy_plan("Forgetful", strategy_is_pure=True), story)


def test_verify_finds_a_damaged_update_also_without_the_strategy(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        await take_round(place, 1)
        payload = next(path for path in (tmp_path / "state" / "updates").rglob("*") if path.is_file())
        data = payload.read_bytes()
        payload.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        (_, verdict) = verdicts(place, tmp_path, runs=False)
        assert verdict.problem

    played(tmp_path, strategy_plan("Own"), story)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NotFinite", "aggregate_train: returned NaN, infinity or values beyond float32 in the array 'b'"),
        ("Crashes", "its process ended with status 7, expected a result"),
    ],
)
def test_a_wrong_result_fails_the_round_and_leaves_no_trace(tmp_path: Path, name: str, text: str) -> None:
    async def story(place: Place) -> None:
        before = await values_of(place)
        for number in (1, 2, 3):
            await take_round(place, number)
        failures = await events_of(place, RoundFailed)
        assert len(failures) == 3
        for failure in failures:
            assert failure.reason.startswith(f"strategy {MODULE}:{name}: {text}"), failure.reason
        (rested,) = await events_of(place, RunRested)
        assert rested.state.name == "FAILED"
        assert await events_of(place, VersionPublished) == []
        for name_of, value in (await values_of(place)).items():
            assert np.array_equal(value, before[name_of])

    played(tmp_path, strategy_plan(name), story)


def test_the_state_follows_a_killed_process_and_a_rollback(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        await take_round(place, 1)
        first = {name: value.copy() for name, value in (await values_of(place)).items()}
        # Between two Rounds, as by a lack of memory: the next Round starts another process.
        child = place.runs.drivers.driver("run").setup.strategy.pid
        os.kill(child, signal.SIGKILL)
        for number in (2, 3):
            await take_round(place, number)
        assert len(await events_of(place, VersionPublished)) == 3
        await place.runs.command(Command(run_id="run", command_id="pause", what=Pause()))
        await place.runs.command(Command(run_id="run", command_id="back", what=Adopt(from_run_id="", number=1)))
        await place.runs.command(Command(run_id="run", command_id="on", what=Resume(rounds=2)))
        await take_round(place, 5)
        # After the rollback, this is the second Round of the strategy again.
        changes = [TABLE.views(change)["b"] for change in changes_in(5)]
        mean = sum((first["b"] + change).astype(np.float64) for change in changes) / 3
        assert np.array_equal((await values_of(place))["b"], (mean + 2).astype(np.float32))

    played(tmp_path, strategy_plan("Own", strategy_options={"step": 1.0}), story)


def test_a_plan_names_only_the_strategies_that_the_operator_allows(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_strategies(tmp_path, (f"{MODULE}:Own",))
        for index, name in enumerate(("os:system", "flwr.serverapp.strategy:strategy.io.open")):
            with pytest.raises(InvalidPlan, match=rf"got '{name}', expected one of flwr.serverapp.strategy or of "):
                await begin(place, tmp_path / f"a{index}", strategy_plan(name, strategy_options={"file": "x"}))
        # The same id with a corrected Plan: nothing of the refused one is left.
        for number, options in enumerate(({"steps": 1.0}, {"step": 1.0})):
            with pytest.raises(InvalidPlan, match=r"unexpected keyword") if not number else nullcontext():
                await begin(place, tmp_path / str(number), strategy_plan("Own", strategy_options=options))
        await take_round(place, 1)
        assert len(await events_of(place, VersionPublished)) == 1
        await place.runs.stop()
        place = open_strategies(tmp_path, ())
        await place.runs.start()
        trouble = (await place.runs.info("run")).reason
        assert f"cannot be taken up: plan: flower.strategy: got '{MODULE}:Own', expected one of" in trouble
        await place.runs.stop()

    run_virtual(main())


def test_a_bundle_with_graphs_takes_no_strategy(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_strategies(tmp_path)
        with pytest.raises(InvalidPlan, match=r"run run: got flower.strategy, but the bundle has graphs"):
            await start(place.runs, bundle_in(tmp_path), strategy_plan("Own"))
        await place.runs.stop()

    run_virtual(main())


@pytest.mark.parametrize("name", ["Portable", "Opaque", "FedAdam"])
def test_a_run_resumes_with_the_state_of_its_strategy_or_says_why_not(tmp_path: Path, name: str) -> None:
    where = f"flwr.serverapp.strategy:{name}" if name == "FedAdam" else name

    async def main(folder: Path, num_stops: int) -> tuple[list[str], list[str]]:
        place = open_strategies(folder)
        await begin(place, folder, strategy_plan(where))
        for number in (1, 2, 3):
            if number == 3 and num_stops:
                await place.runs.stop()
                place = open_strategies(folder)
                await place.runs.start()
            await take_round(place, number)
        versions, failures = await events_of(place, VersionPublished), await events_of(place, RoundFailed)
        codes = [warning.code for warning in await events_of(place, RunWarned)]
        assert codes == ["strategy_state"] * (name == "Opaque")
        await place.runs.stop()
        return [event.version_sha256 for event in versions], [failure.reason for failure in failures]

    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
    expected, _ = run_virtual(main(tmp_path / "whole", 0))
    assert len(set(expected)) == 3
    versions, failures = run_virtual(main(tmp_path / "stopped", 1))
    if name == "Opaque":
        assert versions == expected[:2]
        (reason,) = failures
        assert reason.startswith(
            f"strategy {MODULE}:Opaque: the run cannot resume: its state after the last Round was not saved (numbers "
            "is a builtins.range_iterator) and has ended with its process; define __getstate__ and __setstate__"
        )
    else:
        assert (versions, failures) == (expected, [])


def test_a_strategy_is_imported_from_the_project_that_names_the_app(tmp_path: Path) -> None:
    folder = write_app(tmp_path / "project", "app_beside_strategy", NUMPY_APP)
    (folder / "pyproject.toml").write_text('[tool.flwr.app.components]\nclientapp = "app_beside_strategy:app"\n')
    write_strategies(folder)
    app = FlowerSettings(app="project", folder=tmp_path)
    plan = {"training.learning_rate": 1, "flower.strategy": f"{MODULE}:Own", "flower.strategy_options": {"step": 0.5}}
    result = simulate(app, 2, cohort=2, rounds=1, settings=SimulationSettings(plan=plan, quiet=True))
    assert result.arrays["0"].tolist() == [4.5] * 3
    wrong = SimulationSettings(plan=plan | {"flower.strategy": "nowhere:Own"}, quiet=True)
    with pytest.raises(InvalidPlan, match=f"no module 'nowhere' is installed or in {folder}, ") as excinfo:
        simulate(app, 2, cohort=2, rounds=1, settings=wrong)
    assert excinfo.value.code == "FN-0920"


@pytest.mark.parametrize("name", ["own_strategies:Own", "own_strategies.py:Own"])
def test_a_strategy_in_the_folder_of_the_app_makes_the_versions(tmp_path: Path, name: str) -> None:
    folder = write_app(tmp_path / "app", "simulated_numpy_app", NUMPY_APP)
    write_strategies(folder)
    app = FlowerSettings(app="simulated_numpy_app:app", folder=folder)
    plan = {"training.learning_rate": 1, "flower.strategy": name, "flower.strategy_options": {"step": 0.5}}
    plan |= {"statistics": [{"name": "evaluate.acc", "bound": 1 << 40}]}
    result = simulate(app, 2, cohort=2, rounds=1, settings=SimulationSettings(plan=plan, quiet=True))
    assert result.arrays["0"].tolist() == [4.5] * 3
    assert result.rounds[1].strategy_metrics == {"train.replies": 2.0}
    wrong = SimulationSettings(plan={"training.learning_rate": 1, "flower.strategy": WRONG}, quiet=True)
    with pytest.raises(RunStopped, match=rf"strategy {WRONG}: aggregate_train: returned no arrays \(None\)") as excinfo:
        simulate(app, 2, cohort=2, rounds=1, settings=wrong)
    assert [row.version for row in excinfo.value.result.rounds] == [0]

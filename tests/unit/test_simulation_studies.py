"""Studies with simulations: seeds, baseline, best Version, warm start and resumption. Most tests share one."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.boards import values_in
from support.coded import MODULE, value_of
from support.errors import raises
from torch import nn

from fanin.clients.device.contract import example_assignment, example_model
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.export import App, Recipe, Sgd
from fanin.edge.export.module.prepare import with_state
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, InvalidPlan, RuntimeMissing
from fanin.simulation import (
    Dirichlet,
    Partition,
    Result,
    RoundRow,
    SimulationSettings,
    SyntheticTrainer,
    load_data,
    partition,
    simulate,
    synthetic_bundle,
)
from fanin.simulation.rows import cells, initial_row
from fanin.simulation.simulated_run import RowLists
from fanin.simulation.studies.boards import open_board
from fanin.simulation.studies.digests import digest_of
from fanin.simulation.studies.records import Fact, RecordedTrainings, RecordFolder, subject_of
from fanin.simulation.studies.seeds import spread_of
from fanin.simulation.workers import PendingTraining

PLAN = {"training.learning_rate": 0.1, "training.epochs": 2}
COHORT, ROUNDS = 3, 3


def app() -> App:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    images = torch.from_numpy(load_data("digits").train.inputs["x"][:64])
    recipe = Recipe(optimizer=Sgd(momentum=0.0))
    return App(name="digits", module=module, calibration=images, batch_size=8, num_classes=10, recipe=recipe)


def clients() -> Partition:
    return partition(load_data("digits").train, 6, Dirichlet(alpha=0.5), seed=2)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record") / "here"


@pytest.fixture(scope="module")
def study(record: Path) -> Result:
    """Simulate with two seeds, a baseline and a record."""
    settings = SimulationSettings(
        test=load_data("digits").test, plan=PLAN, seeds=(4, 5), baseline=True, resume=record, quiet=True
    )
    return simulate(app(), clients(), cohort=COHORT, rounds=ROUNDS, settings=settings)


def test_several_seeds_have_a_mean_and_a_deviation(study: Result, tmp_path: Path) -> None:
    first, second = study.repeats
    assert first.digests == study.digests
    assert first.digests[1:] != second.digests[1:]
    # The first Round has other clients too: those that check in first.
    cohorts = [{row.client for row in result.clients if row.round == 1} for result in study.repeats]
    assert cohorts[0] != cohorts[1]
    losses = [result.rounds[-1].test_loss for result in study.repeats]
    last = study.spread[-1]
    assert (last.round, last.num_seeds) == (ROUNDS, 2)
    assert last.mean["test_loss"] == pytest.approx(np.mean(losses))
    assert last.std["test_loss"] == pytest.approx(np.std(losses, ddof=1))
    study.write_spread_csv(tmp_path / "spread.csv")
    assert (tmp_path / "spread.csv").read_text().splitlines()[0].startswith("round,num_seeds,version.mean,version.std")


def test_the_band_and_the_baseline_are_drawn(study: Result, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    left, right = study.plot(tmp_path / "curve.png").axes  # type: ignore[attr-defined]
    names = [line.get_label() for line in (*left.lines, *right.lines)]
    assert {"centralized loss", "centralized accuracy"} <= set(names)
    assert len(left.collections) == 2 and len(right.collections) == 2


def test_the_baseline_takes_as_many_steps_as_the_clients(study: Result) -> None:
    steps = 0
    for row in study.baseline:
        client_rows = [each for each in study.clients if each.round == row.round]
        steps += sum(2 * math.ceil(each.num_examples / 8) for each in client_rows)
        assert row.num_steps == steps
    assert steps > 0
    assert study.baseline[0].test_loss == study.rounds[0].test_loss
    assert study.baseline[-1].test_accuracy > 0.5


def test_the_best_version_has_its_accuracy(study: Result) -> None:
    assert study.best is not None
    assert study.best.row.test_accuracy == max(row.test_accuracy for row in study.rounds)
    test = load_data("digits").test
    with torch.no_grad():
        outputs = study.best.module(torch.from_numpy(test.inputs["x"]))
    accuracy = float((outputs.argmax(1).numpy() == test.y).mean())
    assert abs(study.best.row.test_accuracy - accuracy) < 1.5 / len(test)


def test_the_first_of_equally_good_versions_is_the_best() -> None:
    rows, empty = RowLists(), np.zeros(1, np.float32)
    for number, score in enumerate((1.0, 2.0, 2.0, 1.5, math.nan)):
        rows.add(replace(initial_row(None), round=number), empty, score)
    assert rows.best is not None and rows.best[0].round == 1
    untested_rows = RowLists()
    untested_rows.add(initial_row(None), empty, math.nan)
    assert untested_rows.best is None


def test_a_resumed_simulation_computes_no_recorded_training(study: Result, record: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (record / "trainings").iterdir()}
    assert len(before) == 2 * COHORT * ROUNDS
    # One Round more than the record, with one of its seeds: as if the simulation had stopped after the third Round.
    settings = SimulationSettings(plan=PLAN, seed=5, resume=record, quiet=True)
    result = simulate(app(), clients(), cohort=COHORT, rounds=ROUNDS + 1, settings=settings)
    after = {path.name: path.stat().st_mtime_ns for path in (record / "trainings").iterdir()}
    assert result.digests[: ROUNDS + 1] == study.repeats[1].digests
    assert before.items() <= after.items()
    assert len(after) == len(before) + COHORT


@pytest.mark.nightly
def test_a_simulation_that_was_stopped_ends_as_one_without_a_stop(study: Result, tmp_path: Path) -> None:
    def interrupt(row: RoundRow) -> None:
        if row.round == 1:
            signal.raise_signal(signal.SIGINT)

    settings = SimulationSettings(test=load_data("digits").test, plan=PLAN, seed=4, resume=tmp_path / "x", quiet=True)
    stopped_result = simulate(
        app(), clients(), cohort=COHORT, rounds=ROUNDS, settings=replace(settings, on_round=interrupt)
    )
    assert not stopped_result.is_complete
    resumed_result = simulate(app(), clients(), cohort=COHORT, rounds=ROUNDS, settings=settings)
    assert resumed_result.digests == study.digests
    assert resumed_result.rounds[1:] == study.rounds[1:]
    assert resumed_result.clients == study.clients
    assert resumed_result.events == study.events


def test_the_record_of_another_simulation_is_refused(tmp_path: Path) -> None:
    ours, parts = app(), clients()
    record, options = tmp_path / "record", {"validation_fraction": 0.1, "engine": "graph"}
    subject = options | subject_of(ours, parts)
    RecordFolder(record, subject)
    RecordFolder(record, options | subject_of(app(), parts))

    def differences(other: Mapping[str, Fact]) -> str:
        with pytest.raises(InvalidInput) as excinfo:
            RecordFolder(record, other)
        before, text, after = str(excinfo.value).partition(f"resume: {record} has the record of another simulation: ")
        assert (before, bool(text)) == ("", True), excinfo.value
        text, _, advice = after.partition("; ")
        assert advice == "use a new folder, or the App, clients and settings of the record"
        return text

    warm_app = with_state(ours, {name: value + 1.0 for name, value in ours.module.state_dict().items()})
    digest = r"SHA-256 [0-9a-f]{8}\.\."
    text = differences(options | subject_of(warm_app, parts))
    assert re.fullmatch(f"app.module is {digest} and was {digest}", text)
    text = differences(subject | {"validation_fraction": 0.2, "engine": "vmap", "num_clients": 3})
    changed = "validation_fraction is 0.2 and was 0.1, engine is 'vmap' and was 'graph', num_clients is 3 and was "
    assert text == f"{changed}{len(parts)}"
    text = differences(options | subject_of(replace(ours, batch_size=5), parts))
    assert text == f"app.batch_size is 5 and was {ours.batch_size}"
    with raises(InvalidInput, f"resume: {tmp_path} has other files, expected a new folder or one with a record"):
        RecordFolder(tmp_path, {})
    (record / "simulation.json").write_text(json.dumps({"format": 1, "subject": "00"}))
    with raises(InvalidInput, f"resume: {record} has format 1, expected 2; use a new folder"):
        RecordFolder(record, subject)


def coded_app(activation: str = "relu", scale: float = 1.0, epsilon: float = 0.0, divisor: float = 16.0) -> App:
    """Return an App whose classes and functions have the same names, whatever their code is."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.scale = scale

    class Scaled(nn.Module):
        def forward(self, raw: torch.Tensor) -> torch.Tensor:
            return raw.to(torch.float32) / divisor

    names: dict[str, Callable[..., torch.Tensor]] = {}
    exec(f"def forward(self, x):\n    return self.layer(x).{activation}() * self.scale", names)
    Net.forward = names["forward"]  # type: ignore[method-assign]

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, y, reduction="none") + epsilon

    torch.manual_seed(0)
    raw = torch.arange(32, dtype=torch.uint8).reshape(8, 4)
    preprocess = Scaled()
    return App(
        name="coded",
        module=Net(),
        calibration=preprocess(raw),
        raw=raw,
        preprocess=preprocess,
        batch_size=2,
        num_classes=3,
        loss=loss,
    )


@pytest.mark.parametrize("code", [{"activation": "tanh"}, {"scale": 2.0}, {"epsilon": 1.0}, {"divisor": 8.0}])
def test_the_code_of_an_app_is_a_part_of_its_record(code: dict[str, object]) -> None:
    parts = clients()
    assert subject_of(coded_app(), parts) == subject_of(coded_app(), parts)
    assert subject_of(coded_app(**code), parts) != subject_of(coded_app(), parts)  # type: ignore[arg-type]


PROGRAM = """
import sys
from support.coded import MODULE, value_of
from fanin.simulation.studies.digests import digest_of
print(digest_of(value_of(MODULE)))
"""


def test_each_process_has_the_same_digest() -> None:
    digests = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", PROGRAM]
        digests.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip())
    assert digests == {digest_of(value_of(MODULE))}


def test_a_damaged_file_of_a_record_is_recomputed(tmp_path: Path) -> None:
    bundle = synthetic_bundle(tmp_path / "bundle", SigningKey.generate(), {"a": (3,)})
    folder = RecordFolder(tmp_path / "record", "").folder

    class Counting:
        num = 0

        def begin(
            self, client: int, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0
        ) -> PendingTraining:
            self.num += 1
            return lambda: SyntheticTrainer(partition=client).train(model, assignment, lambda: True)

    trainings, model, assignment = Counting(), example_model(bundle), example_assignment(bundle)

    def change() -> Change:
        return RecordedTrainings(trainings, folder).begin(0, model, assignment)()

    first = change()
    assert np.array_equal(change().values, first.values) and trainings.num == 1
    (path,) = (folder / "trainings").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert np.array_equal(change().values, first.values) and trainings.num == 2
    assert dict(change().counts) == dict(first.counts) and trainings.num == 2


def test_a_warm_start_loads_a_state_dict() -> None:
    ours = app()
    state = {name: torch.full_like(value, 0.5) for name, value in ours.module.state_dict().items()}
    warm_app = with_state(ours, state)
    assert all(bool((value == 0.5).all()) for value in warm_app.module.state_dict().values())
    assert not any(bool((value == 0.5).all()) for value in ours.module.state_dict().values())
    with pytest.raises(InvalidInput, match="FN-0767"):
        simulate(ours, clients(), cohort=2, rounds=1, settings=SimulationSettings(plan=PLAN, initial={}))


def test_a_simulation_starts_from_a_state_dict(study: Result) -> None:
    settings = SimulationSettings(
        test=load_data("digits").test, plan=PLAN, initial=study.module.state_dict(), quiet=True
    )
    ours = app()
    result = simulate(ours, clients(), cohort=COHORT, rounds=1, settings=settings)
    # Version 0 is the last Version of the other simulation, and not the App's own parameters.
    assert result.digests[0] == study.digests[-1] != study.digests[0]
    first, last = result.rounds[0], study.rounds[-1]
    assert (first.test_loss, first.test_accuracy) == (last.test_loss, last.test_accuracy)
    assert result.rounds[1].test_loss < study.rounds[1].test_loss
    assert all(torch.equal(value, ours.module.state_dict()[name]) for name, value in app().module.state_dict().items())


def test_the_rounds_of_each_seed_are_scalars_of_tensorboard(study: Result, tmp_path: Path) -> None:
    study.tensorboard(tmp_path)
    for index, result in enumerate(study.repeats):
        numbers = {(name, row.round): number for row in result.rounds for name, number in cells(row).items()}
        # Round 0 has no training loss. The step is the Round, and the folder the seed, so these have no column.
        columns = {name for name, _ in numbers} - {"round", "seed"}
        expected = {key: number for key, number in numbers.items() if key[0] in columns and math.isfinite(number)}
        assert values_in(tmp_path / f"seed-{index}") == pytest.approx(expected)
        assert ("test_accuracy_int8", ROUNDS) in expected and ("train_loss", 0) not in expected
    replace(study, repeats=()).tensorboard(tmp_path / "one")
    assert values_in(tmp_path / "one") == values_in(tmp_path / "seed-0")
    with raises(RuntimeMissing, "TensorBoard: no_such is not installed here; pip install tensorboardX"):
        open_board(tmp_path, "no_such")


@pytest.mark.parametrize(
    ("seeds", "error"),
    [
        (
            {"seeds": (1, 2, 1)},
            r"simulate: seeds: got \[1, 2, 1\], expected each seed once, .*; remove the repetitions of 1\n",
        ),
        ({"seeds": (-1,)}, r"simulate: seeds: got \[-1\], expected integers of 0 or more\n"),
        (
            {"seeds": (1, 2), "seed": 3},
            r"simulate: got seeds \[1, 2\] and seed 3, expected one of them; remove seed\n",
        ),
    ],
    ids=["twice", "negative", "beside"],
)
def test_wrong_seeds_raise_one_error(seeds: Mapping[str, int], error: str) -> None:
    settings = SimulationSettings(plan=PLAN, **seeds)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=f"^{error}"):
        simulate(app(), clients(), cohort=2, rounds=1, settings=settings)


@pytest.mark.parametrize(
    ("settings", "kind", "error"),
    [
        (SimulationSettings(seeds=3), InvalidInput, "simulate: seeds: got 3, expected a sequence such as (0, 1, 2)"),
        (
            SimulationSettings(seeds="0,1"),
            InvalidInput,
            "simulate: seeds: got '0,1', expected a sequence such as (0, 1, 2)",
        ),
        (
            SimulationSettings(seed="3"),
            InvalidInput,
            "simulate: got seed '3', expected an integer of 0 or more",
        ),
        (
            SimulationSettings(test=(np.zeros((4, 1, 8, 8)), np.zeros(4))),
            InvalidInput,
            (
                "simulate: test: got tuple, expected Examples, or several of them by name; write "
                "Examples(inputs={'x': x}, y=y), or load_data(name).test"
            ),
        ),
        (
            SimulationSettings(plan={**PLAN, "stop.max_rounds": 5}),
            InvalidPlan,
            "simulate: plan: got stop.max_rounds and the argument rounds; remove the key",
        ),
    ],
)
def test_a_setting_of_another_type_or_a_key_that_is_an_argument_raises_one_error(
    settings: SimulationSettings, kind: type[Exception], error: str
) -> None:
    with raises(kind, error):
        simulate(app(), clients(), cohort=2, rounds=1, settings=settings)


def test_a_round_that_failed_in_one_seed_is_a_row_of_the_others() -> None:
    def rounds(*numbers: int) -> list[RoundRow]:
        return [replace(initial_row(None), round=number, test_loss=float(number)) for number in numbers]

    spread = spread_of([rounds(0, 1, 2, 3), rounds(0, 2, 4)])
    assert [(row.round, row.num_seeds) for row in spread] == [(0, 2), (1, 1), (2, 2), (3, 1), (4, 1)]
    assert [row.mean["test_loss"] for row in spread] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_spread_of_one_seed_is_its_rounds() -> None:
    (row,) = spread_of([[replace(initial_row(None), test_loss=2.0)]])
    assert row.mean["test_loss"] == 2.0 and math.isnan(row.std["test_loss"])

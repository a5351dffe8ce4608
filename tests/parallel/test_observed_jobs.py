"""Observers of real jobs: the example of the docs, one that fails within a step, and one that cannot begin."""

import csv
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from house.tree import ROOT, package_modules
from support.outside import file_block
from torch.distributed.pipelining import PipelineStage

from fanin import datacenter
from fanin.clients.data.digits import split_digits
from fanin.datacenter.checkpoints.progress import latest
from fanin.datacenter.config.settings import (
    CheckpointSettings,
    DataSettings,
    LayoutSettings,
    ModelSettings,
    StopSettings,
    WatchSettings,
)
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.files.jobfiles import ROWS_FILE, outcome_files, read_result, write_config
from fanin.datacenter.jobs.job import main, train_rank
from fanin.datacenter.jobs.launch import Placement, launch, outcome
from fanin.datacenter.jobs.torchrun import ONE_MACHINE
from fanin.datacenter.observers.contract import check_observer
from fanin.datacenter.observers.events import (
    CheckpointWritten,
    Event,
    StageComputed,
    StepEnded,
    StepSettled,
    TrainingEnded,
    TrainingFailed,
    TrainingStarted,
)
from fanin.datacenter.observers.loading import RankPlace, load_observers
from fanin.datacenter.observers.observer import Interrupt
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.objective import padded_objective
from fanin.datacenter.parallel.pipelines.torch_stage import OVERRIDDEN, TESTED_TORCH, check_torch
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.watch.watchdog import HUNG, Watchdog
from fanin.edge.export import cross_entropy
from fanin.protos.errors import InvalidInput, RuntimeMissing

pytestmark = pytest.mark.usefixtures("forked_agents")
APPS = Path(__file__).with_name("apps.py")
PAGE = (ROOT / "docs/howto/observers.md").read_text().partition("\n## Observers\n")[2]
EXAMPLE = file_block(PAGE, "losses.py")
BROKEN = """
import sys
import time
from fanin.datacenter.observers.events import StageComputed, StepEnded

class Broken:
    def on(self, event):
        if isinstance(event, StageComputed):
            raise ArithmeticError("no number")

class Stuck:
    def on(self, event):
        if isinstance(event, StepEnded):
            time.sleep(60.0)  # stuck

class Exit:
    def on(self, event):
        if isinstance(event, StepEnded):
            sys.exit(3)

def exits(place):
    return Exit()

def exits_at_once(place):
    sys.exit(3)

def on_rank_1(place):
    return Broken() if place.rank == 1 else None

def stuck(place):
    return Stuck()

def wrong():
    return Broken()

def none(place):
    return object()

NUMBER = 3
"""


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Return a short job on the public digits."""
    public = split_digits(1, 1.0, 0).public
    np.savez(tmp_path / "data.npz", x=public.inputs["x"], y=public.y)
    return TrainConfig(
        model=ModelSettings(app="fanin.datacenter.models.digits_app:app"),
        data=DataSettings(examples=tmp_path / "data.npz", held_fraction=0.2),
        training=TrainingSettings(batch_size=16, learning_rate=0.1, optimizer="sgd"),
        stop=StopSettings(steps=60),
    )


@pytest.fixture
def broken_module(tmp_path: Path) -> Path:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    return path


class Recorder:
    """An observer that keeps the events, and decides when a step has settled."""

    def __init__(self, decide: Callable[[int], Interrupt | None] = lambda step: None) -> None:
        self.events: list[Event] = []
        self._decide = decide

    def on(self, event: Event) -> Interrupt | None:
        self.events.append(event)
        return self._decide(event.num_steps) if isinstance(event, StepSettled) else None


def test_the_example_is_short_and_ends_a_job_of_two_ranks(config: TrainConfig, tmp_path: Path) -> None:
    assert len(EXAMPLE.splitlines()) < 40
    path = tmp_path / "losses.py"
    path.write_text(EXAMPLE)
    observed_config = replace(
        config,
        parallel=ParallelSettings(mesh=MeshShape(dp_replicate=2)),
        watch=WatchSettings(observers=(f"{path}:first_rank",)),
        checkpoints=CheckpointSettings(folder=tmp_path / "kept", weights=tmp_path / "out.safetensors"),
    )
    metrics = launch(observed_config, 2, tmp_path / "job").metrics
    losses = metrics.trained.losses
    assert 2 < len(losses) < 60
    assert losses[-1] is not None
    assert losses[-1] < 1.5 <= min(loss for loss in losses[:-1] if loss is not None)
    with (tmp_path / "job/loss.csv").open(newline="") as file:
        assert [(int(step), float(loss)) for step, loss in csv.reader(file)] == list(enumerate(losses))
    assert not metrics.stopped, "it ended as after its last step"
    assert metrics.trained.evaluated[-1].step == len(losses)
    assert (tmp_path / "out.safetensors").exists()


def test_the_example_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losses_here.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    from losses_here import LossFile, first_rank  # type: ignore[import-not-found]

    check_observer(lambda: LossFile(tmp_path / "loss.csv", 1.0))
    assert first_rank(RankPlace(rank=1, num_ranks=2, folder=tmp_path)) is None


def test_objects_observe_a_job_of_one_rank(config: TrainConfig, tmp_path: Path) -> None:
    config = replace(
        config,
        stop=StopSettings(steps=6),
        checkpoints=CheckpointSettings(folder=tmp_path / "kept", every=2),
    )
    first, second = Recorder(lambda step: Interrupt(reason="no time") if step == 3 else None), Recorder()
    first_metrics = datacenter.train(config, placement=Placement(folder=tmp_path / "job", observers=[first])).metrics
    assert (first_metrics.stopped, len(first_metrics.trained.losses)) == (True, 3)
    assert first.events[-1] == TrainingEnded(num_steps=3, reason="observer 0 (Recorder): no time", interrupted=True)
    second_metrics = datacenter.train(
        config, placement=Placement(folder=tmp_path / "job", observers=[first, second])
    ).metrics
    assert second.events[0] == TrainingStarted(num_steps=3)
    assert second.events[-1] == TrainingEnded(num_steps=6, reason="steps", interrupted=False)
    steps = [event for event in second.events if isinstance(event, StepEnded)]
    assert [(each.step, each.loss) for each in steps] == list(enumerate(second_metrics.trained.losses))[3:]
    assert [each.num_steps for each in second.events if isinstance(each, CheckpointWritten)] == [4, 6]
    assert len((tmp_path / "job" / ROWS_FILE).read_text().splitlines()) == 3, "as with ranks of their own"
    reference = datacenter.train(
        replace(config, checkpoints=CheckpointSettings()), placement=Placement(observers=[Recorder()])
    )
    assert reference.metrics.trained.losses == second_metrics.trained.losses
    two_ranks = replace(config, parallel=ParallelSettings(mesh=MeshShape(dp_replicate=2)))
    with pytest.raises(InvalidInput, match="FN-1355"):
        datacenter.train(two_ranks, placement=Placement(observers=[Recorder()]))


def test_an_observer_that_fails_on_one_rank_ends_all_with_its_name(
    config: TrainConfig, broken_module: Path, tmp_path: Path
) -> None:
    # The first event of its kind is in the middle of a step, in which the other rank waits for this one.
    layout = LayoutSettings(layers="layers", num_layers=4, inputs=("flatten", "embed"), outputs=("head",))
    config = replace(
        config,
        model=ModelSettings(app=f"{APPS}:stacked", layout=layout),
        parallel=ParallelSettings(mesh=MeshShape(pp=2), microbatches=2),
        watch=WatchSettings(observers=(f"{broken_module}:on_rank_1",)),
    )
    with pytest.raises(
        InvalidInput,
        match="FN-1362",
    ):
        launch(config, 2, tmp_path / "job")
    assert len((tmp_path / "job" / ROWS_FILE).read_text().splitlines()) == 1, "the step was completed"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:first", "observer: no module 'no_such_module_here' on the path"),
        ("{path}:missing", "has no 'missing', expected an observer or a function of that name"),
        ("{path}:NUMBER", "got int, expected a function of one RankPlace"),
        (
            "{path}:exits_at_once",
            "its factory raised SystemExit: 3; correct the factory. It is called with one RankPlace",
        ),
        ("{path}:wrong", r"its factory raised TypeError: wrong\(\) takes 0 positional arguments"),
        ("{path}:none", "got object, expected an object with a method on"),
    ],
)
def test_an_observer_that_cannot_start_is_named(
    config: TrainConfig, broken_module: Path, name: str, message: str
) -> None:
    name = name.format(path=broken_module)
    with pytest.raises(InvalidInput, match=message):
        train_rank(replace(config, watch=WatchSettings(observers=(name,))))
    with pytest.raises(InvalidInput, match="FN-1360"):
        WatchSettings(observers=("nothing",))


class Full:
    """An observer whose disk is full at one event."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def on(self, event: Event) -> None:
        if event == self._event:
            raise OSError("disk full")


LAST_EVENT = TrainingEnded(num_steps=3, reason="steps", interrupted=False)


@pytest.mark.parametrize("event", [StepSettled(num_steps=3), LAST_EVENT])
def test_an_observer_that_fails_when_all_steps_are_done_costs_no_result(
    config: TrainConfig, tmp_path: Path, event: Event
) -> None:
    weights, recorder = tmp_path / "out.safetensors", Recorder()
    config = replace(config, stop=StopSettings(steps=3), checkpoints=CheckpointSettings(weights=weights))
    with pytest.raises(InvalidInput) as excinfo:
        datacenter.train(config, placement=Placement(folder=tmp_path / "job", observers=[Full(event), recorder]))
    assert str(excinfo.value) == (
        f"observer 0 (Full): raised OSError on {type(event).__name__}: disk full; the job has ended after step 3, and "
        "its files are written; correct this observer"
    )
    assert weights.exists()
    history = read_result(tmp_path / "job").metrics.trained
    assert (len(history.losses), history.evaluated[-1].step) == (3, 3)
    assert recorder.events[-1] == LAST_EVENT


def test_a_due_checkpoint_is_completed_when_an_observer_fails(config: TrainConfig, tmp_path: Path) -> None:
    checkpoints, full_disk, recorder = tmp_path / "kept", Full(StepSettled(num_steps=2)), Recorder()
    config = replace(config, stop=StopSettings(steps=5), checkpoints=CheckpointSettings(folder=checkpoints, every=1))
    with pytest.raises(InvalidInput, match="FN-1362"):
        datacenter.train(config, placement=Placement(folder=tmp_path / "job", observers=[full_disk, recorder]))
    progress = latest(checkpoints)
    assert progress is not None
    assert progress.step == 2
    assert isinstance(recorder.events[-1], TrainingFailed)
    assert recorder.events[-2] == CheckpointWritten(num_steps=2)


def test_a_rank_reports_an_observer_that_exits_after_the_result_is_written(
    config: TrainConfig, broken_module: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "out.safetensors"
    config = replace(
        config,
        stop=StopSettings(steps=1),
        checkpoints=CheckpointSettings(weights=weights),
        watch=WatchSettings(observers=(f"{broken_module}:exits",)),
    )
    # Status 0, because torchrun would restart the ranks otherwise, with the same result.
    assert main([str(write_config(config, tmp_path))]) == 0
    assert weights.exists()
    assert len(read_result(tmp_path).metrics.trained.losses) == 1
    with pytest.raises(InvalidInput, match="FN-1362"):
        outcome(tmp_path, ONE_MACHINE, 0, outcome_files(tmp_path))
    assert "exits': raised SystemExit on StepEnded: 3" in capfd.readouterr().err


def test_an_error_of_a_training_is_the_last_event(config: TrainConfig, tmp_path: Path) -> None:
    recorder = Recorder()
    diverging_config = replace(config, training=replace(config.training, learning_rate=1e38))
    with pytest.raises(InvalidInput, match="FN-1333"):
        datacenter.train(diverging_config, placement=Placement(observers=[recorder]))
    last = recorder.events[-1]
    assert isinstance(last, TrainingFailed)
    assert last.error.startswith("Diverged: training: step ")
    assert last.on_all_ranks, "otherwise a rank would not wait for a save that is due"


def run_blocked(config: TrainConfig, folder: Path) -> None:
    """Run a job whose observer never returns."""
    sys.stderr = (folder / "stderr.log").open("w")
    train_rank(config, RankPlace(folder=folder))
    os._exit(0)


def test_the_watchdog_names_the_line_of_an_observer_that_blocks(
    config: TrainConfig, broken_module: Path, tmp_path: Path
) -> None:
    watch = WatchSettings(hang_after_s=1.0, observers=(f"{broken_module}:stuck",))
    child = multiprocessing.get_context("fork").Process(
        target=run_blocked, args=(replace(config, watch=watch), tmp_path)
    )
    child.start()
    child.join()
    assert child.exitcode == HUNG
    line = next(number for number, text in enumerate(BROKEN.splitlines(), 1) if "# stuck" in text)
    assert f"broken.py:{line} on" in (tmp_path / "stderr.log").read_text()


def test_a_hang_in_the_first_step_after_a_resume_is_reported_in_that_step(tmp_path: Path) -> None:
    objective = padded_objective(cross_entropy)
    model = TrainableModel(
        module=torch.nn.Linear(4, 3), layout=ModelSettings(app="a:b").parallel_layout, objective=objective
    )
    engine = build_engine(model, ParallelSettings(), TrainingSettings(batch_size=4, learning_rate=0.1), None)
    watchdog = Watchdog(engine, tmp_path, 1.0)
    watchdog.on(TrainingStarted(num_steps=7))
    assert watchdog.report(1.0).step == 7
    watchdog.on(StepEnded(step=7, loss=None, rate=0.1, norm=None, units=4))
    assert watchdog.report(1.0).step == 8


class Older:
    """A stage of another release of torch."""

    forward_one_chunk = backward_one_chunk = backward_weight_one_chunk = _prepare_forward_infra = print


def test_a_torch_without_an_overridden_method_is_refused() -> None:
    assert torch.__version__.startswith(TESTED_TORCH), "run the pipelines' tests, then change TESTED_TORCH"
    check_torch()
    assert all(name in vars(PipelineStage) or hasattr(PipelineStage, name) for name in OVERRIDDEN)
    message = (
        f"got torch {re.escape(torch.__version__)}, whose Older has no _post_metadata_inference_cleanup, expected torch"
    )
    with pytest.raises(RuntimeMissing, match=message):
        check_torch(Older)


def test_one_module_owns_all_changes_to_torchs_stage() -> None:
    pattern = re.compile(rf"\b({'|'.join(OVERRIDDEN)})\b|\bschedule\._stages?\b")
    paths = [module.path for module in package_modules() if pattern.search(module.text)]
    assert paths == ["datacenter/fanin/datacenter/parallel/pipelines/torch_stage.py"]


def test_observers_of_a_config_are_loaded_in_its_order(broken_module: Path) -> None:
    place = RankPlace(rank=1, num_ranks=2, folder=None)
    first, second = load_observers([f"{broken_module}:stuck", f"{broken_module}:on_rank_1"], place)
    for observer in (first, second):
        observer.on(StageComputed(stage=0, work="forward", started_s=0.0, seconds=0.1))
    assert (first.failure is None, second.failure is None) == (True, False), "only the second fails on this event"
    assert load_observers([f"{broken_module}:on_rank_1"], replace(place, rank=0)) == []

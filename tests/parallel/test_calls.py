"""``datacenter.train`` in a program: parameters in and out, and a caller that follows the steps and may end them.

A job in this process and a job of two ranks are held to the same results.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fanin import datacenter
from fanin.clients import Change, Interrupted, Trainer
from fanin.clients.data.digits import split_digits
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.contract import example_assignment
from fanin.clients.device.models import OpenedModel
from fanin.datacenter.config.settings import CheckpointSettings, DataSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.jobs.torchrun import Elastic
from fanin.datacenter.models.digits_app import app
from fanin.datacenter.observers.events import Event, StepEnded
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.parameters import parameter_table, parameter_vector
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import Assignment, Training
from fanin.simulation import synthetic_bundle

pytestmark = pytest.mark.usefixtures("forked_agents")
NUM_STEPS = 6
BATCH = 16


class Silent:
    """An observer that makes this process the job's one rank."""

    def on(self, event: Event) -> None:
        """Ignore an event."""


@pytest.fixture(params=["this process", "two ranks"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TrainConfig, datacenter.Placement]:
    """A short job on the public digits with checkpoints, and where it runs."""
    public = split_digits(1, 1.0, 0).public
    np.savez(tmp_path / "data.npz", x=public.inputs["x"], y=public.y)
    is_here = request.param == "this process"
    config = TrainConfig(
        model=ModelSettings(app="fanin.datacenter.models.digits_app:app"),
        data=DataSettings(examples=tmp_path / "data.npz", held_fraction=0.2),
        training=TrainingSettings(batch_size=BATCH, learning_rate=0.05, optimizer="sgd"),
        stop=StopSettings(steps=NUM_STEPS),
        checkpoints=CheckpointSettings(folder=tmp_path / "checkpoints"),
        parallel=ParallelSettings(mesh=MeshShape() if is_here else MeshShape(dp_shard=2), device="cpu"),
    )
    folder = tmp_path / "job"
    return config, datacenter.Placement(folder=folder, observers=[Silent()] if is_here else ())


def test_a_caller_follows_each_step_and_interrupts_between_two(job: tuple[TrainConfig, datacenter.Placement]) -> None:
    config, placement = job
    steps: list[StepEnded] = []
    first = datacenter.train(
        config, should_continue=lambda: len(steps) < 3, on_step=steps.append, placement=placement
    ).metrics
    assert (first.stopped, len(first.trained.losses)) == (True, 3)
    second_result = datacenter.train(config, on_step=steps.append, placement=placement)
    assert not second_result.metrics.stopped
    assert [each.step for each in steps] == list(range(NUM_STEPS))
    assert tuple(each.loss for each in steps) == second_result.metrics.trained.losses
    # 90 samples to train on: the last batch of an epoch is smaller.
    assert [each.units for each in steps[:5]] == [BATCH] * 5
    reference = datacenter.train(replace(config, checkpoints=CheckpointSettings()), placement=placement)
    np.testing.assert_array_equal(second_result.parameters, reference.parameters)
    assert placement.folder is not None
    assert not list(placement.folder.glob("initial-*")) and not (placement.folder / "caller").exists()


def test_an_answer_that_is_no_bool_is_one_error(
    job: tuple[TrainConfig, datacenter.Placement], caplog: pytest.LogCaptureFixture
) -> None:
    config, placement = job

    def forgotten() -> Any:
        """Return nothing, as a function without a return statement."""

    with pytest.raises(InvalidInput, match="FN-1359"):
        datacenter.train(config, should_continue=forgotten, placement=placement)
    assert "Traceback" not in caplog.text


def test_parameters_by_name_and_flat_ones_begin_a_job(job: tuple[TrainConfig, datacenter.Placement]) -> None:
    config, placement = job
    config = replace(config, checkpoints=CheckpointSettings())
    half = datacenter.train(replace(config, stop=StopSettings(steps=2)), placement=placement)
    assert half.table is not None and half.parameters is not None
    assert placement.folder is not None
    file = placement.folder.parent / "version.bin"
    file.write_bytes((placement.folder / "parameters.bin").read_bytes())
    expected = datacenter.train(replace(config, model=replace(config.model, initial=file)), placement=placement)
    for initial in (half.parameters, half.table.views(half.parameters)):
        result = datacenter.train(config, initial=initial, placement=placement)
        assert result.metrics.trained.losses == expected.metrics.trained.losses
        np.testing.assert_array_equal(result.parameters, expected.parameters)
    assert not list(placement.folder.glob("initial-*"))


def fails(error: BaseException) -> Callable[[StepEnded], None]:
    def on_step(step: StepEnded) -> None:
        if step.step == 1:
            raise error

    return on_step


def test_an_error_of_the_caller_ends_the_job_with_a_checkpoint_and_is_raised(
    job: tuple[TrainConfig, datacenter.Placement],
) -> None:
    config, placement = job
    error = ArithmeticError("no number")
    with pytest.raises(ArithmeticError, match="no number") as excinfo:
        datacenter.train(config, on_step=fails(error), placement=placement)
    assert excinfo.value is error
    with pytest.raises(SystemExit):
        datacenter.train(config, on_step=lambda step: sys.exit(3), placement=placement)
    result = datacenter.train(config, placement=placement)
    assert len(result.metrics.trained.losses) == NUM_STEPS
    assert config.checkpoints.folder is not None
    names = {path.name for path in config.checkpoints.folder.glob("step-*")}
    assert names == {"step-00000002", "step-00000003", "step-00000006"}


class SiloTrainer:
    """A trainer of a device that runs each Assignment as a job."""

    runtime = "torch"
    graph_format = "arrays"

    def __init__(self, config: TrainConfig, placement: datacenter.Placement) -> None:
        self.config = config
        self.placement = placement

    def train(self, model: OpenedModel, assignment: Assignment, should_continue: ShouldContinue) -> Change:
        """See Trainer."""
        settings = replace(self.config.training, learning_rate=assignment.training.learning_rate)
        config = replace(self.config, training=settings, stop=StopSettings(epochs=assignment.training.epochs))
        start = model.values()
        result = datacenter.train(config, initial=start, should_continue=should_continue, placement=self.placement)
        assert result.parameters is not None
        return Change(values=result.parameters - start, counts={"examples": 80})


def test_a_silo_runs_an_assignment_as_a_job(job: tuple[TrainConfig, datacenter.Placement], tmp_path: Path) -> None:
    config, placement = job
    config = replace(config, checkpoints=CheckpointSettings())
    table = parameter_table(app().module)
    bundle = synthetic_bundle(
        tmp_path / "bundle", SigningKey(bytes(32)), {each.name: each.shape for each in table.specs}
    )
    model = OpenedModel(bundle=bundle, parameters=parameter_vector(app().module))
    assignment = example_assignment(bundle, Training(epochs=2, learning_rate=0.05, seed=0))
    num_calls = 0

    def interrupted() -> bool:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise Interrupted
        return True

    trainer: Trainer = SiloTrainer(config, placement)
    with pytest.raises(Interrupted):
        trainer.train(model, assignment, interrupted)
    assert num_calls == 2
    change = trainer.train(model, assignment, lambda: True)
    assert np.abs(change.values).max() > 0.001
    np.testing.assert_array_equal(change.values, trainer.train(model, assignment, lambda: True).values)


def test_wrong_parameters_are_refused(job: tuple[TrainConfig, datacenter.Placement], tmp_path: Path) -> None:
    config, placement = job
    for initial, message in (
        (
            np.zeros(3, np.float32),
            "initial: got float32 [3], expected float32 [19946], the parameters of this model in",
        ),
        ({"head.bias": np.zeros(10, np.float32)}, "parameters: got 1 tensor: 5 missing, such as "),
        (np.zeros(19946), "initial: got the array of float64, expected float32 arrays; convert it"),
        ({"head.bias": np.zeros(10)}, "initial: got head.bias of float64, expected float32 arrays; convert it"),
        (np.zeros((2, 2), np.float32), "initial: got an array [2, 2], expected a flat one, or arrays by name"),
        (np.full(19946, np.nan, np.float32), "parameters: got 19946 values that are not finite"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(message)):
            datacenter.train(config, initial=initial, placement=placement)
    twice = replace(config, model=replace(config.model, initial=tmp_path / "x.bin"))
    with pytest.raises(InvalidInput, match="FN-1224"):
        datacenter.train(twice, initial=np.zeros(19946, np.float32), placement=placement)


def test_several_machines_have_no_caller(tmp_path: Path) -> None:
    elastic = Elastic(min_nodes=2, max_nodes=2, endpoint="127.0.0.1:1")
    config = TrainConfig(
        model=ModelSettings(app="a:b"),
        data=DataSettings(examples=tmp_path / "data.npz"),
        training=TrainingSettings(batch_size=BATCH, learning_rate=0.05),
        stop=StopSettings(steps=1),
        parallel=ParallelSettings(mesh=MeshShape(dp_shard=2)),
    )
    with pytest.raises(InvalidInput, match="FN-1355"):
        datacenter.train(config, on_step=print, placement=datacenter.Placement(folder=tmp_path, elastic=elastic))

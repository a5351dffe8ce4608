"""A step whose loss or gradients are not finite ends a job or is skipped, and never reaches a checkpoint."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fanin.clients.data.examples import Examples
from fanin.datacenter.checkpoints.checkpoint import Checkpoints
from fanin.datacenter.checkpoints.progress import Progress, latest
from fanin.datacenter.checkpoints.resumable import JobCheckpoints
from fanin.datacenter.checkpoints.trace import TRACE_FILE
from fanin.datacenter.config.communication import CommunicationSettings
from fanin.datacenter.config.rates import RateSettings
from fanin.datacenter.config.settings import CheckpointSettings, DataSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.samples import DataSplit, ExampleSamples
from fanin.datacenter.files.jobfiles import ROWS_FILE, read_error, read_result, write_config
from fanin.datacenter.jobs.job import main
from fanin.datacenter.observers.observer import Observers
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.objective import ScoredObjective, padded_objective
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.training.loop import TrainingLoop
from fanin.datacenter.training.parameters import parameter_vector
from fanin.datacenter.training.state import LoopStart
from fanin.edge.export import squared_error
from fanin.protos.errors import Diverged, InvalidInput

NUM_STEPS, BATCH = 8, 4
CONFIG = TrainConfig(
    model=ModelSettings(app="made:here"),
    data=DataSettings(examples=Path("made-here.npz")),
    training=TrainingSettings(batch_size=BATCH, learning_rate=0.1, optimizer="sgd"),
    stop=StopSettings(steps=NUM_STEPS),
)
Fault = Callable[[Tensor], Tensor]


def in_gradients(losses: Tensor) -> Tensor:
    """Return the same losses with gradients that are not finite: a square root has none at 0."""
    return losses + (losses * 0.0).sqrt()


def in_losses(losses: Tensor) -> Tensor:
    return losses * float("nan")


def in_losses_alone(losses: Tensor) -> Tensor:
    """Return losses that are not finite, with the same gradients."""
    return losses + float("inf")


class FaultyLoss:
    """A loss that is not finite in some steps, counted from 0."""

    def __init__(self, steps: tuple[int, ...], fault: Fault) -> None:
        self._steps = steps
        self._fault = fault
        self.step = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = squared_error(outputs, targets)
        if not torch.is_grad_enabled():
            return losses
        self.step += 1
        return self._fault(losses) if self.step - 1 in self._steps else losses


def trainer_of(
    config: TrainConfig, steps: tuple[int, ...] = (), fault: Fault = in_gradients, module: torch.nn.Module | None = None
) -> TrainingLoop:
    return loop_of(config, *engine_of(config, steps, fault, module))


def engine_of(
    config: TrainConfig, steps: tuple[int, ...] = (), fault: Fault = in_gradients, module: torch.nn.Module | None = None
) -> tuple[Engine, ScoredObjective]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = module or torch.nn.Linear(3, 1)
    scored = ScoredObjective(padded_objective(FaultyLoss(steps, fault)))
    model = TrainableModel(module=module, layout=config.model.parallel_layout, objective=scored.objective)
    return build_engine(model, config.parallel, config.training, None), scored


def loop_of(
    config: TrainConfig, engine: Engine, scored: ScoredObjective, start: LoopStart | None = None
) -> TrainingLoop:
    rng = np.random.default_rng(0)
    examples = Examples(
        inputs={"x": rng.normal(size=(40, 3)).astype(np.float32)}, y=rng.normal(size=(40, 1)).astype(np.float32)
    )
    samples = ExampleSamples(examples)
    return TrainingLoop(engine, scored, config, DataSplit(train=samples, held_out=samples), start)


def train_and_save(
    config: TrainConfig, folder: Path, steps: tuple[int, ...], fault: Fault = in_gradients
) -> tuple[TrainingLoop, str]:
    """Train, and save after each step. Return the loop and the error of a job that diverged."""
    checkpoints, error = CheckpointSettings(folder=folder, every=1), ""
    engine, scored = engine_of(config, steps, fault)
    with JobCheckpoints(checkpoints, engine, CONFIG.seed, writes=True) as keeper:
        observers = Observers([keeper])
        start = keeper.start(observers)
        trainer = loop_of(config, engine, scored, start)
        keeper.follow(trainer, observers.publish)
        try:
            trainer.run()
        except Diverged as exc:
            error = str(exc)
    return trainer, error


def vector(trainer: TrainingLoop) -> np.ndarray:
    return parameter_vector(trainer.engine.parts[0])


def skipping_config(max_skips: int) -> TrainConfig:
    return replace(CONFIG, training=replace(CONFIG.training, max_skips=max_skips))


@pytest.mark.parametrize(
    ("fault", "message"), [(in_gradients, r"got loss \d\S* and gradient"), (in_losses, "got loss nan and")]
)
def test_a_step_that_is_not_finite_ends_the_job_and_is_not_saved(tmp_path: Path, fault: Fault, message: str) -> None:
    trainer, error = train_and_save(CONFIG, tmp_path, (3,), fault)
    assert re.match(f"training: step 4: {message}.* norm nan .learning rate 0.1., .* max_skips .0.", error)
    progress = latest(tmp_path)
    assert progress is not None
    assert progress.step == trainer.state.step == 3
    assert np.isfinite(vector(trainer)).all(), "the step changed nothing"
    before = vector(trainer)
    with JobCheckpoints(CheckpointSettings(folder=tmp_path), trainer.engine, CONFIG.seed, writes=False):
        assert (vector(trainer) == before).all(), "the last checkpoint is the state before the step"


def test_steps_may_be_skipped_and_are_counted_across_a_resume(tmp_path: Path) -> None:
    config, fault_steps = skipping_config(2), (1, 2, 5)
    reference = trainer_of(config, fault_steps)
    history = reference.run()
    skipped = [step in fault_steps for step in range(NUM_STEPS)]
    assert [loss is None for loss in history.losses] == skipped, "also if the loss is finite and only a gradient is not"
    rest = [loss for loss in history.losses if loss is not None]
    assert history.evaluated[0].train_loss == pytest.approx(np.mean(rest), rel=1e-6)
    assert (history.skipped, reference.state.skips) == (3, 0)
    clean_trainer = trainer_of(config)
    clean_trainer.run()
    assert (vector(reference) != vector(clean_trainer)).any()
    assert np.isfinite(vector(reference)).all()
    first, _ = train_and_save(replace(config, stop=StopSettings(steps=2)), tmp_path, fault_steps)
    assert (first.state.skipped, first.state.skips) == (1, 1)
    second, _ = train_and_save(config, tmp_path, tuple(step - 2 for step in fault_steps))
    assert (second.state.skipped, second.history.losses) == (3, history.losses)
    assert (vector(second) == vector(reference)).all()


def test_skips_in_succession_have_a_bound_that_a_resume_keeps(tmp_path: Path) -> None:
    message = r"step 4: .* after 2 steps in succession were skipped \(max_skips 2\), expected finite numbers"
    for steps in ((1, 2, 3), (0,)):
        assert re.search(message, train_and_save(skipping_config(2), tmp_path, steps)[1])


def test_a_skipped_step_changes_no_statistics_and_no_optimizer_state() -> None:
    def module() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    config = replace(skipping_config(1), training=replace(skipping_config(1).training, optimizer="adamw"))
    trainer = trainer_of(config, (2,), in_losses, module())
    while trainer.state.step < 2:
        trainer.step()
    state = trainer.engine.optimizers[0].state
    before = {name: value.clone() for name, value in trainer.engine.parts[0].state_dict().items()}
    moments = [value.clone() for row in state.values() for value in row.values()]
    trainer.step()
    assert trainer.state.skips == 1
    after = trainer.engine.parts[0].state_dict()
    assert any("running_mean" in name for name in before)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(map(torch.equal, moments, (value for row in state.values() for value in row.values())))


@pytest.mark.parametrize("fault", [in_gradients, in_losses_alone])
def test_adascale_discards_the_noise_of_a_skipped_step(fault: Fault) -> None:
    training = replace(skipping_config(1).training, accumulate=2)
    config = replace(CONFIG, training=training, rate=RateSettings(scale="adascale", base_batch=2))
    # A step has two accumulation steps.
    trainer = trainer_of(config, (4,), fault)
    while trainer.state.step < 2:
        trainer.step()
    before = trainer.state.noise
    trainer.step()
    assert trainer.state.skipped == 1
    assert trainer.state.noise == before
    trainer.step()
    assert trainer.state.noise.count == before.count + 1
    assert math.isfinite(trainer.state.noise.steps)


def test_fp16_lowers_its_scale_only_while_that_can_help() -> None:
    trainer = trainer_of(replace(CONFIG, parallel=ParallelSettings(precision="fp16")), (1, 2, 3), in_gradients)
    trainer.engine.load_scale_state({"loss_scale": 4.0})
    with pytest.raises(Diverged, match="FN-1333"):
        trainer.run()
    assert trainer.engine.scale_state["loss_scale"] == 1.0
    assert trainer.state.skipped == 2


@pytest.mark.parametrize("name", ["model.weight", "optimizer.bias.momentum_buffer"])
def test_values_that_are_not_finite_are_never_saved(tmp_path: Path, name: str) -> None:
    engine = trainer_of(CONFIG).engine
    linear = engine.parts[0]
    with Checkpoints(tmp_path, engine) as checkpoints:
        batch = Batch(inputs=torch.ones(4, 3), targets=torch.ones(4, 1))
        engine.step(batch)
        checkpoints.save(Progress(step=1))
        values = {
            "model.weight": linear.weight,
            **{f"optimizer.bias.{key}": value for key, value in engine.optimizers[0].state[linear.bias].items()},
        }
        with torch.no_grad():
            values[name].view(-1)[0] = math.inf
        with pytest.raises(
            Diverged, match=f"step-00000002: got {name} with values that are not finite, expected finite"
        ):
            checkpoints.save(Progress(step=2))
    assert latest(tmp_path) == Progress(step=1)


def test_a_save_under_way_is_completed_when_all_ranks_diverge(tmp_path: Path) -> None:
    saved_steps: list[int] = []
    with pytest.raises(Diverged, match="together"), Checkpoints(tmp_path, trainer_of(CONFIG).engine) as checkpoints:
        checkpoints.on_written = saved_steps.append
        checkpoints.save(Progress(step=1))
        raise Diverged("together")
    assert saved_steps == [1]
    assert latest(tmp_path) == Progress(step=1)


def test_values_that_do_not_train_may_be_infinite(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 1)
    module.register_buffer("mask", torch.full((2,), -math.inf))
    module.register_parameter("fixed", torch.nn.Parameter(torch.full((2,), -math.inf), requires_grad=False))
    engine = trainer_of(CONFIG, module=module).engine
    with Checkpoints(tmp_path, engine) as checkpoints:
        checkpoints.save(Progress(step=1))
    assert latest(tmp_path) == Progress(step=1)


def test_powersgd_and_skips_exclude_each_other() -> None:
    hook = CommunicationSettings(hook="powersgd")
    parallel = ParallelSettings(mesh=ParallelSettings().mesh.fit(2))
    with pytest.raises(InvalidInput, match="FN-1257"):
        replace(skipping_config(1), communication=hook, parallel=parallel)
    # The scale of the loss grows until gradients overflow, and the step is skipped.
    scaled = replace(parallel, precision="fp16")
    with pytest.raises(InvalidInput, match="FN-1257"):
        replace(CONFIG, communication=hook, parallel=scaled)


APP = """
import dataclasses, torch
from fanin.datacenter.models.digits_app import app as digits
steps = [0]
def app():
    digits_app = digits()
    def loss(outputs, targets):
        losses = digits_app.loss(outputs, targets)
        steps[0] += torch.is_grad_enabled()
        return losses * float("nan") if torch.is_grad_enabled() and steps[0] == 2 else losses
    return dataclasses.replace(digits_app, loss=loss)
"""


def parse_strict_json(text: str) -> object:
    def refuse(name: str) -> None:
        raise ValueError(f"got {name}, which is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("max_skips", [0, 1])
def test_a_jobs_files_are_json_and_a_restart_does_not_repeat_it(tmp_path: Path, max_skips: int) -> None:
    (tmp_path / "app.py").write_text(APP)
    rng = np.random.default_rng(0)
    x, y = rng.random((40, 1, 8, 8), np.float32), rng.integers(0, 10, 40, np.int32)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    config = replace(
        skipping_config(max_skips),
        model=ModelSettings(app=f"{tmp_path / 'app.py'}:app"),
        data=DataSettings(examples=tmp_path / "data.npz"),
        checkpoints=CheckpointSettings(folder=tmp_path / "kept", every=1),
    )
    # Status 0, because torchrun would restart the ranks otherwise, with the same result.
    assert main([str(write_config(config, tmp_path))]) == 0
    rows = [parse_strict_json(line) for line in (tmp_path / ROWS_FILE).read_text().splitlines()]
    trace = [parse_strict_json(line) for line in (tmp_path / "kept" / TRACE_FILE).read_text().splitlines()]
    if max_skips == 0:
        assert isinstance(read_error(tmp_path), Diverged)
        assert len(rows) == len(trace) == 1
        return
    assert len(rows) == NUM_STEPS
    assert [row["loss"] is None for row in rows if isinstance(row, dict)].index(True) == 1
    assert {"loss": None} in trace
    parse_strict_json((tmp_path / "metrics.json").read_text())
    history = read_result(tmp_path).metrics.trained
    assert (history.losses[1], history.skipped) == (None, 1)

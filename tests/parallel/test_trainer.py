"""The end of training, the parameters that are kept, evaluation, and plain SGD with momentum."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fanin.clients.data.examples import Examples
from fanin.datacenter.checkpoints.resumable import JobCheckpoints
from fanin.datacenter.checkpoints.trace import TRACE_FILE
from fanin.datacenter.config.rates import RateSettings
from fanin.datacenter.config.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    StopSettings,
)
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.samples import DataSplit, ExampleSamples
from fanin.datacenter.observers.events import Event, StepEnded, StepSettled, TrainingEnded
from fanin.datacenter.observers.observer import Decision, Interrupt, Observers, TrainingObserver
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.objective import ScoredObjective, padded_objective
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.training.loop import TrainingLoop
from fanin.datacenter.training.parameters import parameter_vector
from fanin.datacenter.training.state import LoopStart, LoopState
from fanin.edge.export import cross_entropy, next_token, squared_error
from fanin.protos.errors import Diverged, InvalidInput, StorageFull

CONFIG = TrainConfig(
    model=ModelSettings(app="made:here"),
    data=DataSettings(examples=Path("made-here.npz")),
    training=TrainingSettings(batch_size=16, learning_rate=0.1, optimizer="sgd"),
    stop=StopSettings(epochs=3),
)


def linear() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Linear(4, 3)


def data(num: int, seed: int) -> Examples:
    """Return examples whose labels a linear model can learn only in part."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 4)).astype(np.float32)
    return Examples(inputs={"x": x}, y=(x[:, :3] + 0.5 * rng.normal(size=(num, 3))).argmax(axis=1).astype(np.int32))


def split_of(train: Examples, held_out: Examples) -> DataSplit:
    return DataSplit(train=ExampleSamples(train), held_out=ExampleSamples(held_out))


def engine_of(
    config: TrainConfig, module: torch.nn.Module | None = None, loss: object = cross_entropy
) -> tuple[Engine, ScoredObjective]:
    assert callable(loss)
    scored = ScoredObjective(padded_objective(loss))
    model = TrainableModel(module=module or linear(), layout=config.model.parallel_layout, objective=scored.objective)
    return build_engine(model, config.parallel, config.training, None), scored


def trainer_of(
    config: TrainConfig, split: DataSplit, module: torch.nn.Module | None = None, loss: object = cross_entropy
) -> TrainingLoop:
    return TrainingLoop(*engine_of(config, module, loss), config, split)


class Recorder:
    """An observer that keeps the events, and decides when a step has settled."""

    def __init__(self, decide: Callable[[int], Decision | None] = lambda step: None) -> None:
        self.events: list[Event] = []
        self._decide = decide

    def on(self, event: Event) -> Decision | None:
        self.events.append(event)
        return self._decide(event.num_steps) if isinstance(event, StepSettled) else None

    @property
    def steps(self) -> list[StepEnded]:
        return [event for event in self.events if isinstance(event, StepEnded)]


def observed_start(observer: TrainingObserver, state: LoopState | None = None) -> LoopStart:
    """Return the start of a loop with one observer."""
    return LoopStart(state=state or LoopState(), observers=Observers([observer]))


class Killed(Exception):
    """Simulates the death of the process."""


class Killer:
    """An observer that kills the job after some step."""

    def __init__(self, stop_at: int) -> None:
        self._stop_at = stop_at

    def on(self, event: Event) -> None:
        if isinstance(event, StepSettled) and event.num_steps >= self._stop_at:
            raise Killed


def vector(trainer: TrainingLoop) -> np.ndarray:
    return parameter_vector(trainer.engine.parts[0])


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_is_torchs_own_sgd_on_the_mean_loss(microbatches: int) -> None:
    module, reference, examples = linear(), linear(), data(7, 0)
    training = replace(CONFIG.training, batch_size=8)
    config = replace(CONFIG, training=training, parallel=ParallelSettings(microbatches=microbatches))
    trainer = trainer_of(config, split_of(examples, examples), module)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        logits = reference(torch.from_numpy(examples.inputs["x"]))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(examples.y).long())
        loss.backward()
        optimizer.step()
        # Seven samples do not fill a batch of eight, so each step is an epoch of all samples.
        assert trainer.step()
        assert trainer.history.losses[step] == pytest.approx(loss.item(), abs=1e-6)
    assert np.abs(parameter_vector(module) - parameter_vector(reference)).max() < 1e-6


def test_training_stops_when_flat_and_keeps_the_best_evaluation() -> None:
    evaluation = EvaluationSettings(patience=4, min_delta=1e-3, keep="best")
    training = replace(CONFIG.training, learning_rate=0.3)
    config = replace(CONFIG, training=training, stop=StopSettings(epochs=200), evaluation=evaluation)
    trainer = trainer_of(config, split_of(data(60, 1), data(60, 2)))
    history = trainer.run()
    assert history.flat
    assert len(history.evaluated) == history.best + 4 < 200
    best = history.evaluated[history.best - 1]
    assert all(each.validation_loss >= best.validation_loss - 1e-3 for each in history.evaluated)
    assert trainer.evaluate() == (best.validation_loss, best.validation_accuracy)
    last_trainer = trainer_of(
        replace(config, evaluation=replace(evaluation, keep="last")), split_of(data(60, 1), data(60, 2))
    )
    last_trainer.run()
    assert (vector(last_trainer) != vector(trainer)).any()


def test_training_stops_at_the_limit_that_comes_first() -> None:
    split = split_of(data(60, 1), data(60, 2))
    for stop, steps in ((StopSettings(epochs=3), 12), (StopSettings(epochs=3, steps=5), 5), (StopSettings(steps=9), 9)):
        history = trainer_of(replace(CONFIG, stop=stop), split).run()
        assert (len(history.losses), history.flat) == (steps, False)
        assert history.evaluated[-1].step == steps


def test_evaluations_follow_their_period_and_the_last_step() -> None:
    config = replace(CONFIG, stop=StopSettings(steps=10), evaluation=EvaluationSettings(every=4, num_samples=5))
    history = trainer_of(config, split_of(data(60, 1), data(60, 2))).run()
    assert [each.step for each in history.evaluated] == [4, 8, 10]
    # The first steps have full batches, so the mean over samples is the mean over steps.
    assert history.evaluated[0].train_loss == pytest.approx(np.mean(history.losses[:3]), abs=0.2)
    short_history = trainer_of(replace(config, stop=StopSettings(steps=3)), split_of(data(60, 1), data(60, 2))).run()
    assert short_history.evaluated[0].train_loss == pytest.approx(np.mean(short_history.losses), rel=1e-6)


def test_an_observer_may_end_a_job_at_once() -> None:
    recorder = Recorder(lambda step: Interrupt(reason="enough") if step == 2 else None)
    trainer = TrainingLoop(*engine_of(CONFIG), CONFIG, split_of(data(60, 1), data(60, 2)), observed_start(recorder))
    history = trainer.run()
    assert (len(history.losses), history.evaluated) == (2, ())
    assert trainer.interrupted
    assert recorder.events[-1] == TrainingEnded(num_steps=2, reason="enough", interrupted=True)


def test_the_seed_decides_the_order() -> None:
    def trained_vector(seed: int) -> np.ndarray:
        trainer = trainer_of(replace(CONFIG, seed=seed), split_of(data(60, 1), data(60, 2)))
        trainer.run()
        return vector(trainer)

    assert (trained_vector(1) == trained_vector(1)).all()
    assert (trained_vector(1) != trained_vector(2)).any()


def test_the_rate_is_that_of_the_step() -> None:
    config = replace(CONFIG, rate=RateSettings(warm_up=4), stop=StopSettings(steps=6))
    trainer, rates = trainer_of(config, split_of(data(60, 1), data(60, 2))), []
    for _ in range(6):
        trainer.step()
        rates.append(trainer.engine.optimizers[0].param_groups[0]["lr"])
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_evaluation_is_over_all_examples() -> None:
    examples = data(2 * 16 + 3, 1)
    trainer = trainer_of(CONFIG, split_of(examples, examples))
    logits = trainer.engine.parts[0](torch.from_numpy(examples.inputs["x"])).detach()
    loss, accuracy = trainer.evaluate()
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(examples.y).long()).item()
    assert loss == pytest.approx(expected, abs=1e-6)
    assert accuracy == (logits.argmax(dim=1).numpy() == examples.y).mean()


def test_accuracy_counts_tokens_with_a_target_and_no_values() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))
    x = np.arange(12, dtype=np.int32).reshape(4, 3) % 5
    predictions = module(torch.from_numpy(x)).argmax(dim=-1).numpy().astype(np.int32)
    # One prediction is wrong, and one has no target.
    y = predictions.copy()
    y[0, 0], y[1, 1] = (predictions[0, 0] + 1) % 5, -1
    tokens = Examples(inputs={"x": x}, y=y)
    assert trainer_of(CONFIG, split_of(tokens, tokens), module, next_token).evaluate()[1] == 10 / 11
    values = Examples(inputs={"x": np.ones((4, 2), np.float32)}, y=np.zeros((4, 1), np.float32))
    loss, accuracy = trainer_of(CONFIG, split_of(values, values), torch.nn.Linear(2, 1), squared_error).evaluate()
    assert loss > 0.0
    assert accuracy == 0.0


def test_a_learning_rate_that_is_too_high_is_reported() -> None:
    config = replace(CONFIG, training=replace(CONFIG.training, learning_rate=1e38))
    message = r"step \d+: got loss nan and gradient norm \S+ \(learning rate 1e\+38\), expected finite numbers"
    with pytest.raises(Diverged, match=message):
        trainer_of(config, split_of(data(60, 1), data(60, 2))).run()


def train_until_kill(config: TrainConfig, split: DataSplit, stop_at: int) -> TrainingLoop:
    """Run a job that is killed after some step. It loses everything that is not saved."""
    engine, scored = engine_of(config)
    with JobCheckpoints(config.checkpoints, engine, config.seed, writes=True) as keeper:
        observers = Observers([keeper, Killer(stop_at)])
        start = keeper.start(observers)
        trainer = TrainingLoop(engine, scored, config, split, start)
        keeper.follow(trainer, observers.publish)
        with suppress(Killed):
            trainer.run()
    return trainer


@pytest.mark.parametrize("kill_step", [3, 4, 5, 11])
@pytest.mark.parametrize("scale", ["none", "adascale"])
def test_a_killed_job_resumes_with_the_same_losses(tmp_path: Path, kill_step: int, scale: str) -> None:
    evaluation = EvaluationSettings(patience=20)
    base_batch, accumulate = (0, 1) if scale == "none" else (4, 4)
    rate = RateSettings(warm_up=3, decay="cosine", scale=scale, base_batch=base_batch)
    training = replace(CONFIG.training, accumulate=accumulate)
    config = replace(CONFIG, evaluation=evaluation, rate=rate, training=training)
    config = replace(config, checkpoints=CheckpointSettings(folder=tmp_path / "c", every=2))
    split = split_of(data(60, 1), data(60, 2))
    reference = trainer_of(config, split)
    reference.run()
    train_until_kill(config, split, kill_step)
    with (tmp_path / "c" / TRACE_FILE).open("a") as trace:
        trace.write('{"loss": 1.')
    resumed_trainer = train_until_kill(config, split, 99)
    assert resumed_trainer.history == reference.history
    assert resumed_trainer.state == reference.state
    assert (resumed_trainer.state.noise.steps > 11) == (scale == "adascale")
    assert (vector(resumed_trainer) == vector(reference)).all()
    # The same command has nothing left to do, and reports the same result.
    assert train_until_kill(config, split, 99).history.evaluated == reference.history.evaluated


def test_adascale_resumes_from_steps_without_it() -> None:
    rate = RateSettings(warm_up=3, decay="cosine", scale="adascale", base_batch=4)
    config = replace(CONFIG, rate=rate, training=replace(CONFIG.training, accumulate=4))
    recorder = Recorder()
    start = observed_start(recorder, LoopState(step=7))
    trainer = TrainingLoop(*engine_of(config), config, split_of(data(60, 1), data(60, 2)), start)
    assert trainer.state.noise.steps == 7.0
    trainer.step()
    assert trainer.state.step == 8
    assert 8.0 <= trainer.state.noise.steps <= 11.0
    assert recorder.steps[0].rate > config.training.learning_rate / 10, "it is not warmed up again"


def test_a_finished_job_writes_no_checkpoint_again(tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoints=CheckpointSettings(folder=tmp_path / "c", every=3))
    split = split_of(data(60, 1), data(60, 2))
    train_until_kill(config, split, 99)

    def files() -> dict[Path, int]:
        return {path: path.stat().st_ino for path in (tmp_path / "c").rglob("*")}

    before = files()
    assert len(before) > 3
    trainer = trainer_of(config, split)
    with JobCheckpoints(config.checkpoints, trainer.engine, config.seed, writes=True) as keeper:
        trainer.state = keeper.state
        keeper.save(trainer)
    assert files() == before


def test_a_job_resumes_with_its_loss_scale(tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoints=CheckpointSettings(folder=tmp_path / "c"))
    config = replace(config, parallel=ParallelSettings(precision="fp16"))
    split = split_of(data(60, 1), data(60, 2))
    first, second = trainer_of(config, split), trainer_of(config, split)
    first.engine.load_scale_state({"loss_scale": 8.0, "loss_scale_calm": 3.0})
    with JobCheckpoints(config.checkpoints, first.engine, config.seed, writes=True) as keeper:
        keeper.save(first)
    assert second.engine.scale_state != first.engine.scale_state
    with JobCheckpoints(config.checkpoints, second.engine, config.seed, writes=True):
        assert second.engine.scale_state == first.engine.scale_state


def test_a_trace_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoints=CheckpointSettings(folder=tmp_path / "c", every=2))
    split = split_of(data(60, 1), data(60, 2))
    train_until_kill(config, split, 4)
    before = (tmp_path / "c" / TRACE_FILE).read_bytes()
    # A folder at the path of the draft simulates a full disk.
    (tmp_path / "c" / f"{TRACE_FILE}.new").mkdir()
    with pytest.raises(StorageFull, match=r"steps.jsonl.new: the trace could not be written .*; step-00000004 stays"):
        train_until_kill(config, split, 8)
    assert (tmp_path / "c" / TRACE_FILE).read_bytes() == before
    (tmp_path / "c" / f"{TRACE_FILE}.new").rmdir()
    assert len(train_until_kill(config, split, 8).history.losses) == 8


def test_a_checkpoint_that_cannot_resume_is_refused(tmp_path: Path) -> None:
    split = split_of(data(60, 1), data(60, 2))
    config = replace(CONFIG, checkpoints=CheckpointSettings(folder=tmp_path / "c", every=2))
    train_until_kill(config, split, 2)
    with pytest.raises(InvalidInput, match="got seed 5, expected 0 as in the checkpoint"):
        train_until_kill(replace(config, seed=5), split, 4)
    engine = trainer_of(config, split).engine
    with pytest.raises(InvalidInput, match="checkpoints: got folder /dev/null/c, expected a place that can be written"):
        JobCheckpoints(CheckpointSettings(folder=Path("/dev/null/c")), engine, 0, writes=True)
    with pytest.raises(InvalidInput, match=r"got resume .*none, expected a folder with a complete checkpoint"):
        JobCheckpoints(CheckpointSettings(resume=tmp_path / "none"), engine, 0, writes=True)
    keeper = JobCheckpoints(CheckpointSettings(resume=tmp_path / "c", folder=tmp_path / "d"), engine, 0, writes=True)
    assert keeper.state.step == 2
    assert len(keeper.history.losses) == 2
    assert JobCheckpoints(CheckpointSettings(), engine, 0, writes=True).state == LoopState()


def test_a_job_with_other_samples_does_not_resume(tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoints=CheckpointSettings(folder=tmp_path / "c", every=2))
    split = split_of(data(60, 1), data(60, 2))
    train_until_kill(config, split, 2)
    engine = trainer_of(config, split).engine
    state = JobCheckpoints(config.checkpoints, engine, 0, writes=True).state
    assert state.num_samples == 60
    for examples, message in (
        (data(61, 1), "got 61 samples to train on, expected 60 as in the checkpoint after 2 steps"),
        (data(60, 3), r"got other samples to train on, or another order of them .* checkpoint after 2 steps \("),
    ):
        other_split, scored = split_of(examples, data(60, 2)), ScoredObjective(padded_objective(cross_entropy))
        with pytest.raises(InvalidInput, match=message):
            TrainingLoop(engine, scored, config, other_split, LoopStart(state=state))


def test_a_checkpoint_keeps_the_steps_of_a_decay() -> None:
    split = split_of(data(60, 1), data(60, 2))
    config = replace(CONFIG, rate=RateSettings(decay="cosine"), stop=StopSettings(steps=6))
    trainer = trainer_of(config, split)
    while trainer.state.step < 3:
        trainer.step()
    long_config = replace(config, stop=StopSettings(steps=9))
    scored = ScoredObjective(padded_objective(cross_entropy))
    with pytest.raises(
        InvalidInput, match=r"got a learning rate that decays over 9 steps, expected 6 .* decay_steps = 6"
    ):
        TrainingLoop(trainer.engine, scored, long_config, split, LoopStart(state=trainer.state))
    same_config = replace(long_config, rate=RateSettings(decay="cosine", decay_steps=6))
    recorder = Recorder()
    TrainingLoop(trainer.engine, scored, same_config, split, observed_start(recorder, trainer.state)).run()
    rates = [each.rate for each in recorder.steps]
    expected = [0.1 * 0.5 * (1 + np.cos(np.pi * step / 5)) for step in range(6)]
    assert rates == pytest.approx([*expected[3:], 0.0, 0.0, 0.0])
    # A constant rate has no end that another number of steps could move.
    TrainingLoop(
        trainer.engine,
        scored,
        replace(CONFIG, stop=StopSettings(steps=9)),
        split,
        observed_start(recorder, replace(trainer.state, rate_steps=0)),
    )
    with pytest.raises(
        InvalidInput, match="rate: got decay_steps 4 and decay 'constant', expected 0 or more steps, and 0"
    ):
        RateSettings(decay_steps=4)
    with pytest.raises(InvalidInput, match=r"rate: got floor 0\.2 and decay 'constant', expected decay 'cosine'"):
        RateSettings(floor=0.2)

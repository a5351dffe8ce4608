"""A training that is killed resumes from its saved state, with the bits of one that was not killed."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from support.linear import NUM_CLASSES, NUM_INPUTS, linear_graphs
from support.remote_runtime import runtime_of
from support.staged import Course, Killed, Moments, course, take_part
from support.values import PUBLISHER

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.conditions import AssignmentOver, Interrupted, ShouldContinue
from fanin.clients.device.contract import Countdown, example_assignment, example_model
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.storage.trainings import RESERVE_BYTES, TrainingStore
from fanin.clients.device.training.resuming import SavePolicy, decode_partial
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.updates import Change
from fanin.edge.assembly.assemble import assemble
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Runtime
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.simulation import SyntheticTrainer

EPOCHS = 10
BATCHES = 3
"""Batches of 4 in an epoch of 10 examples."""
NUM_STEPS = EPOCHS * BATCHES
NUM_EVALUATED = 2
"""Batches of the validation part, before the first step."""
ALWAYS = SavePolicy(save_s=0.0, max_share=np.inf)
RUNTIMES = ("onnx", "litert", "tflite")


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return assemble(linear_graphs(), tmp_path_factory.mktemp("linear") / "bundle", PUBLISHER)


def store(num: int = 17) -> MemoryStore:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((17, NUM_INPUTS)).astype(np.float32)
    y = rng.integers(0, NUM_CLASSES, 17).astype(np.int32)
    return MemoryStore(
        partition=0,
        train=Examples(inputs={"x": x[:10]}, y=y[:10]),
        validation=Examples(inputs={"x": x[10:num]}, y=y[10:num]),
    )


def work_of(bundle: Bundle) -> m.Assignment:
    return example_assignment(bundle, m.Training(epochs=EPOCHS, learning_rate=0.1, seed=1))


class Clock:
    """A clock that the test advances: by one second a batch."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Batches:
    """A ``should_continue`` that counts seconds, and ends the process before batch ``kill_at``."""

    clock: Clock
    kill_at: int = -1
    end: Callable[[], BaseException] = lambda: Killed("batch")
    num: int = 0

    def __call__(self) -> bool:
        if self.num == self.kill_at:
            raise self.end()
        self.num += 1
        self.clock.now_s += 1.0
        return True


@dataclass
class Device:
    """The folder of a device. Each training is a new process."""

    folder: Path
    bundle: Bundle
    policy: SavePolicy = ALWAYS
    runtime: Runtime | None = None
    examples: MemoryStore | None = None

    def train(
        self, kill_at: int = -1, end: Callable[[], BaseException] = lambda: Killed("batch")
    ) -> tuple[Change, int]:
        """Train once. Return the Change and the number of batches."""
        clock, work = Clock(), work_of(self.bundle)
        examples = self.examples or store()
        trainer = RuntimeTrainer(self.runtime or open_runtime("onnx"), examples, policy=replace(self.policy, now=clock))
        batches = Batches(clock, kill_at, end)
        model = replace(example_model(self.bundle), saved=TrainingStore(self.folder / "trainings").open(work))
        return trainer.train(model, work, batches), batches.num

    @property
    def saved(self) -> int | None:
        """The step of the saved state."""
        data = TrainingStore(self.folder / "trainings").open(work_of(self.bundle)).read()
        if data is None:
            return None
        line = bytes(data).partition(b"\n")[0].decode()
        return int(line.partition('"num_steps":')[2].partition(",")[0])


def bits(change: Change) -> tuple[bytes, object, object, object, int]:
    return change.values.tobytes(), change.counts, change.ranges, change.local, change.num_steps


@pytest.fixture(scope="module")
def expected(linear: Bundle) -> Change:
    return RuntimeTrainer(open_runtime("onnx"), store()).train(example_model(linear), work_of(linear), Countdown())


@pytest.mark.parametrize("step", [0, 1, 3, 6, 8, 27, 29])
def test_a_training_killed_before_any_step_returns_the_same_bits(
    linear: Bundle, tmp_path: Path, expected: Change, step: int
) -> None:
    device = Device(tmp_path, linear)
    with pytest.raises(Killed):
        device.train(kill_at=NUM_EVALUATED + step)
    change, num_batches = device.train()
    assert bits(change) == bits(expected)
    # Each step is saved, so none is repeated, and the evaluation is not either.
    assert num_batches == (NUM_STEPS - step if step else NUM_EVALUATED + NUM_STEPS)


@pytest.mark.parametrize(
    ("policy", "step", "saved"),
    [
        # The evaluation takes 2 s. So the first epoch ends after 5 s, and the third one 6 s later.
        (SavePolicy(save_s=4.0, max_share=np.inf), 7, 3),
        (SavePolicy(save_s=4.0, max_share=np.inf), 12, 9),
        # 6 x 0.25 s within an epoch.
        (SavePolicy(save_s=0.25, max_share=np.inf), 4, 3),
        (SavePolicy(save_s=0.25, max_share=np.inf), 5, 5),
        (SavePolicy(save_s=np.inf), 20, None),
        (SavePolicy(), 8, None),
        (SavePolicy(), 17, 9),
    ],
)
def test_the_state_is_saved_at_the_ends_of_epochs_and_within_long_ones(
    linear: Bundle, tmp_path: Path, expected: Change, policy: SavePolicy, step: int, saved: int | None
) -> None:
    device = Device(tmp_path, linear, policy)
    with pytest.raises(Killed):
        device.train(kill_at=NUM_EVALUATED + step)
    assert device.saved == saved
    change, _ = device.train()
    assert bits(change) == bits(expected)


def test_a_slow_disk_is_used_rarely() -> None:
    policy = SavePolicy(save_s=1.0, max_share=0.02)
    assert policy.is_due(1.0, 0.0, ends_epoch=True)
    assert not policy.is_due(49.0, 1.0, ends_epoch=True)
    assert policy.is_due(50.0, 1.0, ends_epoch=True)
    assert not policy.is_due(5.9, 0.0, ends_epoch=False)


def test_a_device_that_must_pause_saves_its_state_at_once(linear: Bundle, tmp_path: Path, expected: Change) -> None:
    device = Device(tmp_path, linear, SavePolicy(save_s=1000.0))
    with pytest.raises(Interrupted):
        device.train(NUM_EVALUATED + 8, lambda: Interrupted("may_work no longer holds"))
    assert device.saved == 8
    # Killed in the second process, before its first step: the state of the first process is still there.
    with pytest.raises(Killed):
        device.train(0)
    change, num_batches = device.train()
    assert (bits(change), num_batches) == (bits(expected), NUM_STEPS - 8)


def test_an_assignment_that_is_over_saves_nothing(linear: Bundle, tmp_path: Path) -> None:
    device = Device(tmp_path, linear, SavePolicy(save_s=1000.0))
    with pytest.raises(AssignmentOver):
        device.train(NUM_EVALUATED + 8, lambda: AssignmentOver("the round has closed"))
    assert device.saved is None


def test_a_resumed_training_may_be_killed_again_and_again(linear: Bundle, tmp_path: Path, expected: Change) -> None:
    device = Device(tmp_path, linear)
    with pytest.raises(Killed):
        device.train(NUM_EVALUATED + 1)
    for _ in range(5):
        with pytest.raises(Killed):
            device.train(1)
    change, num_batches = device.train()
    assert (bits(change), num_batches) == (bits(expected), NUM_STEPS - 6)


def other_examples(device: Device) -> None:
    device.examples = store(16)


def damaged(device: Device) -> None:
    (path,) = (device.folder / "trainings").iterdir()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(device: Device) -> None:
    (path,) = (device.folder / "trainings").iterdir()
    path.write_bytes(path.read_bytes()[:-5])


def of_another_bundle(device: Device) -> None:
    work = work_of(device.bundle)
    other = replace(work, bundle=replace(work.bundle, manifest=artifact_of(b"other")))
    file = TrainingStore(device.folder / "trainings").open(other)
    assert file.write((b"anything",))


@pytest.mark.parametrize("change", [other_examples, damaged, cut, of_another_bundle])
def test_a_state_that_does_not_fit_is_logged_and_not_used(
    linear: Bundle, tmp_path: Path, change: Callable[[Device], None], caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(tmp_path, linear)
    with pytest.raises(Killed):
        device.train(NUM_EVALUATED + 8)
    change(device)
    result, num_batches = device.train()
    assert num_batches == NUM_EVALUATED + NUM_STEPS
    fresh = RuntimeTrainer(open_runtime("onnx"), device.examples or store())
    assert bits(result) == bits(fresh.train(example_model(linear), work_of(linear), Countdown()))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("data", [b"", b"{}\n", b"[]\n", b"\xff\n", b'{"digest":"d"}\n1234'])
def test_bytes_of_another_form_are_no_state(data: bytes) -> None:
    assert decode_partial(memoryview(data), "d", 1, 0) is None


def test_a_short_disk_and_a_large_state_stop_no_training(
    linear: Bundle, tmp_path: Path, expected: Change, caplog: pytest.LogCaptureFixture
) -> None:
    work = work_of(linear)
    for free, max_bytes in ((RESERVE_BYTES, 1 << 20), (1 << 40, 50)):
        caplog.clear()
        saved = TrainingStore(tmp_path / "trainings", max_bytes, free=lambda _folder, free=free: free).open(work)
        trainer = RuntimeTrainer(open_runtime("onnx"), store(), policy=ALWAYS)
        change = trainer.train(replace(example_model(linear), saved=saved), work, Countdown())
        assert bits(change) == bits(expected)
        assert len(caplog.records) == 1 and "the training continues, but cannot be saved" in caplog.text
        assert list((tmp_path / "trainings").iterdir()) == []


def test_the_progress_names_the_epoch(linear: Bundle, tmp_path: Path) -> None:
    trainer = RuntimeTrainer(open_runtime("onnx"), store())
    seen = []

    def look() -> bool:
        seen.append(trainer.progress_of("run.1.device"))
        return True

    trainer.train(example_model(linear), work_of(linear), look)
    assert seen[NUM_EVALUATED + 7] == m.TrainingProgress(step=7, num_steps=30, epoch=3, num_epochs=10)
    last = m.TrainingProgress(step=30, num_steps=30, epoch=10, num_epochs=10)
    assert trainer.progress_of("run.1.device") == last


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "runtime"),
    [
        pytest.param(name, runtime, marks=() if (name, runtime) == ("noisy", "onnx") else pytest.mark.nightly)
        for name in ("noisy", "cnn", "lstm")
        for runtime in RUNTIMES
    ],
)
def test_momentum_statistics_and_dropout_resume_on_every_runtime(
    tmp_path: Path, name: str, runtime: str, bundle_for: Callable[[str, str], Bundle]
) -> None:
    from support.models import samples

    bundle = bundle_for(name, runtime)
    x, y = samples(70, seed=3)
    examples = Examples(inputs={"x": x}, y=y)
    device = Device(
        tmp_path,
        bundle,
        runtime=runtime_of(runtime),
        examples=MemoryStore(partition=1, train=examples, validation=None),
    )
    expected, num_steps = Device(tmp_path / "other", bundle, SavePolicy(), device.runtime, device.examples).train()
    per_epoch = num_steps // EPOCHS
    for step in (per_epoch, 2 * per_epoch + per_epoch // 2, num_steps - 1):
        with pytest.raises(Killed):
            device.train(kill_at=step)
        assert device.saved == step
        change, num_batches = device.train()
        assert (bits(change), num_batches) == (bits(expected), num_steps - step)
        TrainingStore(tmp_path / "trainings").clear()


class SavingTrainer:
    """A trainer of an app that saves a text before it trains."""

    def __init__(self) -> None:
        self._inner = SyntheticTrainer(partition=0)
        self.runtime, self.graph_format = self._inner.runtime, self._inner.graph_format
        self.texts: list[bytes | None] = []

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        assert model.saved is not None
        content = model.saved.read()
        self.texts.append(None if content is None else bytes(content))
        assert model.saved.write((b"round ", str(assignment.round).encode()))
        return self._inner.train(model, assignment, should_continue)


def fleet_in(folder: Path) -> Course:
    return course(folder, [(0, 0), (0, 0)], ())


def test_the_saved_state_of_an_app_ends_with_its_assignment(tmp_path: Path) -> None:
    trainer, fleet = SavingTrainer(), fleet_in(tmp_path)
    take_part(fleet, tmp_path, trainer)
    assert trainer.texts == [None, None]
    assert list((tmp_path / "device" / "trainings").iterdir()) == []


def test_a_device_that_is_killed_at_any_moment_keeps_at_most_one_state(tmp_path: Path) -> None:
    moments = Moments()
    expected = take_part(fleet_in(tmp_path / "calm"), tmp_path / "calm", SavingTrainer(), moments)
    assert "TrainingStore.open" in moments.names and "TrainingStore.clear" in moments.names
    for number in range(1, len(moments.names) + 1):
        folder = tmp_path / str(number)
        fleet, trainer = fleet_in(folder), SavingTrainer()
        with pytest.raises(Killed):
            take_part(fleet, folder, trainer, Moments(kill_at=number))
        assert len(list((folder / "device" / "trainings").iterdir())) <= 1
        assert take_part(fleet, folder, trainer) == expected
        assert all(text in (None, b"round 1", b"round 2") for text in trainer.texts)
        assert list((folder / "device" / "trainings").iterdir()) == []

"""An example store that changes between Rounds: each Round uses the current data, and bad data fail one Round only."""

import random
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from support.one_device import rounds, take_part
from support.values import PUBLISHER, assignment

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore, snapshot
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.session import events as e
from fanin.clients.device.session.machine import Session
from fanin.clients.device.session.outcomes import UnfitBundle
from fanin.clients.device.session.progress import progress
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.updates import Change
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.base import (
    BatchEvaluation,
    Evaluate,
    MeasureRanges,
    PaddedBatch,
    Predict,
    StepSettings,
    TrainState,
    TrainStep,
)
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput
from fanin.simulation import LoopbackTransport, VirtualDevice


def examples(*values: float) -> Examples:
    """Return one example for each value."""
    return Examples(inputs={"x": np.array(values, np.float32)[:, None]}, y=np.zeros(len(values), np.int32))


@dataclass
class Recording:
    """A runtime that does not train, and records the inputs of each Round. It calls ``during`` at each step."""

    during: Callable[[], None] = lambda: None
    trained: list[list[float]] = field(default_factory=list)
    validated: list[list[float]] = field(default_factory=list)
    name: str = "recording 1"
    graph_format: str = "onnx"

    def open_train(self, bundle: Bundle) -> TrainStep:
        return Step(self)

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        def evaluate(parameters: Float32s, batch: PaddedBatch, *, with_logits: bool = False) -> BatchEvaluation:
            self.validated[-1].append(float(batch.inputs["x"][0, 0]))
            return BatchEvaluation(loss_sum=0.0, predicted=batch.y)

        return evaluate

    def open_predict(self, bundle: Bundle, parameters: Float32s, ranges: Float32s | None = None) -> Predict:
        self.validated.append([])
        return lambda x: np.zeros((len(x), 1), np.float32)

    def open_ranges(self, bundle: Bundle, parameters: Float32s) -> MeasureRanges:
        raise AssertionError("no ranges are measured here")


@dataclass
class Step:
    """A train step that changes nothing."""

    runtime: Recording

    def begin(self, parameters: Float32s) -> TrainState:
        self.runtime.trained.append([])
        return TrainState(parameters=parameters, optimizer=np.zeros(0, np.float32))

    def __call__(self, state: TrainState, batch: PaddedBatch, settings: StepSettings) -> tuple[TrainState, float]:
        self.runtime.trained[-1].append(float(batch.inputs["x"][0, 0]))
        self.runtime.during()
        return state, 0.0


@dataclass
class Growing:
    """A store with one more example in each Round. ``bad`` maps a Round to a replacement of its training part."""

    bad: dict[int, object] = field(default_factory=dict)
    num_reads: Counter[str] = field(default_factory=Counter)
    values: list[float] = field(default_factory=lambda: [1.0])

    def grow(self) -> None:
        self.values = [*self.values, self.values[-1] + 1.0]

    @property
    def partition(self) -> int:
        self.num_reads["partition"] += 1
        return 3

    @property
    def train(self) -> Examples:
        self.num_reads["train"] += 1
        part = self.bad.get(self.num_reads["train"], None)
        if isinstance(part, Exception):
            raise part
        return examples(*self.values) if part is None else part  # type: ignore[return-value]  # an app's store may

    @property
    def validation(self) -> Examples:
        self.num_reads["validation"] += 1
        return examples(*(-value for value in self.values))


def run_device(folder: Path, runtime: Recording, store: Growing, num_rounds: int) -> tuple[int, list[str]]:
    """Run one device for some Rounds. Return (accepted Updates, reasons of the Assignments that it gave up)."""
    fleet = rounds(folder, num_rounds)
    transport = LoopbackTransport(fleet=fleet, device="device", latency_s=0.01)
    trainer = RuntimeTrainer(runtime, store)
    device = VirtualDevice(transport, trainer, (PUBLISHER.public,), random.Random(1), lambda *_: 1.0)
    take_part(fleet, device)
    return device.session.num_accepted, fleet.failures


def test_each_round_uses_only_the_current_examples_of_the_store(tmp_path: Path) -> None:
    store = Growing()
    # The store grows during a Round. The next Round uses the new example.
    runtime = Recording(during=lambda: store.grow())
    assert run_device(tmp_path, runtime, store, 3) == (3, [])
    # The store grows at each step, and each example is a step, so the store doubles.
    assert [sorted(values) for values in runtime.trained] == [[1.0], [1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]
    assert runtime.validated == [[-1.0], [-1.0, -2.0], [-1.0, -2.0, -3.0, -4.0]]
    assert store.num_reads == {"partition": 3, "train": 3, "validation": 3}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (OSError("the database is locked"), "example store: train: OSError: the database is locked [FN-0870]"),
        (
            [1.0, 2.0],
            (
                "example store: train: got list, expected fanin.clients.data.examples.Examples(inputs={'x': ...}, "
                "y=...) [FN-0870]"
            ),
        ),
        (
            Examples(inputs={"x": np.zeros((2, 7), np.float32)}, y=np.zeros(2, np.int32)),
            "training: training examples: x: got float32 (2, 7), expected float32 (n, 1) [FN-0843]",
        ),
    ],
    ids=["raises", "type", "shape"],
)
def test_bad_data_in_a_later_round_fail_that_round_alone(
    tmp_path: Path, bad: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Recording()
    assert run_device(tmp_path, runtime, Growing(bad={2: bad}), 3) == (2, [reason])
    assert len(runtime.trained) == 2
    assert ("Traceback" in caplog.text) is isinstance(bad, Exception)


def test_the_traceback_of_a_store_that_fails_again_is_logged_once_a_series(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fault = OSError("the database is locked")
    store = Growing(bad={2: fault, 3: fault, 5: fault})
    assert run_device(tmp_path, Recording(), store, 5) == (
        2,
        ["example store: train: OSError: the database is locked [FN-0870]"] * 3,
    )
    assert caplog.text.count("Traceback") == 2


def test_a_store_without_data_at_the_start_may_get_some_later(tmp_path: Path) -> None:
    accepted, reasons = run_device(tmp_path, Recording(), Growing(bad={1: ValueError("no examples yet")}), 2)
    assert (accepted, reasons) == (1, ["example store: train: ValueError: no examples yet [FN-0870]"])


@pytest.mark.parametrize("partition", [-1, 1.5, "1", None])
def test_a_partition_is_a_number(partition: object) -> None:
    @dataclass
    class Store:
        partition: object
        train: Examples = field(default_factory=lambda: examples(1.0))
        validation: Examples = field(default_factory=lambda: examples(2.0))

    with pytest.raises(InvalidInput, match="FN-0870"):
        snapshot(Store(partition))  # type: ignore[arg-type]  # an app's store may be anything
    assert snapshot(Store(np.int64(4))).partition == 4  # type: ignore[arg-type]


def test_a_part_that_was_replaced_is_freed(tmp_path: Path) -> None:
    @dataclass
    class Replaced:
        now: MemoryStore

        partition = 0
        train = property(lambda self: self.now.train)
        validation = property(lambda self: self.now.validation)

    store = Replaced(MemoryStore(partition=0, train=examples(1.0), validation=examples(2.0)))
    fleet, trainer = rounds(tmp_path, 1), RuntimeTrainer(Recording(), store)
    transport = LoopbackTransport(fleet=fleet, device="device", latency_s=0.01)
    take_part(fleet, VirtualDevice(transport, trainer, (PUBLISHER.public,), random.Random(1), lambda *_: 1.0))
    old = weakref.ref(store.now.train)
    store.now = replace(store.now, train=examples(3.0))
    assert old() is None


@dataclass
class Fixed:
    """A store that returns the same parts until ``now`` is replaced. ``good`` sets the parts from a read onwards."""

    now: MemoryStore
    num_reads: int = 0
    good: tuple[int, Examples] | None = None

    partition = 0

    @property
    def train(self) -> Examples:
        self.num_reads += 1
        if self.good is not None and self.num_reads > self.good[0]:
            self.now = replace(self.now, train=self.good[1])
        return self.now.train

    @property
    def validation(self) -> Examples:
        return self.now.validation


def test_data_that_do_not_fit_are_not_tried_again_until_they_change(tmp_path: Path) -> None:
    unfit = Examples(inputs={"x": np.zeros((2, 7), np.float32)}, y=np.zeros(2, np.int32))
    # Each Round reads the store once. The fourth Round reads it twice, because its data have changed.
    store = Fixed(MemoryStore(partition=0, train=unfit, validation=examples(2.0)), good=(3, examples(3.0)))
    fleet, runtime = rounds(tmp_path, 5), Recording()
    transport = LoopbackTransport(fleet=fleet, device="device", latency_s=0.01)
    trained_rounds: list[int] = []

    class Counted(RuntimeTrainer):
        def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
            trained_rounds.append(assignment.round)
            return super().train(model, assignment, should_continue)

    device = VirtualDevice(transport, Counted(runtime, store), (PUBLISHER.public,), random.Random(1), lambda *_: 1.0)
    take_part(fleet, device)
    assert (
        fleet.failures == ["training: training examples: x: got float32 (2, 7), expected float32 (n, 1) [FN-0843]"] * 3
    )
    assert (trained_rounds, device.session.num_accepted) == ([1, 4, 5], 2)


def test_a_process_logs_once_that_its_data_do_not_fit() -> None:
    work = assignment(2)
    unfit = e.Unable(reason="training examples: x", is_lasting=True)
    known = UnfitBundle(bundle_sha256=work.bundle.manifest.sha256, reason=unfit.reason, has_changed=lambda: False)
    session = Session(phase=e.SessionPhase.TRAINING, assignment=work)
    line = "round 2 of run run: the data do not fit; this device trains again once its data or the Bundle changes"
    assert progress(session, unfit) == line
    refused = "round 2 of run run: refused by the privacy floor of this device, which fanin policy show prints"
    assert progress(session, replace(unfit, code="FN-1700")) == refused
    reply = m.UploadReply(round_state=m.RoundState.OPEN, update_state=m.UpdateState.DISCARDED)
    silent = [
        (e.Poll(), e.Answered(answer=m.Assigned(assignment=work))),
        (e.Fetch(assignment=work), unfit),
        (e.Abandon(assignment=work, reason=unfit.reason), e.Replied(reply=reply)),
    ]
    assert all(known.is_repeated_by(action, event) for action, event in silent)
    loud = [
        (e.Poll(), e.Lost(reason="no connection")),
        (e.Refresh(publication=work.publication), e.Unable(reason="it does not verify")),
    ]
    assert not any(known.is_repeated_by(action, event) for action, event in loud)
    other = replace(known, bundle_sha256="0" * 64)
    assert not other.is_repeated_by(*silent[0])

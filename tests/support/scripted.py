"""A device's client over a scripted connection: one Assignment, and faults on demand."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.serving import Serving
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.updates import Change, Trainer
from fanin.clients.operator import ref_of
from fanin.clients.transport import ReadPayload
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.versions import sign_version
from fanin.edge.runtimes.base import BatchEvaluation, Evaluate, MeasureRanges, PaddedBatch, Predict, Runtime, TrainStep
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.chunks import cut
from fanin.protos.errors import (
    Unavailable,
)
from fanin.simulation import SyntheticTrainer, synthetic_bundle
from support.values import GRID, PUBLISHER, assignment

THREE = Examples(inputs={"x": np.zeros((3, 1), np.float32)}, y=np.zeros(3, np.int32))
SHAPES = {"a": (2, 3), "b": (4,), "c": ()}
OPEN, CLOSED = m.RoundState.OPEN, m.RoundState.CLOSED


@dataclass
class Script:
    """A coordinator that has one Assignment. It raises each of ``faults`` once, by the name of the call."""

    bundle: Bundle
    work: m.Assignment
    faults: dict[str, Exception] = field(default_factory=dict)
    break_at: int = -1
    answer: m.CheckInAnswer | None = None
    calls: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    headers: list[m.UpdateHeader] = field(default_factory=list)
    served_bytes: dict[str, int] = field(default_factory=dict)
    stop: Callable[[], None] = lambda: None

    def enroll(self, token: str) -> str:
        self._call("enroll")
        return "device"

    def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        self._call("check_in")
        if self.answer is not None:
            self.stop()
        return self.answer or m.Assigned(assignment=self.work)

    def download(self, download: m.Download) -> Iterator[bytes]:
        self._call("download")
        names = self.bundle.manifest.artifacts
        known = (self.bundle.signed.data, *(self.bundle.artifact(name) for name in names))
        data = {ref.sha256: piece for artifact in known for ref, piece in cut(artifact)}[download.sha256]
        for at in range(download.offset, len(data)):
            if sum(self.served_bytes.values()) == self.break_at:
                self.break_at = -1
                raise Unavailable("the line broke")
            self.served_bytes[download.sha256] = self.served_bytes.get(download.sha256, 0) + 1
            yield data[at : at + 1]

    def upload(self, header: m.UpdateHeader, read: ReadPayload) -> m.UploadReply:
        self._call("upload")
        self.headers.append(header)
        return m.UploadReply(round_state=CLOSED, update_state=m.UpdateState.ACCEPTED)

    def report(self, report: m.Report) -> m.UploadReply:
        self._call("report")
        self.failures.append(report.failure)
        self.stop()
        return m.UploadReply(round_state=OPEN, update_state=m.UpdateState.DISCARDED)

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.faults:
            raise self.faults.pop(name)


def scripted_coordinator(tmp_path: Path) -> Script:
    """Return a coordinator with a Bundle of three parameters, whose files are under ``tmp_path``."""
    bundle = synthetic_bundle(tmp_path / "bundle", PUBLISHER, SHAPES)
    version = sign_version(
        PUBLISHER,
        parent=None,
        run_id="run",
        bundle_sha256=bundle.sha256,
        parameters=bundle.manifest.artifacts["initial"],
    )
    work = replace(assignment(), bundle=ref_of(bundle.signed), version=version, grid=GRID)
    return Script(bundle=bundle, work=work)


@dataclass
class FailingTrainer:
    """A trainer that fails once, then draws its Update."""

    fault: Exception | None
    runtime: str = "synthetic 1"
    graph_format: str = "onnx"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        return SyntheticTrainer(partition=0).train(model, assignment, should_continue)


def client_of(
    script: Script,
    folder: Path,
    trainer: Trainer | None = None,
    max_bytes: int = 1 << 20,
    may_work: Callable[[], bool] = lambda: True,
    runtime: Runtime | None = None,
    max_updates: int = 1,
) -> Client:
    """Return a client that stops after accepted Updates or an abandoned Assignment. With a runtime it serves."""
    cache = Cache(folder / "device", max_bytes)
    parts = ClientParts(
        transport=script,
        cache=cache,
        trainer=trainer or SyntheticTrainer(partition=0),
        trusted=(PUBLISHER.public,),
        rng=NoPauses(),
        serving=None if runtime is None else Serving(runtime, cache, (PUBLISHER.public,)),
    )
    client = Client(
        parts,
        ClientOptions(token="token", max_updates=max_updates, may_work=may_work, recheck_s=0.001, ask_every_s=0.0),
    )
    script.stop = client.stop
    return client


def run(script: Script, folder: Path, trainer: Trainer | None = None, max_bytes: int = 1 << 20) -> Client:
    """Run a client until its Update is accepted, or until it gives up an Assignment."""
    client = client_of(script, folder, trainer, max_bytes)
    client.run()
    return client


class NoPauses(random.Random):
    """Draws pauses of 0 s: a device repeats a failed step at once."""

    def uniform(self, a: float, b: float) -> float:
        return 0.0


@dataclass(frozen=True)
class LosingRuntime:
    """A runtime that returns this loss and these predictions."""

    loss_sum: float
    infer: Float32s | None = None
    name: str = "losing 1"
    graph_format: str = "onnx"

    def open_train(self, bundle: Bundle) -> TrainStep:
        raise AssertionError("nothing is trained from such a Version")

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        def evaluate(parameters: Float32s, batch: PaddedBatch, *, with_logits: bool = False) -> BatchEvaluation:
            return BatchEvaluation(loss_sum=self.loss_sum, predicted=batch.y)

        return evaluate

    def open_predict(self, bundle: Bundle, parameters: Float32s, ranges: Float32s | None = None) -> Predict:
        return lambda inputs: np.zeros((len(inputs["x"]), 1), np.float32) if self.infer is None else self.infer

    def open_ranges(self, bundle: Bundle, parameters: Float32s) -> MeasureRanges:
        raise AssertionError("no ranges are measured here")


@dataclass(frozen=True)
class Store:
    """A store with three examples in each part."""

    partition: int = 0
    train: Examples = THREE
    validation: Examples = THREE

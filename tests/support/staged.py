"""A coordinator for one device of a Run with stages, over the client's Transport. Tests kill the device anywhere."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np

from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.contract import Countdown, example_model
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.updates import Trainer
from fanin.clients.operator import ref_of
from fanin.clients.transport import ReadPayload
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.versions import add_auxiliary, sign_version
from fanin.edge.tensors import Float32s, TensorTable, encode_parameters
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of, cut
from fanin.simulation import SyntheticTrainer, synthetic_bundle
from fanin.simulation.federation.synthetic import NO_SHAPES
from support.values import PUBLISHER, assignment

SHAPES = {"a": (2, 3), "b": (4,)}
NUM = 10
EXPONENT = -8
"""Steps of 1/256. A synthetic change has a standard deviation of 1/100, so rounding removes a large part of it."""
FEEDBACK = m.StageSpec(name="error_feedback")
SCAFFOLD = m.StageSpec(name="scaffold", options={"num_devices": 4.0})


@dataclass
class Course:
    """A coordinator with a sequence of Assignments. ``payloads`` are the accepted Updates by Round."""

    bundle: Bundle
    works: list[m.Assignment]
    chunks: dict[str, bytes]
    payloads: dict[int, bytes] = field(default_factory=dict)
    headers: dict[int, m.UpdateHeader] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    served: set[str] = field(default_factory=set)
    check_ins: list[m.CheckIn] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None

    def enroll(self, token: str) -> str:
        return "device"

    def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        self.check_ins.append(check_in)
        if self.works:
            return m.Assigned(assignment=self.works[0])
        self.stop()
        return m.Wait(retry_min_s=0.0, retry_max_s=0.0)

    def download(self, download: m.Download) -> Iterator[bytes]:
        for sha256 in (download.sha256, *download.more_sha256):
            self.served.add(sha256)
            yield self.chunks[sha256]
            yield b""

    def upload(self, header: m.UpdateHeader, read: ReadPayload) -> m.UploadReply:
        number = self.works.pop(0).round
        self.headers[number], self.payloads[number] = header, read(0, header.payload.size_bytes)
        return m.UploadReply(round_state=m.RoundState.CLOSED, update_state=m.UpdateState.ACCEPTED)

    def report(self, report: m.Report) -> m.UploadReply:
        self.failures.append(report.failure)
        self.works.pop(0)
        if not self.works:
            # Stop before the pause that the client makes after it gave up an Assignment.
            self.stop()
        return m.UploadReply(round_state=m.RoundState.OPEN, update_state=m.UpdateState.DISCARDED)

    def close(self) -> None:
        pass

    @property
    def table(self) -> TensorTable:
        return self.bundle.manifest.table


def auxiliary_bytes(values: Float32s) -> bytes:
    """Return the canonical form of an auxiliary tensor, as fleet.proto defines it."""
    return encode_parameters(TensorTable.of({"values": values.shape}), values)


def course(
    folder: Path,
    states: list[tuple[int, int]],
    stages: tuple[m.StageSpec, ...] = (FEEDBACK,),
    *,
    local: Mapping[str, tuple[int, ...]] = NO_SHAPES,
    **fields: object,
) -> Course:
    """Return a Run whose Assignment of Round k, from 1 on, begins with the state ``states[k - 1]`` (lineage, Round).

    Its Versions have the numbers 0, 1, .. If a stage is ``scaffold``, all Versions except the first one of a lineage
    have the auxiliary tensor ``control``. ``local`` are personal parameters.
    """
    scaffold = SCAFFOLD in stages
    bundle = synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES, scaffold=scaffold, local=local)
    files = [bundle.signed.data, *(bundle.artifact(name) for name in bundle.manifest.artifacts)]
    works, parent = [], None
    for index, (lineage, number) in enumerate(states):
        data = encode_parameters(bundle.manifest.table, bundle.initial_parameters() + np.float32(index))
        auxiliary = auxiliary_bytes(control_of(index))
        files += [data, auxiliary]
        parent = sign_version(
            PUBLISHER, parent=parent, run_id="run", bundle_sha256=bundle.sha256, parameters=artifact_of(data)
        )
        if scaffold and lineage < index:
            parent = add_auxiliary(PUBLISHER, parent, {"control": artifact_of(auxiliary)})
        work = replace(
            assignment(index + 1),
            bundle=ref_of(bundle.signed),
            version=parent,
            grid=(EXPONENT,) * (4 if scaffold else 2),
            stages=stages,
            state=m.StageState(lineage=lineage, round=number),
        )
        works.append(replace(work, **fields))
    chunks = {ref.sha256: piece for data in files for ref, piece in cut(data)}
    return Course(bundle=bundle, works=works, chunks=chunks)


def control_of(index: int) -> Float32s:
    """Return the auxiliary tensor of a Version, a multiple of the grid's step."""
    return (np.arange(NUM) * 2.0**EXPONENT * index).astype(np.float32)


def encode_values(values: Float32s) -> tuple[bytes, Float32s]:
    """Return the payload of ``fixed32`` for the values, and the values that the coordinator reads from it."""
    steps = np.rint(values.astype(np.float64) / 2.0**EXPONENT)
    return steps.astype("<i4").tobytes(), (steps * 2.0**EXPONENT).astype(np.float32)


def scaffold(fleet: Course, works: Sequence[m.Assignment]) -> Mapping[int, bytes]:
    """Compute the payloads of SCAFFOLD with error feedback by Round, from algorithm 1 of the paper."""
    states: dict[tuple[int, int], tuple[Float32s, Float32s]] = {}
    payloads, zeros = {}, np.zeros(NUM, np.float32)
    for work in works:
        lineage, rate = work.state.lineage, np.float32(work.training.learning_rate)
        control, residual = states.get((lineage, work.state.round), (zeros, zeros))
        c = zeros if lineage == work.version.number else control_of(work.version.number)
        noise = SyntheticTrainer(partition=0).train(example_model(fleet.bundle), work, Countdown()).values
        change = noise - rate * (c - control)
        first, decoded = encode_values(change + residual)
        second, control_change = encode_values((-change.astype(np.float64) / float(rate) - c).astype(np.float32))
        payloads[work.round] = first + second
        states[lineage, work.round] = (control + control_change, (change + residual - decoded).astype(np.float32))
    return payloads


class Killed(BaseException):
    """The end of a process. No code catches it."""


@dataclass
class Moments:
    """A counter of the moments of a device's life, which kills it at one of them."""

    kill_at: int = 0
    names: list[str] = field(default_factory=list)

    def __call__(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) == self.kill_at:
            raise Killed(name)


class Watched:
    """An object with a moment before each method call. Between the calls, a device changes no durable state."""

    def __init__(self, inner: object, moments: Moments) -> None:
        self._inner = inner
        self._moments = moments

    def __getattr__(self, name: str) -> object:
        value = getattr(self._inner, name)
        if name in ("chunks", "updates", "states", "locals", "trainings", "records"):
            return Watched(value, self._moments)
        if not callable(value) or name in ("read", "has", "header", "highest_version", "rounds"):
            return value

        def call(*arguments: object) -> object:
            self._moments(f"{type(self._inner).__name__}.{name}")
            return value(*arguments)

        return call


def take_part(
    fleet: Course, folder: Path, trainer: Trainer | None = None, moments: Moments | None = None
) -> Mapping[int, bytes]:
    """Run a client over a folder until the coordinator has no work. Return the accepted payloads by Round."""
    cache, transport = Cache(folder / "device", 1 << 20), fleet
    if moments is not None:
        cache, transport = cast("Cache", Watched(cache, moments)), cast("Course", Watched(fleet, moments))
    parts = ClientParts(
        transport=transport,
        cache=cache,
        trainer=trainer or SyntheticTrainer(partition=0),
        trusted=(PUBLISHER.public,),
        rng=random.Random(1),
    )
    client = Client(parts, ClientOptions(token="token"))
    fleet.stop = client.stop
    client.run()
    return fleet.payloads

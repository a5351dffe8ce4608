"""The trainings of clients by the exported graphs: in this process or as tasks of a backend, bit-identical.

A task's job has the index of its client, the parameters, the personal ones of the client, the ranges of the
activations, the inputs of its stages and the Assignment. The Bundle and the examples of all clients are placed once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore, memory_store
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.updates import Change
from fanin.edge.bundles.bundle import Bundle, SignedManifest, folder_reader
from fanin.edge.metrics.metric import NO_METRICS, Metric
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import MeasureRanges, Predict, Runtime
from fanin.edge.tensors import Float32s, Int64s
from fanin.protos import messages as m
from fanin.protos.wire import from_proto, to_proto
from fanin.simulation.backends.backend import Backend, Placed
from fanin.simulation.data.partitioning import Partition
from fanin.v1 import fleet_pb2 as pb

FORMAT: Final = "onnx"
KEPT_CLIENTS: Final = 64
"""Clients whose trainers a worker keeps. Each holds a copy of its examples."""
G = TypeVar("G")
PendingTraining = Callable[[], Change]
"""Waits for a training and returns its result. It raises the errors of ``RuntimeTrainer.train``."""


class SharedGraphs(BundleGraphs):
    """The open graphs of all clients. It keeps ``infer`` of the newest Version, too: all clients of a Round use it."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._predict: _Newest[Predict] | None = None
        self._ranges: _Newest[MeasureRanges] | None = None

    def open_predict(self, bundle: Bundle, parameters: Float32s, ranges: Float32s | None = None) -> Predict:
        if self._predict is None or not self._predict.is_of(bundle, parameters, ranges):
            graph = super().open_predict(bundle, parameters, ranges)
            self._predict = _Newest(bundle, parameters, ranges, graph)
        return self._predict.graph

    def open_ranges(self, bundle: Bundle, parameters: Float32s) -> MeasureRanges:
        if self._ranges is None or not self._ranges.is_of(bundle, parameters, None):
            self._ranges = _Newest(bundle, parameters, None, super().open_ranges(bundle, parameters))
        return self._ranges.graph


class _Newest(Generic[G]):
    """A graph that is open for one Version."""

    def __init__(self, bundle: Bundle, parameters: Float32s, ranges: Float32s | None, graph: G) -> None:
        # A Version's parameters are read-only.
        self._parameters = parameters.copy() if parameters.flags.writeable else parameters
        self._bundle_sha256, self._ranges, self.graph = bundle.sha256, ranges, graph

    def is_of(self, bundle: Bundle, parameters: Float32s, ranges: Float32s | None) -> bool:
        """Return whether the graph is open for these parameters (num_values,) and ranges."""
        pairs = ((self._parameters, parameters), (self._ranges, ranges))
        return self._bundle_sha256 == bundle.sha256 and all(
            known is other or (known is not None and other is not None and np.array_equal(known, other))
            for known, other in pairs
        )


class RecordFailed(Exception):
    """A result cannot be written to the record of a simulation. The client's training has not failed."""


class Trainings(Protocol):
    """The place where the clients of a simulation train."""

    def begin(self, client: int, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0) -> PendingTraining:
        """Begin the training of a client for an Assignment. Its result is collected at the virtual time ``due_s``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedBundle:
    """A Bundle that travels to workers: the signed manifest, and the Chunks of its artifacts by digest."""

    signed: SignedManifest
    chunks: Mapping[str, bytes]

    @classmethod
    def read(cls, bundle: Bundle, folder: Path) -> "PlacedBundle":
        """Read a Bundle's folder."""
        read = folder_reader(folder)
        digests = [ref.sha256 for artifact in bundle.manifest.artifacts.values() for ref in artifact.chunks]
        return cls(signed=bundle.signed, chunks={digest: read(digest) for digest in digests})

    def open(self) -> Bundle:
        """Verify and open the Bundle."""
        return Bundle.open(self.signed, trusted=(self.signed.public_key,), read=self.chunks.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphSubject:
    """The Bundle and the examples of all clients.

    Attributes:
        bundle: The Bundle.
        examples: All examples.
        indices: The indices of the examples of all clients, one client after the other.
        bounds: Where the indices of each client begin (clients + 1,).
        validation_fraction: Share of each client's examples that it holds out.
        metrics: Metrics of the settings by name.
    """

    bundle: PlacedBundle
    examples: Examples
    indices: Int64s
    bounds: Int64s
    validation_fraction: float
    metrics: Mapping[str, Metric]

    @classmethod
    def of(
        cls, bundle: PlacedBundle, clients: Partition, validation_fraction: float, metrics: Mapping[str, Metric]
    ) -> "GraphSubject":
        """Return the subject of a simulation's clients."""
        return cls(
            bundle=bundle,
            examples=clients.examples,
            indices=np.concatenate(clients.indices),
            bounds=np.cumsum([0, *clients.sizes]),
            validation_fraction=validation_fraction,
            metrics=metrics,
        )

    def store(self, client: int) -> MemoryStore:
        """Return a client's example store."""
        rows = self.indices[self.bounds[client] : self.bounds[client + 1]]
        return memory_store(self.examples, client, self.validation_fraction, rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphJob:
    """One training."""

    subject: Placed[GraphSubject]
    client: int
    parameters: Placed[Float32s]
    local: Float32s | None
    ranges: Float32s | None
    inputs: Mapping[str, Float32s]
    assignment: bytes


class LocalTrainings:
    """The trainings of clients in this process, one after the other, with graphs that others use, too."""

    def __init__(
        self,
        graphs: BundleGraphs,
        clients: Partition,
        validation_fraction: float,
        metrics: Mapping[str, Metric] = NO_METRICS,
    ) -> None:
        def trainer(client: int) -> RuntimeTrainer:
            return RuntimeTrainer(graphs, clients.store(client, validation_fraction), metrics)

        self._trainer = lru_cache(maxsize=KEPT_CLIENTS)(trainer)

    def begin(self, client: int, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0) -> PendingTraining:
        """Return a training that runs when it is called. See Trainings."""
        return lambda: self._trainer(client).train(model, assignment, lambda: True)


class GraphTrainings:
    """The trainings of clients as tasks of a backend."""

    def __init__(self, backend: Backend, subject: GraphSubject) -> None:
        self._backend = backend
        self._subject = backend.place(subject)
        self._versions = PlacedVersions(backend)
        self._last: tuple[m.Assignment, bytes] | None = None

    def begin(self, client: int, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0) -> PendingTraining:
        """Begin a training in a worker. See Trainings."""
        job = GraphJob(
            subject=self._subject,
            client=client,
            parameters=self._versions.place(model, assignment),
            local=model.local,
            ranges=model.ranges,
            inputs=dict(model.inputs),
            assignment=self._encoded(assignment),
        )
        return self._backend.submit(train_graph_job, job, due_s)

    def _encoded(self, assignment: m.Assignment) -> bytes:
        """Return the bytes of an Assignment with which the client trains the same.

        The clients of a Round receive the same bytes, so that each worker decodes them once: a training does not depend
        on the Assignment's name and deadline.
        """
        if self._last is not None:
            last, data = self._last
            if replace(assignment, assignment_id=last.assignment_id, deadline_s=last.deadline_s) == last:
                return data
        data = to_proto(assignment, pb.Assignment).SerializeToString()
        self._last = assignment, data
        return data


class PlacedVersions:
    """The parameters of the newest Version, which all clients of a Round read."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._newest: tuple[str, Placed[Float32s]] | None = None

    def place(self, model: OpenedModel, assignment: m.Assignment) -> Placed[Float32s]:
        """Return the placed parameters of an Assignment's Version."""
        digest = assignment.version.parameters.sha256
        if self._newest is None or self._newest[0] != digest:
            self._newest = digest, self._backend.place(model.parameters)
        return self._newest[1]


def train_graph_job(job: GraphJob) -> Change:
    """Carry out a job in a worker. Raises the errors of ``RuntimeTrainer.train``."""
    bundle, trainer = _opened(job.subject)
    model = OpenedModel(
        bundle=bundle,
        parameters=_parameters(job.parameters),
        local=job.local,
        ranges=job.ranges,
        inputs=MappingProxyType(dict(job.inputs)),
    )
    change = trainer(job.client).train(model, read_assignment(job.assignment), lambda: True)
    return replace(change, counts=dict(change.counts))


@lru_cache(maxsize=1)
def read_assignment(data: bytes) -> m.Assignment:
    """Return the Assignment of a job."""
    return from_proto(m.Assignment, pb.Assignment.FromString(data))


@lru_cache(maxsize=1)
def _parameters(placed: Placed[Float32s]) -> Float32s:
    """Return the parameters of a Version, which a worker reads once for all its clients."""
    return placed.get()


@lru_cache(maxsize=1)
def _opened(placed: Placed[GraphSubject]) -> tuple[Bundle, Callable[[int], RuntimeTrainer]]:
    """Open a subject once a worker: its Bundle, and the trainer of each client."""
    subject = placed.get()
    graphs = SharedGraphs(open_runtime(FORMAT))

    @lru_cache(maxsize=KEPT_CLIENTS)
    def trainer(client: int) -> RuntimeTrainer:
        return RuntimeTrainer(graphs, subject.store(client), subject.metrics)

    return subject.bundle.open(), trainer

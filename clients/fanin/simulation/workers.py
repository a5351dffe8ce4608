"""The trainings of clients by the exported graphs: in this process or as tasks of a backend, bit-identical.

A task's job has the index of its client, the parameters, the personal ones of the client, the ranges of the
activations, the inputs of its stages and the Assignment. The Bundle and the examples of all clients are placed once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore, memory_store
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.updates import Change, Trainer
from fanin.edge.bundles.bundle import Bundle, SignedManifest, folder_reader
from fanin.edge.metrics.metric import NO_METRICS, Metric
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import MeasureRanges, Predict, Runtime
from fanin.edge.tensors import Float32s, Int64s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput
from fanin.protos.wire import from_proto, to_proto
from fanin.simulation.backends.backend import Backend, Placed
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.devices.work import ALL_WORK, BoundWork
from fanin.v1 import fleet_pb2 as pb

FORMAT: Final = "onnx"
KEPT_CLIENTS: Final = 64
"""Clients whose trainers a worker keeps. Each holds a copy of its examples."""
G = TypeVar("G")
PendingTraining = Callable[[], Change]
"""Waits for a training and returns its result. It raises the errors of ``RuntimeTrainer.train``."""
_Train = Callable[[OpenedModel, m.Assignment], Change]


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


TrainerFactory = Callable[[MemoryStore], Trainer]
"""Returns the trainer of the client whose examples a store has; ``partition`` is the index of the client."""


class OwnTrainer:
    """A trainer of the settings, with checks of its type and of its results.

    Args:
        factory: Creates it.
        store: The examples of its client.

    Raises:
        InvalidInput: The factory returned no trainer.
    """

    def __init__(self, factory: TrainerFactory, store: MemoryStore) -> None:
        self._trainer = factory(store)
        runtime: object = getattr(self._trainer, "runtime", None)
        if isinstance(self._trainer, type) or not callable(getattr(self._trainer, "train", None)):
            raise InvalidInput(
                f"simulate: trainer: returned {_kind(self._trainer)}, expected an object with the members of Trainer "
                "(docs/howto/trainer.md); pass a class or a function that returns one for the examples of a client",
                code="FN-1881",
            )
        if not isinstance(runtime, str) or not runtime:
            raise InvalidInput(
                f"simulate: trainer: got runtime {runtime!r}, expected a text, such as 'numpy': the library and its "
                "version; add the attribute",
                code="FN-1881",
            )
        self.runtime = runtime

    def train(self, model: OpenedModel, assignment: m.Assignment) -> Change:
        """Return the change of a training. Raises the errors of the trainer, and InvalidInput for another result."""
        change: object = self._trainer.train(model, assignment, lambda: True)
        if not isinstance(change, Change):
            raise InvalidInput(
                f"training: the trainer returned {_kind(change)}, expected fanin.clients.Change(values=..., "
                "counts={'examples': ...}); return one",
                code="FN-1882",
            )
        return change


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


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
        factory: Creates the trainers of the settings; None for those of the graphs.
        work: How many of its steps each client does.
    """

    bundle: PlacedBundle
    examples: Examples
    indices: Int64s
    bounds: Int64s
    validation_fraction: float
    metrics: Mapping[str, Metric]
    factory: TrainerFactory | None = None
    work: BoundWork = ALL_WORK

    @classmethod
    def of(
        cls,
        bundle: PlacedBundle,
        clients: Partition,
        validation_fraction: float,
        metrics: Mapping[str, Metric] = NO_METRICS,
        factory: TrainerFactory | None = None,
    ) -> "GraphSubject":
        """Return the subject of a simulation's clients."""
        return cls(
            bundle=bundle,
            examples=clients.examples,
            indices=np.concatenate(clients.indices),
            bounds=np.cumsum([0, *clients.sizes]),
            validation_fraction=validation_fraction,
            metrics=metrics,
            factory=factory,
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
        work: BoundWork = ALL_WORK,
    ) -> None:
        def trainer(client: int) -> RuntimeTrainer:
            return RuntimeTrainer(graphs, clients.store(client, validation_fraction), metrics, work=work.of(client))

        self._trainer = lru_cache(maxsize=KEPT_CLIENTS)(trainer)

    def begin(self, client: int, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0) -> PendingTraining:
        """Return a training that runs when it is called. See Trainings."""
        return lambda: self._trainer(client).train(model, assignment, lambda: True)


class OwnTrainings:
    """The trainings of clients by the trainers of the settings, in this process. Each client keeps its trainer."""

    def __init__(self, factory: TrainerFactory, clients: Partition, validation_fraction: float) -> None:
        def trainer(client: int) -> OwnTrainer:
            return OwnTrainer(factory, clients.store(client, validation_fraction))

        self._trainer = cache(trainer)

    def runtime_of(self, client: int) -> str:
        """Return the library with which a client trains. Raises InvalidInput, and the errors of the factory."""
        return self._trainer(client).runtime

    def begin(self, client: int, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0) -> PendingTraining:
        """Return a training that runs when it is called. See Trainings."""
        return lambda: self._trainer(client).train(model, assignment)


class GraphTrainings:
    """The trainings of clients as tasks of a backend."""

    def __init__(self, backend: Backend, subject: GraphSubject) -> None:
        self._backend = backend
        try:
            self._subject = backend.place(subject)
        except Exception as exc:
            # Any error: cloudpickle asks each object of the user how it is pickled.
            if subject.factory is None:
                raise
            raise InvalidInput(
                f"simulate: trainer: cannot be sent to another process ({type(exc).__name__}: {exc}); create what "
                "cannot be pickled in the trainer, or set processes=1",
                code="FN-1883",
            ) from exc
        self._versions = PlacedVersions(backend)
        self._last: tuple[m.Assignment, bytes] | None = None

    def begin(self, client: int, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0) -> PendingTraining:
        """Begin a training in a worker. See Trainings."""
        job = GraphJob(
            subject=self._subject,
            client=client,
            parameters=self._versions.place(model),
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
    """The parameters of the newest Version, which all clients of a Round read, or those of one client alone."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._newest: tuple[Float32s, Placed[Float32s]] | None = None

    def place(self, model: OpenedModel) -> Placed[Float32s]:
        """Return the placed parameters of a model. A fine-tuning may start from others than those of its Version."""
        if self._newest is None or not np.array_equal(self._newest[0], model.parameters):
            self._newest = model.parameters, self._backend.place(model.parameters)
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
    change = trainer(job.client)(model, read_assignment(job.assignment))
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
def _opened(placed: Placed[GraphSubject]) -> tuple[Bundle, Callable[[int], _Train]]:
    """Open a subject once a worker: its Bundle, and a function that trains each client."""
    subject = placed.get()
    factory = subject.factory
    if factory is not None:
        own = cache(lambda client: OwnTrainer(factory, subject.store(client)).train)
        return subject.bundle.open(), own
    graphs = SharedGraphs(open_runtime(FORMAT))

    @lru_cache(maxsize=KEPT_CLIENTS)
    def trainer(client: int) -> _Train:
        work = subject.work.of(client)
        runtime_trainer = RuntimeTrainer(graphs, subject.store(client), subject.metrics, work=work)
        return lambda model, assignment: runtime_trainer.train(model, assignment, lambda: True)

    return subject.bundle.open(), trainer

"""Worker processes: the trainings of a Round's clients side by side, with the bits of one process.

A training depends on its Bundle, Version, examples and seed alone, so it may run in any process. The examples are files
that all workers map into memory; a job has the index of its client, the parameters and the Assignment. The processes
are loky's, which starts them without running the caller's script again, and notices those that die.

Reference:
    loky, https://loky.readthedocs.io.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import memory_store
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training import RuntimeTrainer
from fanin.clients.device.updates import Change
from fanin.edge.bundles.bundle import Bundle, open_folder
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Inputs
from fanin.edge.tensors import Float32s, Int64s
from fanin.protos import messages as m
from fanin.protos.convert.assignment_wire import assignment_from_proto, assignment_to_proto
from fanin.simulation.data.partitioning import Partition
from fanin.v1 import fleet_pb2 as pb

if TYPE_CHECKING:
    pass

FORMAT: Final = "onnx"
KEPT_CLIENTS: Final = 64
"""Clients whose trainers a worker keeps. Each holds a copy of its examples."""


ARRAYS: Final = ("x", "y", "indices", "bounds")
"""The files of a partition: the examples, the indices of all clients, and where those of each client begin."""
PendingTraining = Callable[[], Change]
"""Waits for a training and returns its result. It raises the errors of ``RuntimeTrainer.train``."""


class Trainings(Protocol):
    """The place where the clients of a simulation train."""

    def begin(self, client: int, model: OpenedModel, assignment: m.Assignment) -> PendingTraining:
        """Begin the training of a client for an Assignment."""
        ...

    def close(self) -> None:
        """Free what the trainings used."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFiles:
    """The files that workers read.

    Attributes:
        bundle: The folder of the Bundle.
        data: The folder of the examples.
        publisher: The public key that signed the Bundle.
        validation_fraction: Share of each client's examples that it holds out.
    """

    bundle: Path
    data: Path
    publisher: str
    validation_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One training, for a worker that has the files."""

    files: WorkerFiles
    client: int
    parameters: Float32s
    inputs: Mapping[str, Float32s]
    assignment: bytes


def write_partition(clients: Partition, folder: Path) -> None:
    """Write the examples and the indices of each client, for ``WorkerFiles.data``."""
    folder.mkdir()
    bounds = np.cumsum([0, *clients.sizes])
    arrays = (clients.examples.x, clients.examples.y, np.concatenate(clients.indices), bounds)
    for name, array in zip(ARRAYS, arrays, strict=True):
        np.save(folder / f"{name}.npy", array)


class LocalTrainings:
    """The trainings of clients in this process, one after the other."""

    def __init__(self, graphs: BundleGraphs, clients: Partition, validation_fraction: float) -> None:
        def trainer(client: int) -> RuntimeTrainer:
            return RuntimeTrainer(graphs, memory_store(clients[client], client, validation_fraction))

        self._trainer = lru_cache(maxsize=KEPT_CLIENTS)(trainer)

    def begin(self, client: int, model: OpenedModel, assignment: m.Assignment) -> PendingTraining:
        """Return a training that runs when it is called. See Trainings."""
        return lambda: self._trainer(client).train(model, assignment, lambda: True)

    def close(self) -> None:
        """See Trainings."""


class WorkerPool:
    """Worker processes for the trainings of clients."""

    def __init__(self, num_processes: int, files: WorkerFiles) -> None:
        from loky import ProcessPoolExecutor

        self._files = files
        # A worker that is idle for long has another Round to wait for: it never leaves.
        self._executor: ProcessPoolExecutor = ProcessPoolExecutor(num_processes, timeout=None)

    def begin(self, client: int, model: OpenedModel, assignment: m.Assignment) -> PendingTraining:
        """Begin a training in a worker. See Trainings."""
        job = TrainingJob(
            files=self._files,
            client=client,
            parameters=model.parameters,
            inputs=dict(model.inputs),
            assignment=assignment_to_proto(assignment).SerializeToString(),
        )
        future: Future[Change] = self._executor.submit(train_job, job)
        return future.result

    def close(self) -> None:
        """End the processes. See Trainings."""
        self._executor.shutdown(kill_workers=True)


def train_job(job: TrainingJob) -> Change:
    """Carry out a job in a worker. Raises the errors of ``RuntimeTrainer.train``."""
    message = pb.Assignment()
    message.ParseFromString(job.assignment)
    bundle = _bundle(job.files)
    model = OpenedModel(bundle=bundle, parameters=job.parameters, inputs=MappingProxyType(dict(job.inputs)))
    trainer = _trainer(job.files, job.client)
    change = trainer.train(model, assignment_from_proto(message), lambda: True)
    return Change(values=change.values, counts=dict(change.counts), num_steps=change.num_steps)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _MappedData:
    """The examples of all clients, mapped into memory."""

    x: Inputs
    y: Inputs
    indices: Int64s
    bounds: Int64s

    def of(self, client: int) -> Examples:
        """Return a client's examples."""
        own = self.indices[self.bounds[client] : self.bounds[client + 1]]
        return Examples(x=self.x[own], y=self.y[own])


@lru_cache(maxsize=1)
def _graphs(_: WorkerFiles) -> BundleGraphs:
    return BundleGraphs(open_runtime(FORMAT))


@lru_cache(maxsize=1)
def _bundle(files: WorkerFiles) -> Bundle:
    return open_folder(files.bundle, trusted=(files.publisher,))


@lru_cache(maxsize=1)
def _data(files: WorkerFiles) -> _MappedData:
    x, y, indices, bounds = (np.load(files.data / f"{name}.npy", mmap_mode="r") for name in ARRAYS)
    return _MappedData(x=x, y=y, indices=indices, bounds=bounds)


@lru_cache(maxsize=KEPT_CLIENTS)
def _trainer(files: WorkerFiles, client: int) -> RuntimeTrainer:
    store = memory_store(_data(files).of(client), client, files.validation_fraction)
    return RuntimeTrainer(_graphs(files), store)

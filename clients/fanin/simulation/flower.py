"""The clients of a simulation that train by a Flower app, as ``fanin join --flower`` does.

Each training is a task of a backend. It calls the app as client i of N: ``partition-id`` and ``num-partitions`` are in
``context.node_config``, as Flower's simulation engine sets them. The app's state between Rounds is a part of the job
and of the outcome. It is stored here when the outcome is collected, so a task that is lost or repeated leaves no trace.
"""

import contextlib
import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np

from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.clients.flower.project import names_folder
from fanin.clients.flower.states import FlowerState
from fanin.clients.flower.task import FlowerSettings
from fanin.clients.flower.trainer import FlowerTrainer
from fanin.edge.bundles.arrays import ArrayChoices, write_arrays
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.tensors import Array, Float32s
from fanin.protos import messages as m
from fanin.protos.errors import FaninError, InvalidInput, RuntimeMissing
from fanin.protos.wire import to_proto
from fanin.simulation.backends.backend import Backend, Placed
from fanin.simulation.workers import PendingTraining, PlacedBundle, PlacedVersions, read_assignment
from fanin.v1 import fleet_pb2

LOG = logging.getLogger("fanin.simulation")
LIBRARY: Final = "flwr"
INSTALL: Final = "flwr is not installed here; pip install 'fanin[flower]'"


def is_flower_app(app: object) -> bool:
    """Return whether the first argument of ``simulate`` is a Flower app, without importing flwr.

    Such an app is a ``FlowerSettings``, an object or a class of flwr or of a subclass, or a function ``client_fn``.
    """
    kind = app if isinstance(app, type) else type(app)
    libraries = {each.__module__.partition(".")[0] for each in kind.__mro__}
    return isinstance(app, FlowerSettings) or LIBRARY in libraries or inspect.isfunction(app)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowerSubject:
    """A Flower app and its clients.

    Attributes:
        settings: Where the app is imported from, and the configuration of all clients.
        app: The object of the app; None if ``settings`` names it.
        num_clients: Number of clients.
    """

    settings: FlowerSettings
    app: object
    num_clients: int

    @classmethod
    def of(cls, app: object, num_clients: object) -> "FlowerSubject":
        """Return the subject of ``simulate``'s first two arguments. Raises InvalidInput."""
        if not isinstance(num_clients, int) or isinstance(num_clients, bool) or num_clients < 1:
            received = num_clients if isinstance(num_clients, int) else type(num_clients).__name__
            raise InvalidInput(
                f"simulate: clients: got {received} with a Flower app, expected the number of clients, 1 or more: the "
                "app loads the data of its partition itself",
                code="FN-1170",
            )
        if isinstance(app, FlowerSettings):
            return cls(settings=app, app=None, num_clients=num_clients)
        name = getattr(app, "__name__", type(app).__name__)
        return cls(settings=FlowerSettings(app=name, folder=Path.cwd()), app=app, num_clients=num_clients)

    @property
    def name(self) -> str:
        """The name of the model."""
        return LIBRARY

    @property
    def runtime(self) -> str:
        """The library and its version."""
        return f"{LIBRARY} {version(LIBRARY)}"

    def client(self, partition: int) -> FlowerSettings:
        """Return the settings of a client."""
        node_config = f"num-partitions={self.num_clients} {self.settings.node_config}".strip()
        return replace(self.settings, partition=partition, node_config=node_config)

    def bundle(self, initial: object, keep: Sequence[str], folder: Path, key: SigningKey) -> Bundle:
        """Write the Bundle of the initial arrays.

        Args:
            initial: The arrays; None for those of ``NumPyClient.get_parameters``.
            keep: Patterns of the names of those that stay on each client.
            folder: The folder of the Bundle.
            key: The publisher's key.

        Raises:
            AppFailed: The app cannot be imported, or has no initial arrays.
            InvalidInput: The arrays are none, or their dtypes cannot be used.
        """
        return write_arrays(self._arrays(initial), folder, key, self.name, ArrayChoices(kept=keep))

    def _arrays(self, initial: object) -> Mapping[str, Array]:
        _require_flwr()
        from fanin.clients.flower.app import FlowerApp, arrays_of, initial_arrays

        # First: an app that no client can run is one error.
        app = FlowerApp(self.client(0), self.app)
        if initial is not None:
            return arrays_of(initial)
        if self.app is None and names_folder(self.settings):
            return initial_arrays(self.settings, app)
        if app.has_initial:
            return app.initial()
        raise InvalidInput(
            f"simulate: initial: got none, but {self.settings.app} has no NumPyClient.get_parameters; set initial in "
            "the settings to a torch module, a state dict or a list of arrays (--initial of the command), or name the "
            "folder of the project, whose ServerApp has them",
            code="FN-1171",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shared:
    """The objects that every training reads."""

    subject: FlowerSubject
    bundle: PlacedBundle


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowerJob:
    """One training, or an evaluation alone."""

    shared: Placed[_Shared]
    client: int
    parameters: Placed[Float32s]
    assignment: bytes
    state: FlowerState | None
    trains: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowerOutcome:
    """The result of a job, the app's state if the Round counts, and the warnings."""

    change: Change
    state: FlowerState | None
    warnings: Sequence[str]


class FlowerTrainings:
    """The trainings of the clients of a Flower app. See Trainings."""

    def __init__(self, backend: Backend, subject: FlowerSubject, bundle: PlacedBundle) -> None:
        self._backend = backend
        self._shared = backend.place(_Shared(subject=subject, bundle=bundle))
        self._versions = PlacedVersions(backend)
        self._states: dict[int, dict[tuple[int, int], FlowerState]] = {}
        self._newest: dict[int, m.Assignment] = {}
        self._warned: set[str] = set()

    def begin(self, client: int, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0) -> PendingTraining:
        """Begin a training with the state that the Assignment names. See Trainings."""
        lineage, number = assignment.state.lineage, assignment.state.round
        job = self._job(client, model, assignment)
        pending = self._backend.submit(train_flower_job, job, due_s)

        def collect() -> Change:
            outcome = pending()
            self._note(outcome.warnings)
            # The next Assignment names the state before this Round or the one after it.
            before = {(lineage, number): job.state} if job.state is not None else {}
            assert outcome.state is not None, "a training that succeeds has stored its state"
            self._states[client] = {**before, (lineage, assignment.round): outcome.state}
            self._newest[client] = assignment
            return outcome.change

        return collect

    def evaluate(self, clients: Sequence[int], model: OpenedModel, version: m.Version) -> list[Mapping[str, int]]:
        """Let clients that have trained evaluate a Version, each with the state after its newest training.

        Returns:
            The statistics of each client that can evaluate it. An error of the others is logged.
        """
        pending = []
        for client in clients:
            before = self._newest[client]
            state = replace(before.state, round=before.round)
            assignment = replace(before, version=version, round=before.round + 1, state=state)
            job = replace(self._job(client, model, assignment), trains=False)
            pending.append((client, self._backend.submit(train_flower_job, job, 0.0)))
        counts = []
        for client, collect in pending:
            try:
                # Its warnings are those of the evaluation before the client's training.
                counts.append(collect().change.counts)
            except FaninError as exc:
                LOG.warning("client %d cannot evaluate version %d: %s", client, version.number, exc)
        return counts

    def _note(self, warnings: Sequence[str]) -> None:
        """Log the warnings of a training that none before had, in whatever process."""
        for text in warnings:
            if text not in self._warned:
                self._warned.add(text)
                LOG.warning("%s", text)

    def _job(self, client: int, model: OpenedModel, assignment: m.Assignment) -> FlowerJob:
        lineage, number = assignment.state.lineage, assignment.state.round
        return FlowerJob(
            shared=self._shared,
            client=client,
            parameters=self._versions.place(model),
            assignment=to_proto(assignment, fleet_pb2.Assignment).SerializeToString(),
            state=self._states[client][lineage, number] if number else None,
        )


@dataclass(slots=True, kw_only=True)
class _JobState:
    """The state of one job: at first the initial state, then the final one. See AppStates."""

    state: FlowerState | None

    def get(self, assignment: m.Assignment, first: FlowerState) -> FlowerState:
        """See AppStates."""
        return first if self.state is None else self.state

    def put(self, assignment: m.Assignment, state: FlowerState) -> None:
        """See AppStates."""
        self.state = state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Opened:
    """The objects that a worker keeps for all its jobs."""

    subject: FlowerSubject
    bundle: Bundle


def train_flower_job(job: FlowerJob) -> FlowerOutcome:
    """Carry out a job. An evaluation alone has no change. Raises the errors of ``FlowerTrainer``."""
    from fanin.clients.flower.app import FlowerApp

    opened, state, warnings = _opened(job.shared), _JobState(state=job.state), list[str]()
    # The app's prints belong in the log, because the output of the command has another format.
    with contextlib.redirect_stdout(sys.stderr):
        # Created for each training, so that an app keeps only its state, in any process.
        runner = FlowerApp(opened.subject.client(job.client), opened.subject.app)
        trainer = FlowerTrainer(runner, state, job.client, warnings.append)
        model = OpenedModel(bundle=opened.bundle, parameters=job.parameters.get())
        assignment = read_assignment(job.assignment)
        if job.trains:
            change = trainer.train(model, assignment, lambda: True)
        else:
            counts = trainer.evaluate(model, assignment, lambda: True)
            change = Change(values=np.empty(0, np.float32), counts=counts)
    return FlowerOutcome(change=change, state=state.state, warnings=warnings)


@lru_cache(maxsize=1)
def _opened(placed: Placed[_Shared]) -> _Opened:
    shared = placed.get()
    return _Opened(subject=shared.subject, bundle=shared.bundle.open())


def _require_flwr() -> None:
    """Raise RuntimeMissing if flwr is not installed."""
    if find_spec(LIBRARY) is None:
        raise RuntimeMissing(f"simulate: got a Flower app, but {INSTALL}", code="FN-1104")

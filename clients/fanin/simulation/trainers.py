"""The trainers of simulated clients. They begin early and note errors."""

from dataclasses import dataclass
from traceback import format_exception

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.protos import messages as m
from fanin.protos.errors import FaninError, InvalidInput
from fanin.simulation.rows import ClientFailure
from fanin.simulation.workers import PendingTraining, Trainings


class ClientFailed(Exception):
    """The training of a client raised an error, and the settings stop the simulation then."""


class ClientTrainer:
    """The Trainer of one client. It notes each error of its training with the client and the Round."""

    def __init__(self, client: int, crew: "Crew") -> None:
        self._client = client
        self._crew = crew
        self._begun: tuple[str, PendingTraining] | None = None

    @property
    def runtime(self) -> str:
        """See Trainer."""
        return self._crew.runtime.name

    @property
    def graph_format(self) -> str:
        """See Trainer."""
        return self._crew.runtime.graph_format

    def begin(self, model: OpenedModel, assignment: m.Assignment) -> None:
        """See EarlyTrainer."""
        self._begun = assignment.assignment_id, self._crew.trainings.begin(self._client, model, assignment)

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """See Trainer. Raises ClientFailed if the settings stop the simulation, and the client's error otherwise."""
        assert self._begun is not None, "a device begins each training"
        begun_for, pending = self._begun
        assert begun_for == assignment.assignment_id, f"begun for {begun_for}, not for {assignment.assignment_id}"
        try:
            return pending()
        except Exception as exc:  # Of any kind: the store, and what the App's data needs, may be the user's code.
            trace = "".join(format_exception(exc))
            failure = ClientFailure(round=assignment.round, client=self._client, error=str(exc), traceback=trace)
            self._crew.failures.append(failure)
            if self._crew.stops:
                raise ClientFailed(f"simulate: {failure}") from exc
            if isinstance(exc, FaninError | ValueError):
                raise
            # Another error would end the federation. As InvalidInput it ends this client's part in the Round.
            raise InvalidInput(f"training: {type(exc).__name__}: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRuntime:
    """What trains the clients: the library with its version, and the format of the graphs that it runs."""

    name: str
    graph_format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The parts that the trainers of all clients share."""

    trainings: Trainings
    runtime: ClientRuntime
    failures: list[ClientFailure]
    stops: bool

"""The trainers of simulated clients. They begin early and note errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from traceback import format_exception
from typing import Final

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.work import TooLittleWork
from fanin.clients.device.updates import Change
from fanin.protos import messages as m
from fanin.protos.errors import FaninError, InvalidInput
from fanin.protos.texts import counted
from fanin.simulation.federation.device import EarlyTrainer
from fanin.simulation.rows import ClientFailure, OnFailure
from fanin.simulation.workers import PendingTraining, RecordFailed, Trainings

NUM_FAILING: Final = 10
"""Different clients, or a cohort if it is larger, that must fail before the simulation ends. If half of the clients
fail and the others do not, it ends by mistake once in a thousand times."""


class SimulationEnded(Exception):
    """The training of a client raised an error that ends the Run. ``simulate`` raises it as ``ClientFailed``.

    Attributes:
        failure: The error of the client.
    """

    def __init__(self, message: str, failure: ClientFailure) -> None:
        super().__init__(message)
        self.failure = failure


class ClientTrainer(EarlyTrainer):
    """The Trainer of one client. It notes each error of its training with the client and the Round."""

    def __init__(self, client: int, crew: "Crew") -> None:
        self._client = client
        self._crew = crew
        self._pending: tuple[str, PendingTraining] | None = None

    @property
    def runtime(self) -> str:
        """See Trainer."""
        return self._crew.runtime.name

    @property
    def graph_format(self) -> str:
        """See Trainer."""
        return self._crew.runtime.graph_format

    def begin(self, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0) -> None:
        """See EarlyTrainer."""
        self._pending = assignment.assignment_id, self._crew.trainings.begin(self._client, model, assignment, due_s)

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """See Trainer. Raises SimulationEnded if the simulation ends, and the client's error otherwise."""
        assert self._pending is not None, "a device begins each training"
        assignment_id, pending = self._pending
        assert assignment_id == assignment.assignment_id, (
            f"begun for {assignment_id}, not for {assignment.assignment_id}"
        )
        try:
            change = pending()
        except TooLittleWork:
            # Its device gives up, as a real one does. That is the experiment, and no failure of the client.
            raise
        except Exception as exc:  # Any error: the store and the App's data may use the user's code.
            trace = "".join(format_exception(exc))
            failure = ClientFailure(round=assignment.round, client=self._client, error=str(exc), traceback=trace)
            if isinstance(exc, RecordFailed):
                raise SimulationEnded(f"simulate: {exc}", failure) from exc
            self._crew.fail(failure)
            if problem := self._crew.problem:
                raise SimulationEnded(f"simulate: {problem}", failure) from exc
            if isinstance(exc, FaninError | ValueError):
                raise
            # Another error would end the federation. As InvalidInput it ends this client's part in the Round.
            raise InvalidInput(f"training: {type(exc).__name__}: {exc}", code="FN-1189") from exc
        self._crew.has_trained = True
        return change


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRuntime:
    """The library that trains the clients, with its version, and the format of its graphs."""

    name: str
    graph_format: str


@dataclass(slots=True, kw_only=True)
class Crew:
    """The parts that the trainers of all clients share.

    Attributes:
        trainings: Trains the clients.
        runtime: The library that trains them, and its graph format.
        failures: The errors so far.
        fail: Adds an error to them.
        stops: Whether the first error ends the simulation.
        num_failing: Different clients after whose errors the simulation ends, if no training has succeeded.
        has_trained: Whether a training has succeeded.
    """

    trainings: Trainings
    runtime: ClientRuntime
    failures: Sequence[ClientFailure]
    fail: OnFailure
    stops: bool
    num_failing: int
    has_trained: bool = False

    @property
    def problem(self) -> str:
        """The reason why the newest failure ends the simulation; empty if it does not.

        An error in the App or the data of all clients is permanent. The coordinator would assign the work repeatedly
        until the Run fails.
        """
        if self.stops:
            return str(self.failures[-1])
        clients = {failure.client for failure in self.failures}
        if self.has_trained or len(clients) < self.num_failing:
            return ""
        return (
            f"the first trainings of {counted(len(clients), 'client')} failed, and none succeeded; {self.failures[0]}"
        )

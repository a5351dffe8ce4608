"""A device's part in a Round as a list of events: assignments, trainings, uploads and give-ups."""

from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Final

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.statistics import answers_queries
from fanin.clients.device.updates import Change, Trainer, row_sizes
from fanin.edge.bundles.bundle import Bundle
from fanin.protos import messages as m
from fanin.protos.errors import FaninError, InvalidInput, Unavailable
from fanin.simulation.devices.conduct import Conduct
from fanin.simulation.federation.device import EarlyTrainer
from fanin.simulation.federation.loopback import Fleet

TARGET: Final = "target reached"
"""The event of the Version that has reached the target of the Plan, and with which the simulation ends."""
COORDINATOR_EVENTS: Final = (
    "engine",
    "traces",
    "round closed",
    "version published",
    "version evaluated",
    "round failed",
    "warning",
    TARGET,
)
REFUSED: Final = "refused"
"""The event of an Update that the coordinator refuses: an error of this device."""
DEVICE_EVENTS: Final = (
    "assigned",
    "training",
    "trained",
    "gave up",
    "uploading",
    "accepted",
    "discarded",
    REFUSED,
    "connection lost",
    "battery empty",
    "offline",
    "online",
    "gone",
)
"""The events of a device, in the usual order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvent:
    """One event of a device.

    Attributes:
        device: The name of the device.
        event: One of ``DEVICE_EVENTS``.
        round: The Round; 0 for none.
        detail: More about it, such as the text of an error.
    """

    device: str
    event: str
    round: int = 0
    detail: str = ""


Observe = Callable[[DeviceEvent], None]
"""Receives the events of devices, in the order of the virtual clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedFleet:
    """The coordinator from the view of one device. Each relevant call is an event."""

    fleet: Fleet
    observe: Observe

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        """See Fleet."""
        answer = await self.fleet.check_in(device, check_in)
        if isinstance(answer, m.Assigned):
            self.observe(DeviceEvent(device=device, event="assigned", round=answer.assignment.round))
        return answer

    def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        """See Fleet."""
        return self.fleet.download(device, download)

    async def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """See Fleet."""
        self.observe(DeviceEvent(device=device, event="uploading", round=header.round))
        try:
            async for reply in self.fleet.upload(device, header, pieces):
                if reply.update_state in (m.UpdateState.ACCEPTED, m.UpdateState.DISCARDED):
                    self.observe(DeviceEvent(device=device, event=reply.update_state.value, round=header.round))
                yield reply
        except FaninError as exc:
            event = "connection lost" if isinstance(exc, Unavailable) else REFUSED
            self.observe(DeviceEvent(device=device, event=event, round=header.round, detail=str(exc)))
            raise

    async def exchange(self, device: str, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        """See Fleet."""
        return await self.fleet.exchange(device, request)

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """See Fleet."""
        return await self.fleet.report(device, report)


class ObservedTrainer(EarlyTrainer):
    """A Trainer whose trainings are events. A device may give a training up (``quits``), or attack (``conduct``)."""

    def __init__(
        self, trainer: Trainer, device: str, observe: Observe, quits: Callable[[], bool], conduct: Conduct
    ) -> None:
        self._trainer = trainer
        self._conduct = conduct
        self._early = trainer if isinstance(trainer, EarlyTrainer) else None
        self._device = device
        self._observe = observe
        self._quits = quits
        self._is_quitting = False

    @property
    def runtime(self) -> str:
        """See Trainer."""
        return self._trainer.runtime

    @property
    def graph_format(self) -> str:
        """See Trainer."""
        return self._trainer.graph_format

    @property
    def answers_queries(self) -> bool:
        """See AnswersQueries."""
        return answers_queries(self._trainer)

    def row_sizes(self, bundle: Bundle) -> Collection[int]:
        """See SizingTrainer."""
        return row_sizes(self._trainer, bundle)

    def begin(self, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0) -> None:
        """See EarlyTrainer. A training that the device will give up does not begin."""
        self._is_quitting = self._quits()
        self._note("training", assignment)
        if self._is_quitting:
            return
        self._conduct.begin(assignment, due_s)
        if self._early is not None:
            self._early.begin(model, assignment, due_s)

    def delay_s(self, assignment: m.Assignment, now_s: float) -> float:
        """See EarlyTrainer."""
        return 0.0 if self._is_quitting else self._conduct.delay_s(assignment, now_s)

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """See Trainer. Raises InvalidInput if the device gives the training up."""
        if self._is_quitting:
            self._note("gave up", assignment, "dropout")
            raise InvalidInput("the device gave the training up (dropout)", code="FN-0848")
        try:
            change = self._trainer.train(model, assignment, should_continue)
            change = self._conduct.apply(model, assignment, change, self.graph_format)
        except Exception as exc:
            self._note("gave up", assignment, str(exc))
            raise
        self._note("trained", assignment)
        return change

    def _note(self, event: str, assignment: m.Assignment, detail: str = "") -> None:
        self._observe(DeviceEvent(device=self._device, event=event, round=assignment.round, detail=detail))

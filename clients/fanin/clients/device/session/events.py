"""The vocabulary of a device's session: its phases, the events that it accepts and the actions that it requests.

The driver (``device.session_driver``) carries out one action and reports its outcome as an event. ``machine`` has the
table that leads from one to the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from fanin.edge.runtimes.quality import Quality
from fanin.protos.messages import (
    MAX_SATURATED_SHARE,
    Assignment,
    CheckInAnswer,
    ExchangeOutcome,
    Publication,
    Training,
    UploadReply,
)
from fanin.protos.texts import counted


class SessionPhase(Enum):
    """The state of a session."""

    ENROLLING = "enrolling"
    IDLE = "idle"
    REFRESHING = "refreshing"
    FETCHING = "fetching"
    EXCHANGING = "exchanging"
    TRAINING = "training"
    SENDING = "sending"
    TUNING = "tuning"
    REPORTING = "reporting"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolled:
    """The coordinator has registered this device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The coordinator has answered a check-in."""

    answer: CheckInAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """The newest Version is downloaded and verified, and is served if it passes the checks of ``Serving``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Bundle and Version are downloaded and verified.

    ``before`` and ``after`` are the phases with messages before the training and after the Update, as the device's
    protocol has them.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """The message of a phase is durable at the coordinator, and this is its reply."""

    outcome: ExchangeOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStored:
    """Training has ended and its Update is stored.

    ``num_saturated`` of its ``num_values`` values were out of the range of the grid and were cut. ``counts`` are the
    device's own, before they are scaled, masked or noised. All are empty for an Update that an earlier process stored.
    """

    num_saturated: int = 0
    num_values: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def warning(self) -> str:
        """The warning of this device about many such values; "" for few."""
        if self.num_saturated <= MAX_SATURATED_SHARE * self.num_values:
            return ""
        return (
            f"{self.num_saturated} of the {counted(self.num_values, 'value')} of the update were out of the range of "
            "the grid and were cut to its end: the update is not the one that was trained. A large change, or noise "
            "that an app adds, does this (docs/howto/flower.md, Large changes)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replied:
    """An upload or a report has ended with this reply."""

    reply: UploadReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The connection broke, the coordinator requested a retry, or this device's disk is full.

    ``code`` is that of the error. ``is_local``: the cause is on this device, and the connection may be whole.
    """

    reason: str
    code: str = ""
    is_local: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Moot:
    """The coordinator no longer knows the Assignment, or does not need this Update."""

    reason: str
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unable:
    """This device cannot do the work: a download does not verify, or training failed.

    ``is_lasting``: its data do not fit the Bundle, so it cannot do the work of the next Round either.
    """

    reason: str
    is_lasting: bool = False
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """The coordinator does not know this device, or rejects its token. ``code`` is that of the error."""

    reason: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPaused:
    """A condition of this device no longer holds (charger, network, the app). The device's folder keeps the work."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The last Version of a Run is fine-tuned, stored and served.

    ``before`` and ``after`` are the quality of the Version and of the result on the validation part.
    """

    run_id: str
    version: int
    epochs: int
    before: Quality
    after: Quality


SessionEvent = (
    Enrolled
    | Answered
    | Refreshed
    | Tuned
    | Fetched
    | Exchanged
    | UpdateStored
    | Replied
    | Lost
    | Moot
    | Unable
    | Denied
    | WorkPaused
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enroll:
    """Register this device with the coordinator."""

    label: ClassVar[str] = "enroll"


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """Check in and ask for an Assignment."""

    label: ClassVar[str] = "checkin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """Download, verify and serve a newer Version."""

    label: ClassVar[str] = "refresh"
    publication: Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class Tune:
    """Train the last Version of a Run for this device alone, and serve the result."""

    label: ClassVar[str] = "finetune"
    training: Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Download and verify the Bundle and the Version of the Assignment."""

    label: ClassVar[str] = "fetch"
    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessage:
    """Send the message of a phase, and wait for the coordinator's message."""

    label: ClassVar[str] = "exchange"
    assignment: Assignment
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Create the Update, unless it is stored already."""

    label: ClassVar[str] = "train"
    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Upload the Update."""

    label: ClassVar[str] = "send"
    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """Report that this device gives up the Assignment."""

    label: ClassVar[str] = "giveup"
    assignment: Assignment
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSession:
    """End, and report the reason to the user, with a code."""

    label: ClassVar[str] = "stop"
    reason: str
    code: str


SessionAction = Enroll | Poll | Refresh | Tune | Fetch | SendMessage | Train | Send | Abandon | EndSession
"""``label`` names the action in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next action and when to do it.

    ``pause_s`` is the delay in seconds. ``forget`` is the id of an Assignment whose Update is no longer needed.
    """

    action: SessionAction
    pause_s: float = 0.0
    forget: str = ""

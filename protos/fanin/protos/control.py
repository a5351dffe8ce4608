"""The words of the operator's protocol: Runs and what happens in them; ``control.proto`` says when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from fanin.protos.errors import InvalidInput
from fanin.protos.messages import BundleRef, Delegation, Version
from fanin.protos.names import check_name
from fanin.protos.plans import MAX_TIMES, Plan

MAX_DESCRIBED_ROUNDS: Final = 1000
"""Of how many Rounds a description tells: one message holds them."""
MAX_LISTED_DEVICES: Final = 1000
"""Devices that an event lists: 34 kB of the 4 MiB that gRPC takes in one message."""
MAX_PAGE_DEVICES: Final = 10_000
"""Devices on one page of those that a Round accepted."""
MAX_NUMBER: Final = (1 << 63) - 1
"""The highest Version or sequence number that there can be: what a database's integer holds."""


class RunState(Enum):
    """Whether a Run opens Rounds; a PAUSED one keeps its open Round, the others rest until they are set going."""

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_live(self) -> bool:
        """Whether there is, or can at any moment be, an open Round."""
        return self in (RunState.RUNNING, RunState.PAUSED)


def _check_rounds(num_rounds: int) -> None:
    if not 0 <= num_rounds <= MAX_TIMES:
        raise InvalidInput(f"rounds: got {num_rounds}, expected 0 to {MAX_TIMES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Where a Run stands. ``num_rounds`` counts the Rounds that ended in a Version. ``reason`` says why the Run rests,
    and what else than devices it waits for."""

    run_id: str
    state: RunState
    plan: Plan
    bundle_sha256: str
    version: int
    version_sha256: str
    num_rounds: int
    reason: str = ""


class RoundPhase(Enum):
    """Where a Round stands; ``fanin.server.rounds.machine`` says what each means."""

    SELECTING = "selecting"
    TRAINING = "training"
    CLOSING = "closing"
    FOLDING = "folding"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    FAILING = "failing"
    FAILED = "failed"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInfo:
    """One Round as it is now; ``version`` is the one that it ended in, 0 for none yet or none ever."""

    round: int
    base_version: int
    phase: RoundPhase
    num_updates: int
    opened_at_s: float
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """A Run with its last Rounds, newest first, the newest one's grid, and some of the devices at work in it.

    ``deadline_s`` are left in the open Round, 0 if its clock does not run; ``num_devices`` have enrolled here.
    """

    info: RunInfo
    rounds: tuple[RoundInfo, ...]
    grid: tuple[int, ...]
    num_at_work: int
    at_work: tuple[str, ...]
    deadline_s: float
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRun:
    """A Run to start, under an id that the caller chose, from its Version 0."""

    run_id: str
    plan: Plan
    version: Version
    delegation: Delegation


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Take no further devices; the open Round and its deadline stand still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Go on; ``num_rounds`` Rounds from now, or, where it is 0, those that were left."""

    num_rounds: int = 0

    def __post_init__(self) -> None:
        _check_rounds(self.num_rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the Run; an open Round fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """Make Version ``number`` of ``from_run`` (empty: of this Run) the newest one, and run ``num_rounds`` from it."""

    from_run: str = ""
    number: int
    num_rounds: int = 0

    def __post_init__(self) -> None:
        _check_rounds(self.num_rounds)
        if not 0 <= self.number <= MAX_NUMBER:
            raise InvalidInput(f"version: got number {self.number}, expected 0 to {MAX_NUMBER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What an operator wants of a Run, under an id of the operator's choice: once carried out, never again."""

    command_id: str
    run_id: str
    what: Pause | Resume | Stop | Adopt

    def __post_init__(self) -> None:
        check_name("command id", self.command_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionWithBundle:
    """A Version and the Bundle that it fills."""

    version: Version
    bundle: BundleRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOpened:
    """Devices can be assigned."""

    round: int
    base_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClosed:
    """The set of Updates is named.

    ``accepted`` has the first ``MAX_LISTED_DEVICES`` of the ``num_accepted`` devices, in the order of acceptance: one
    message holds the event. The Round's record has all of them (``AcceptedDevices``).
    """

    round: int
    num_accepted: int
    accepted: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.accepted) > self.num_accepted:
            raise InvalidInput(
                f"round {self.round}: got {len(self.accepted)} accepted devices, expected at most {self.num_accepted}"
            )


def round_closed(round_number: int, accepted: Sequence[str]) -> RoundClosed:
    """The event of a Round that accepted the Updates of these devices, in this order."""
    return RoundClosed(round=round_number, num_accepted=len(accepted), accepted=tuple(accepted[:MAX_LISTED_DEVICES]))


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedDevices:
    """A page of the devices whose Updates a Round accepted, in the order of acceptance; the Round accepted
    ``num_accepted``."""

    num_accepted: int
    device_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailed:
    """The Round ended without a Version."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A Version on the devices' validation parts: loss in nats, accuracies and agreement as shares of the labels.

    A model of values has no labels, and all three are 0; ``int8_rise_percent`` is by how much int8 adds to the squared
    error, None in a model of classes.
    """

    num_examples: int
    loss: float
    accuracy_float: float
    accuracy_int8: float
    int8_agreement: float
    int8_rise_percent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    """A new Version. ``round`` 0: not of a Round, but made outside or adopted from Version ``adopted_number`` of
    ``adopted_run``. ``evaluation`` is of the parent, None if nobody validated; ``runtimes`` counts the Updates by the
    runtime that they were made with, ``num_stale`` those that were trained from a Version before the parent.
    ``num_rounds`` are to be run from one that is not of a Round; 0: those that were left.

    What is ``resumed`` had come before a transfer was cut, and was not sent again; of uploads, as far as the process
    knows that publishes."""

    number: int
    version_sha256: str
    parent: int
    round: int = 0
    round_s: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    bytes_down_resumed: int = 0
    bytes_up_resumed: int = 0
    num_saturated: int = 0
    num_rounded: int = 0
    train_loss: float = 0.0
    total_examples: int = 0
    evaluation: Evaluation | None = None
    runtimes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    adopted_run: str = ""
    adopted_number: int = 0
    num_stale: int = 0
    num_rounds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRested:
    """No more Rounds until the Run is set going again."""

    state: RunState
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed:
    """The Run goes on, for ``num_rounds`` Rounds, or, where it is 0, those that were left."""

    num_rounds: int = 0


RunEvent = RoundOpened | RoundClosed | RoundFailed | VersionPublished | RunRested | RunResumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """An event with its place in the Run's record; ``time_s`` since the Unix epoch."""

    sequence: int
    time_s: float
    event: RunEvent

"""The vocabulary of the round machine: events and effects.

An event is a fact: an action of a device, the time, or a change that is durable. An effect is an order to the driver.
The driver carries it out and reports the result as the next event.
"""

from dataclasses import dataclass

from fanin.protos.messages import RunWarned


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedIn:
    """A suitable device has checked in."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """A device will not fulfil its Assignment."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Devices have been silent for too long. Their Updates still count if they come."""

    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCommitted:
    """A device's Update is durable and has one of the Round's places.

    ``meets`` are the Plan's entries of required participants that name the device, and ``examples`` the examples on
    which it trained.
    """

    device: str
    meets: frozenset[str] = frozenset()
    examples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCommitted:
    """A device's message of the current phase is durable."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterFrozen:
    """The roster of the phase is recorded: just now, or before a restart. Only its devices take part from now on."""

    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """The Round's time to close may have come. An early event is harmless.

    ``progressing`` are devices at work whose step has risen since the last event of this kind. ``is_blocked``: the
    coordinator could not store an Update since then. ``num_waiting`` devices wait, because the free places are kept for
    required participants.
    """

    progressing: tuple[str, ...] = ()
    is_blocked: bool = False
    num_waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The set of Updates is recorded: just now, or before a restart."""

    accepted: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersStored:
    """The new parameters are computed and stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The Version is durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """The Run's pause is durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The end of the pause is durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """An effect of the Round cannot be carried out, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The Round's failure is durable: no quorum at the deadline, an operator's command, or a permanent error."""


Event = (
    CheckedIn
    | GaveUp
    | Gone
    | UpdateCommitted
    | MessageCommitted
    | RosterFrozen
    | TimePassed
    | Closed
    | ParametersStored
    | Published
    | Paused
    | Resumed
    | Broken
    | Failed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Give this device its Assignment, which is the same one each time."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepDeadline:
    """Record the deadline, so that it survives a restart, with the number of rosters that are frozen before it."""

    deadline: float
    num_rosters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordExtension:
    """Record that the deadline moved for these devices, ``extension_s`` in all."""

    extension_s: float
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLack:
    """Record that the Round waits for missing participants, and look for them among the enrolled devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordGone:
    """Record that the Round no longer waits for these devices."""

    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """Add this device's committed Update to the sum."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """Record the roster of a phase or, without its quorum of messages in the record, the failure of the Round."""

    phase: str
    quorum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Record the set of Updates or, without a quorum in the record, the failure of the Round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Complete the sum over exactly this set, compute the outer step and store the parameters."""

    accepted: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Sign and record the Version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Record the failure of the Round and its reason, unless the record has its Version."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn:
    """Record a warning of the Run. It belongs to no Round."""

    warning: RunWarned


@dataclass(frozen=True, slots=True, kw_only=True)
class LookForAbsent:
    """Look for devices that the Run expects, and record alarms. It belongs to no Round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    """Open the next Round, or let the Run rest."""


Effect = (
    Assign
    | KeepDeadline
    | RecordExtension
    | RecordLack
    | RecordGone
    | Accumulate
    | Freeze
    | Close
    | Fold
    | Publish
    | Fail
    | Warn
    | LookForAbsent
    | GoOn
)

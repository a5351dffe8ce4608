"""What a Round hears (events) and what it asks for (effects): the vocabulary of the round machine.

An event is a fact: something that a device did, that the clock shows, or that is durable. An effect is an order to the
driver. The driver carries it out and reports the outcome as the next event.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedIn:
    """A suitable device asks for work."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """A device will not fulfil its Assignment."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCommitted:
    """A device's Update is durable, and counted in one of the Round's places."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Time to look at the deadline; early ones are harmless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The set is durably named. After a restart also the record's word that it had been."""

    accepted: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
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
    """An effect of the Round can never be carried out, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The Round's failure is durable: no quorum at the deadline, an operator's command, or a permanent error."""


Event = (
    CheckedIn | GaveUp | UpdateCommitted | TimePassed | Closed | Folded | Published | Paused | Resumed | Broken | Failed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Give this device its Assignment; the same one if it had one."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepDeadline:
    """Record the deadline, so that it outlives this process."""

    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """Add this device's committed Update to the sum."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Durably name the set of Updates, or, if the record holds no quorum, the failure of the Round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Finish the sum over exactly this set, do the outer step, store the parameters."""

    accepted: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Sign and record the Version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Record that the Round has failed, and why, unless the record has its Version."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    """Open the next Round, or let the Run rest."""


Effect = Assign | KeepDeadline | Accumulate | Close | Fold | Publish | Fail | GoOn

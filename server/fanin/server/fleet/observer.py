"""The observer of the calls of devices: it sees their outcome and cannot change it.

Each method is called on the event loop and must return at once: ``sent`` and ``received`` for each piece or Chunk.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from fanin.protos.messages import CheckInAnswer


class WorkOutcome(Enum):
    """How the work of a device for its Assignment ended."""

    ACCEPTED = "accepted"
    DISCARDED = "discarded"
    REFUSED = "refused"
    GAVE_UP = "gave_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedWork:
    """The work of one device for a Round."""

    run_id: str
    round: int
    device: str


class FleetObserver(Protocol):
    """A listener of the calls of devices."""

    def answered(self, device: str, answer: CheckInAnswer) -> None:
        """Note the answer to a check-in."""
        ...

    def sent(self, num_bytes: int) -> None:
        """Note bytes of a Chunk that a device downloads."""
        ...

    def received(self, num_bytes: int) -> None:
        """Note bytes of an Update that are stored."""
        ...

    @contextmanager
    def committing(self, work: AssignedWork) -> Iterator[None]:
        """Note that a complete Update is committed within this context."""
        ...

    def concluded(self, work: AssignedWork, outcome: WorkOutcome, code: str = "") -> None:
        """Note the end of a device's work. ``code`` is that of the error of a refused Update."""
        ...


class Unobserved:
    """A FleetObserver that notes nothing."""

    def answered(self, device: str, answer: CheckInAnswer) -> None:
        """See FleetObserver."""

    def sent(self, num_bytes: int) -> None:
        """See FleetObserver."""

    def received(self, num_bytes: int) -> None:
        """See FleetObserver."""

    @contextmanager
    def committing(self, work: AssignedWork) -> Iterator[None]:
        """See FleetObserver."""
        yield

    def concluded(self, work: AssignedWork, outcome: WorkOutcome, code: str = "") -> None:
        """See FleetObserver."""

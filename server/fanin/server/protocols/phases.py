"""The phases of a Round: records with a name and flags, which the machine asks instead of comparing names.

A protocol owns its phases. Those that every protocol shares are here, and the two of a Round without messages. The name
of a phase is text in the record and on the wire, so a protocol of another package adds its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from fanin.edge.basis import RoundBasis
from fanin.protos.messages import MAX_MESSAGE_BYTES
from fanin.protos.names import check_name


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFacts:
    """The recorded facts about the messages of a Round: the same ones in each process and for ``fanin verify``.

    Attributes:
        basis: The facts on which coordinator and devices agreed before.
        rosters: The devices of each frozen roster by the name of its phase, in the order of their messages. The closed
            set of Updates is the roster of the phase in which they were accepted.
        messages: The messages of each roster: phase, device, bytes.
    """

    basis: RoundBasis
    rosters: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    messages: Mapping[str, Mapping[str, bytes]] = field(default_factory=lambda: MappingProxyType({}))


def accept_any(_facts: RoundFacts, _device: str, _payload: bytes) -> None:
    """Accept every message."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhaseExchange:
    """The messages of a phase.

    Attributes:
        respond: Returns the coordinator's message for a device of the phase's roster; None: the Round goes on without
            the device. It is a pure function of the facts, and runs on a thread.
        check: Raises ValueError for a message that ends the device's Assignment. The facts are those before the phase.
        max_bytes: The largest message of a device. 0: devices send none, and only wait for the reply.
        deadline_s: Seconds until the phase ends with its quorum or fails; None: those of ``cohort.deadline_s``.
        quorum: The least number of messages; None: that of ``cohort.quorum``.
    """

    respond: Callable[[RoundFacts, str], bytes | None]
    check: Callable[[RoundFacts, str, bytes], None] = accept_any
    max_bytes: int = 4096
    deadline_s: float | None = None
    quorum: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_bytes <= MAX_MESSAGE_BYTES:
            raise ValueError(f"exchange: got max_bytes {self.max_bytes}, expected 0 to {MAX_MESSAGE_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Phase:
    """A phase of a Round. Two records with one name are two phases, and a protocol has one of them.

    Attributes:
        name: Its name.
        gives_places: Whether a device without a place may get one.
        assigns: Whether devices of the Round receive their Assignment again.
        accepts_updates: Whether Updates are committed.
        exchange: The messages of the phase; None without any.
        has_ended: Whether the Round is over.
    """

    name: str
    gives_places: bool = False
    assigns: bool = False
    accepts_updates: bool = False
    exchange: PhaseExchange | None = None
    has_ended: bool = False

    def __post_init__(self) -> None:
        check_name("phase", self.name)

    def __str__(self) -> str:
        return self.name


SELECTING: Final = Phase(name="selecting", gives_places=True, assigns=True, accepts_updates=True)
TRAINING: Final = Phase(name="training", assigns=True, accepts_updates=True)
PAUSED: Final = Phase(name="paused")
"""While a Round is paused, it accepts what it accepted before (``Round.working``)."""
CLOSING: Final = Phase(name="closing")
FOLDING: Final = Phase(name="folding")
PUBLISHING: Final = Phase(name="publishing")
PUBLISHED: Final = Phase(name="published", has_ended=True)
FAILING: Final = Phase(name="failing")
FAILED: Final = Phase(name="failed", has_ended=True)
SHARED: Final = (PAUSED, CLOSING, FOLDING, PUBLISHING, PUBLISHED, FAILING, FAILED)
"""The phases of every protocol, in the order of a diagram."""

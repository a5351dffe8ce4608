"""The decision about the Update of a device, for its upload, its reports and its commit.

``decide`` is a pure function of the facts about one Assignment. A process may read these facts from the record, or keep
them in memory while it drives the Run (``Course.facts``). The commit of the Update decides a last time: only the record
knows whether the Round has a free place.
"""

from dataclasses import dataclass

from fanin.protos.messages import RunState
from fanin.server.rounds.recent import OpenedRound, counts_from
from fanin.server.storage.records import CommittedUpdate, RoundRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts about the Update of one Assignment.

    Attributes:
        state: The state of the Run.
        max_staleness: The largest staleness of the Plan.
        lineage: The newest Version that no Round published.
        current: The Round that accepts Updates, None between two Rounds.
        origin: The Round of the Assignment and its base Version. None if it has ended and no later Round counts its
            Updates.
        is_over: Whether the device gave up the Assignment, or its Update was refused.
        is_leaving: Whether this process is about to end, or another one drives the Run.
        is_full: Whether the record did not take the Update for the current Round, which was full or had closed.
        recorded: The Update that the record has for the Assignment, None without one.
    """

    state: RunState
    max_staleness: int
    lineage: int
    current: RoundRecord | None
    origin: OpenedRound | None
    is_over: bool = False
    is_leaving: bool = False
    is_full: bool = False
    recorded: CommittedUpdate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """The Update counts in the current Round.

    Attributes:
        current: The Round that counts it.
        origin: The Round of its Assignment: the same one, or an earlier one if the Plan allows staleness.
    """

    current: RoundRecord
    origin: OpenedRound


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """The next Round may count the Update. Decide again at the next change of the Run."""

    origin: OpenedRound


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """An Update of the Assignment is recorded, and in exactly one Round.

    Attributes:
        is_open: Whether another Update for this Round would count now. False if that is undecided: the device must not
            wait for it.
    """

    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """No Round counts the Update.

    Attributes:
        is_open: Whether another Update for this Round would count now.
    """

    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """The Run is paused between two Rounds, or the coordinator is ending. The device keeps its Update."""


Decision = Receive | Later | Accepted | Discarded | Undecided


def decide(facts: Facts) -> Decision:
    """Return the decision about the Update of one Assignment."""
    prospect = _prospect(facts)
    if facts.recorded is not None:
        return Accepted(is_open=isinstance(prospect, Receive | Later))
    return prospect


def _prospect(facts: Facts) -> Receive | Later | Discarded | Undecided:
    """Return the decision about an Update that is not recorded."""
    current, origin = facts.current, facts.origin
    if facts.is_over or origin is None:
        return Discarded()
    counts = (
        current is None
        or origin.record.round == current.round
        or counts_from(origin.record, current.base_version, facts.max_staleness, facts.lineage)
    )
    if current is not None and counts and not facts.is_full:
        return Receive(current=current, origin=origin)
    if not facts.max_staleness or not counts or (current is None and not facts.state.is_live):
        return Discarded()
    return Undecided() if facts.state is RunState.PAUSED or facts.is_leaving else Later(origin=origin)

"""The device's session: what to do next, as a table.

Rule 1: every transition of a session is in ``TRANSITIONS``.
Rule 2: no clock, no IO; ``step(event, rng)`` returns the next session and the one thing to do now. A driver
(``client`` on threads, ``testing`` on a virtual clock) does it and tells the outcome as the next event.
Rule 3: an event that the table does not have raises ``IllegalEvent`` and changes nothing.

Walk: ENROLLING once, then IDLE (check in) -> FETCHING -> TRAINING -> SENDING -> IDLE. A failure of the line or
of the coordinator repeats the same step after a pause that doubles; an answer that the work is moot drops it.
A check-in without work may name a newer Version than the one that the device serves: IDLE -> REFRESHING -> IDLE. A
failure there leads back to IDLE, after the same doubling pause: work comes before a newer Version.

Nothing of a session needs to be stored: a device that restarts checks in, is given the same Assignment again,
and finds the Chunks it has fetched and the Update it has made in its cache.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Final

from fanin.protos.messages import (
    Assigned,
    Assignment,
    CheckInAnswer,
    Publication,
    Rejected,
    RejectReason,
    UpdateState,
    UploadReply,
    Wait,
)

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 60.0
REFUSED_PAUSE_S: Final = 5.0
"""After work that could not be done here: long enough not to spin, short enough to take the next Round."""


class Phase(Enum):
    """Where a session stands."""

    ENROLLING = "enrolling"
    IDLE = "idle"
    REFRESHING = "refreshing"
    FETCHING = "fetching"
    TRAINING = "training"
    SENDING = "sending"
    REPORTING = "reporting"
    STOPPED = "stopped"


class IllegalEvent(Exception):
    """An event that this phase cannot take: the driver's mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolled:
    """The coordinator knows this device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A check-in was answered."""

    answer: CheckInAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """The newest Version is here, and served if it is good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Bundle and Version are here and verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The Update is made and stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replied:
    """An upload or a report ended with this reply."""

    reply: UploadReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The line broke, the coordinator asked to try later, or this device's disk is full."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moot:
    """The coordinator no longer knows this work, or does not take this Update."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unable:
    """This device cannot do this work: what it got does not verify, or training failed."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """The coordinator does not know this device, or refuses its token."""

    reason: str


Event = Enrolled | Answered | Refreshed | Fetched | Trained | Replied | Lost | Moot | Unable | Denied


@dataclass(frozen=True, slots=True, kw_only=True)
class Enroll:
    """Make this device known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckIn:
    """Ask for work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """Get, verify and serve a newer Version."""

    publication: Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Get and verify what the Assignment names."""

    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Make the Update, unless it is made."""

    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Upload the Update."""

    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Report that the Assignment will not be fulfilled."""

    assignment: Assignment
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End, and tell the user why."""

    reason: str


Action = Enroll | CheckIn | Refresh | Fetch | Train | Send | GiveUp | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Todo:
    """Wait ``pause_s`` seconds, then do ``action``. ``forget`` names an Assignment whose Update may be dropped."""

    action: Action
    pause_s: float = 0.0
    forget: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One device's session. ``num_lost`` counts failures of the line in a row; ``newest`` is the Version to get."""

    phase: Phase = Phase.ENROLLING
    assignment: Assignment | None = None
    newest: Publication | None = None
    failure: str = ""
    num_lost: int = 0
    num_accepted: int = 0

    def begin(self) -> Todo:
        """The first thing to do."""
        return Todo(action=_action_of(self))

    def step(self, event: Event, rng: random.Random) -> tuple["Session", Todo]:
        """The session after ``event``, and what to do now. Raises IllegalEvent and changes nothing."""
        rule = TRANSITIONS.get((self.phase, type(event)))
        if rule is None:
            raise IllegalEvent(f"session: {type(event).__name__} in phase {self.phase.value}")
        return rule(self, event, rng)


def _action_of(state: Session) -> Action:
    if state.phase is Phase.ENROLLING:
        return Enroll()
    if state.phase is Phase.IDLE:
        return CheckIn()
    if state.phase is Phase.REFRESHING:
        assert state.newest is not None, "refreshing without a version"
        return Refresh(publication=state.newest)
    if state.phase is Phase.STOPPED:
        return Stop(reason=state.failure)
    assert state.assignment is not None, f"{state.phase} without an assignment"
    match state.phase:
        case Phase.FETCHING:
            return Fetch(assignment=state.assignment)
        case Phase.TRAINING:
            return Train(assignment=state.assignment)
        case Phase.SENDING:
            return Send(assignment=state.assignment)
        case _:
            return GiveUp(assignment=state.assignment, reason=state.failure)


def _to(state: Session, phase: Phase, pause_s: float = 0.0) -> tuple[Session, Todo]:
    after = replace(state, phase=phase, num_lost=0)
    return after, Todo(action=_action_of(after), pause_s=pause_s)


def _drop(state: Session, pause_s: float = 0.0, num_accepted: int = 0) -> tuple[Session, Todo]:
    forget = "" if state.assignment is None else state.assignment.assignment_id
    after = replace(
        state,
        phase=Phase.IDLE,
        assignment=None,
        failure="",
        num_lost=0,
        num_accepted=state.num_accepted + num_accepted,
    )
    return after, Todo(action=_action_of(after), pause_s=pause_s, forget=forget)


def _enrolled(state: Session, _event: Event, _rng: random.Random) -> tuple[Session, Todo]:
    return _to(state, Phase.IDLE)


def _answered(state: Session, event: Event, rng: random.Random) -> tuple[Session, Todo]:
    assert isinstance(event, Answered)
    match event.answer:
        case Assigned():
            return _to(replace(state, assignment=event.answer.assignment), Phase.FETCHING)
        case Wait(newest=newest) as wait:
            return _wait(state, newest, rng.uniform(wait.retry_min_s, wait.retry_max_s))
        case Rejected(reason=RejectReason.UPGRADE, text=text):
            return _stop(state, text)
        case Rejected(newest=newest):
            # No Run of today fits this device; one of tomorrow may.
            return _wait(state, newest, rng.uniform(LONGEST_PAUSE_S / 2, LONGEST_PAUSE_S))


def _wait(state: Session, newest: Publication | None, pause_s: float) -> tuple[Session, Todo]:
    if newest is None:
        return _to(state, Phase.IDLE, pause_s)
    # The failures in a row stay: if only the download fails, the pauses must double all the same.
    after = replace(state, phase=Phase.REFRESHING, newest=newest)
    return after, Todo(action=_action_of(after), pause_s=pause_s)


def _refreshed(state: Session, _event: Event, _rng: random.Random) -> tuple[Session, Todo]:
    return _to(replace(state, newest=None), Phase.IDLE)


def _not_refreshed(state: Session, event: Event, rng: random.Random) -> tuple[Session, Todo]:
    return _lost(replace(state, phase=Phase.IDLE, newest=None), event, rng)


def _fetched(state: Session, _event: Event, _rng: random.Random) -> tuple[Session, Todo]:
    return _to(state, Phase.TRAINING)


def _trained(state: Session, _event: Event, _rng: random.Random) -> tuple[Session, Todo]:
    return _to(state, Phase.SENDING)


def _replied(state: Session, event: Event, rng: random.Random) -> tuple[Session, Todo]:
    assert isinstance(event, Replied)
    if state.phase is Phase.REPORTING:
        return _drop(state, REFUSED_PAUSE_S)
    match event.reply.update_state:
        case UpdateState.ACCEPTED:
            return _drop(state, num_accepted=1)
        case UpdateState.DISCARDED:
            return _drop(state)
        case UpdateState.RECEIVING | UpdateState.RECEIVED:
            # The stream ended before the verdict: the same as a broken line, the bytes that arrived count.
            return _lost(state, event, rng)


def _lost(state: Session, _event: Event, rng: random.Random) -> tuple[Session, Todo]:
    longest = min(FIRST_PAUSE_S * 2.0**state.num_lost, LONGEST_PAUSE_S)
    after = replace(state, num_lost=min(state.num_lost + 1, 32))
    # Half of the pause is random, so that a population does not come back in step.
    return after, Todo(action=_action_of(after), pause_s=rng.uniform(longest / 2, longest))


def _moot(state: Session, _event: Event, rng: random.Random) -> tuple[Session, Todo]:
    return _drop(state, rng.uniform(FIRST_PAUSE_S / 2, FIRST_PAUSE_S))


def _unable(state: Session, event: Event, _rng: random.Random) -> tuple[Session, Todo]:
    assert isinstance(event, Unable)
    return _to(replace(state, failure=event.reason), Phase.REPORTING)


def _denied(state: Session, event: Event, _rng: random.Random) -> tuple[Session, Todo]:
    assert isinstance(event, Denied)
    return _stop(state, event.reason)


def _stop(state: Session, reason: str) -> tuple[Session, Todo]:
    after = replace(state, phase=Phase.STOPPED, failure=reason)
    return after, Todo(action=Stop(reason=reason))


Rule = Callable[[Session, Event, random.Random], tuple[Session, Todo]]

_REPEATED: Final = (Phase.ENROLLING, Phase.IDLE, Phase.FETCHING, Phase.TRAINING, Phase.SENDING, Phase.REPORTING)
"""The phases whose step is tried again after a failure of the line."""
_CALLING: Final = (
    Phase.ENROLLING,
    Phase.IDLE,
    Phase.REFRESHING,
    Phase.FETCHING,
    Phase.SENDING,
    Phase.REPORTING,
)

TRANSITIONS: Final[Mapping[tuple[Phase, type[Event]], Rule]] = MappingProxyType(
    {
        (Phase.ENROLLING, Enrolled): _enrolled,
        (Phase.IDLE, Answered): _answered,
        **{(Phase.REFRESHING, kind): _not_refreshed for kind in (Lost, Moot, Unable)},
        (Phase.REFRESHING, Refreshed): _refreshed,
        (Phase.FETCHING, Fetched): _fetched,
        (Phase.FETCHING, Moot): _moot,
        (Phase.FETCHING, Unable): _unable,
        (Phase.TRAINING, Trained): _trained,
        (Phase.TRAINING, Unable): _unable,
        (Phase.SENDING, Replied): _replied,
        (Phase.SENDING, Moot): _moot,
        (Phase.SENDING, Unable): _unable,
        (Phase.REPORTING, Replied): _replied,
        (Phase.REPORTING, Moot): _moot,
        **{(phase, Lost): _lost for phase in _REPEATED},
        **{(phase, Denied): _denied for phase in _CALLING},
    }
)

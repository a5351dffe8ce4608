"""The device's session as a state machine: which action follows which event.

1. Every transition is in ``TRANSITIONS``.
2. The machine has no clock and no IO. ``step(event, rng)`` returns the next session and the next action. The driver
   (``device.session_driver``) carries the action out and reports its outcome as an event.
3. An event that the table does not list raises ``IllegalSessionEvent`` and changes nothing.

The usual path is ENROLLING once, then IDLE (check in) -> FETCHING -> TRAINING -> SENDING -> IDLE. A protocol with
messages adds EXCHANGING before TRAINING, after SENDING, or both, once for each of its phases. After a failure of the
connection or the coordinator the session repeats the step, with a pause that doubles each time. It drops an
Assignment that has become moot.

A device whose training fails reports it and gives up its Assignment. The coordinator lets it try again later. With
``max_failures`` the session stops after that many failed trainings in a row.

The answer to a check-in without work may name a newer Version than the served one: IDLE -> REFRESHING -> IDLE. A
failure there returns to IDLE after the same doubling pause, because work is more important than a newer Version. Or
the answer says that the Run has finished. A device then fine-tunes the last Version: IDLE -> TUNING -> IDLE.

A device whose conditions no longer hold stops within a step and returns to IDLE. It keeps its folder and its place in
the Round. Once the conditions hold again, it checks in like a device that restarts. While the Round is open, the
coordinator returns the same Assignment.

A session is never stored. A device that restarts checks in and receives the same Assignment again. Its cache still
holds the downloaded Chunks and the Update.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from fanin.clients.device.session.events import (
    Abandon,
    Answered,
    Denied,
    EndSession,
    Enroll,
    Enrolled,
    Exchanged,
    Fetch,
    Fetched,
    Lost,
    Moot,
    Poll,
    Refresh,
    Refreshed,
    Replied,
    Send,
    SendMessage,
    SessionAction,
    SessionEvent,
    SessionPhase,
    Step,
    Train,
    Tune,
    Tuned,
    Unable,
    UpdateStored,
    WorkPaused,
)
from fanin.protos.messages import (
    Assigned,
    Assignment,
    ExchangeAnswer,
    ExchangeEnd,
    ExchangePause,
    Publication,
    Rejected,
    RejectReason,
    Training,
    UpdateState,
    Wait,
)
from fanin.protos.texts import counted

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 60.0
REFUSED_PAUSE_S: Final = 5.0
"""Pause after an Assignment that this device gave up: no busy loop, and in time for the next Round."""


class IllegalSessionEvent(Exception):
    """An event that is illegal in the session's phase: a bug of the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The state of one device's session.

    Attributes:
        phase: The current phase.
        assignment: The Assignment under way.
        newest: The Version to refresh to.
        finished: The settings of the Run that has finished, whose last Version is fine-tuned.
        exchanges: The phases whose messages come next.
        after: The phases with messages after the Update is accepted.
        is_accepted: Whether the Update of the Assignment is accepted.
        failure: Why this device gives up its Assignment, or why it stops.
        code: The code of the error with which it stops.
        rest_s: Seconds of pause after the report that this device gives up its Assignment.
        num_lost: Consecutive failures of the connection.
        num_accepted: Accepted Updates.
        num_failures: Consecutive failed trainings. Data that do not fit the Bundle do not count: they may change.
        max_failures: Consecutive failed trainings after which the session stops; 0 for no limit.
    """

    phase: SessionPhase = SessionPhase.ENROLLING
    assignment: Assignment | None = None
    newest: Publication | None = None
    finished: Training | None = None
    exchanges: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    is_accepted: bool = False
    failure: str = ""
    code: str = "FN-0844"
    rest_s: float = REFUSED_PAUSE_S
    num_lost: int = 0
    num_accepted: int = 0
    num_failures: int = 0
    max_failures: int = 0

    def begin(self) -> Step:
        """Return the first step."""
        return Step(action=_action_of(self))

    def step(self, event: SessionEvent, rng: random.Random) -> tuple["Session", Step]:
        """Return the session after ``event`` and the next step. Raises IllegalSessionEvent."""
        transition = TRANSITIONS.get((self.phase, type(event)))
        if transition is None:
            raise IllegalSessionEvent(f"session: {type(event).__name__} in phase {self.phase.value}")
        return transition(self, event, rng)


def _action_of(state: Session) -> SessionAction:
    if state.phase is SessionPhase.ENROLLING:
        return Enroll()
    if state.phase is SessionPhase.IDLE:
        return Poll()
    if state.phase is SessionPhase.REFRESHING:
        assert state.newest is not None, "refreshing without a version"
        return Refresh(publication=state.newest)
    if state.phase is SessionPhase.TUNING:
        assert state.finished is not None, "tuning without settings"
        return Tune(training=state.finished)
    if state.phase is SessionPhase.STOPPED:
        return EndSession(reason=state.failure, code=state.code)
    assert state.assignment is not None, f"{state.phase} without an assignment"
    match state.phase:
        case SessionPhase.FETCHING:
            return Fetch(assignment=state.assignment)
        case SessionPhase.EXCHANGING:
            return SendMessage(assignment=state.assignment, phase=state.exchanges[0])
        case SessionPhase.TRAINING:
            return Train(assignment=state.assignment)
        case SessionPhase.SENDING:
            return Send(assignment=state.assignment)
        case _:
            return Abandon(assignment=state.assignment, reason=state.failure)


def _to(state: Session, phase: SessionPhase, pause_s: float = 0.0) -> tuple[Session, Step]:
    after = replace(state, phase=phase, num_lost=0)
    return after, Step(action=_action_of(after), pause_s=pause_s)


def _drop(state: Session, pause_s: float = 0.0, num_accepted: int = 0) -> tuple[Session, Step]:
    forget = "" if state.assignment is None else state.assignment.assignment_id
    after = replace(
        state,
        phase=SessionPhase.IDLE,
        assignment=None,
        exchanges=(),
        after=(),
        is_accepted=False,
        failure="",
        num_lost=0,
        num_accepted=state.num_accepted + num_accepted,
    )
    return after, Step(action=_action_of(after), pause_s=pause_s, forget=forget)


def _enrolled(state: Session, _event: SessionEvent, _rng: random.Random) -> tuple[Session, Step]:
    return _to(state, SessionPhase.IDLE)


def _answered(state: Session, event: SessionEvent, rng: random.Random) -> tuple[Session, Step]:
    assert isinstance(event, Answered)
    match event.answer:
        case Assigned():
            return _to(replace(state, assignment=event.answer.assignment), SessionPhase.FETCHING)
        case Wait() as wait:
            return _wait(state, wait, rng.uniform(wait.retry_min_s, wait.retry_max_s))
        case Rejected(reason=RejectReason.UPGRADE, text=text):
            return _stop(state, text)
        case Rejected() as rejected:
            # No current Run fits this device; a later one may.
            return _wait(state, rejected, rng.uniform(LONGEST_PAUSE_S / 2, LONGEST_PAUSE_S))


def _wait(state: Session, answer: Wait | Rejected, pause_s: float) -> tuple[Session, Step]:
    if answer.newest is None and answer.finished is None:
        return _to(state, SessionPhase.IDLE, pause_s)
    # Keep num_lost: if only the download fails, its pauses must double too.
    phase = SessionPhase.TUNING if answer.newest is None else SessionPhase.REFRESHING
    after = replace(state, phase=phase, newest=answer.newest, finished=answer.finished)
    return after, Step(action=_action_of(after), pause_s=pause_s)


def _refreshed(state: Session, _event: SessionEvent, _rng: random.Random) -> tuple[Session, Step]:
    return _to(replace(state, newest=None, finished=None), SessionPhase.IDLE)


def _not_refreshed(state: Session, event: SessionEvent, rng: random.Random) -> tuple[Session, Step]:
    return _lost(replace(state, phase=SessionPhase.IDLE, newest=None, finished=None), event, rng)


def _fetched(state: Session, event: SessionEvent, _rng: random.Random) -> tuple[Session, Step]:
    assert isinstance(event, Fetched)
    after = replace(state, exchanges=event.before, after=event.after, is_accepted=False)
    return _to(after, SessionPhase.EXCHANGING if event.before else SessionPhase.TRAINING)


def _exchanged(state: Session, event: SessionEvent, rng: random.Random) -> tuple[Session, Step]:
    assert isinstance(event, Exchanged)
    match event.outcome:
        case ExchangePause(retry_min_s=shortest, retry_max_s=longest):
            return _to(state, SessionPhase.EXCHANGING, rng.uniform(shortest, longest))
        case ExchangeEnd():
            return _drop(state, rng.uniform(FIRST_PAUSE_S / 2, FIRST_PAUSE_S))
        case ExchangeAnswer():
            rest = replace(state, exchanges=state.exchanges[1:])
            if rest.exchanges:
                return _to(rest, SessionPhase.EXCHANGING)
            return _drop(rest) if state.is_accepted else _to(rest, SessionPhase.TRAINING)


def _trained(state: Session, _event: SessionEvent, _rng: random.Random) -> tuple[Session, Step]:
    return _to(replace(state, num_failures=0), SessionPhase.SENDING)


def _replied(state: Session, event: SessionEvent, rng: random.Random) -> tuple[Session, Step]:
    assert isinstance(event, Replied)
    match event.reply.update_state:
        case UpdateState.ACCEPTED if state.after:
            accepted = replace(state, exchanges=state.after, is_accepted=True, num_accepted=state.num_accepted + 1)
            return _to(accepted, SessionPhase.EXCHANGING)
        case UpdateState.ACCEPTED:
            return _drop(state, num_accepted=1)
        case UpdateState.DISCARDED:
            return _drop(state)
        case UpdateState.RECEIVING | UpdateState.RECEIVED:
            # The stream ended before the verdict, as after a broken connection; the received bytes still count.
            return _lost(state, event, rng)


def _lost(state: Session, _event: SessionEvent, rng: random.Random) -> tuple[Session, Step]:
    longest = min(FIRST_PAUSE_S * 2.0**state.num_lost, LONGEST_PAUSE_S)
    after = replace(state, num_lost=min(state.num_lost + 1, 32))
    # Half of the pause is random, so that devices do not reconnect all at once.
    return after, Step(action=_action_of(after), pause_s=rng.uniform(longest / 2, longest))


def _moot(state: Session, _event: SessionEvent, rng: random.Random) -> tuple[Session, Step]:
    return _drop(state, rng.uniform(FIRST_PAUSE_S / 2, FIRST_PAUSE_S))


def _paused(state: Session, _event: SessionEvent, rng: random.Random) -> tuple[Session, Step]:
    # The stored Update is kept (no ``forget``): the check-in may return the same Assignment.
    after = replace(state, assignment=None, newest=None, finished=None, exchanges=(), after=(), is_accepted=False)
    return _to(after, SessionPhase.IDLE, rng.uniform(FIRST_PAUSE_S / 2, FIRST_PAUSE_S))


def _reported(state: Session, event: SessionEvent, rng: random.Random) -> tuple[Session, Step]:
    if not state.max_failures or state.num_failures < state.max_failures:
        return _moot(state, event, rng) if isinstance(event, Moot) else _drop(state, state.rest_s)
    reason = (
        f"{counted(state.num_failures, 'training')} failed in a row, the last with: {state.failure}; correct the "
        "cause, then start this device again"
    )
    return _stop(state, reason)


def _unable(state: Session, event: SessionEvent, _rng: random.Random) -> tuple[Session, Step]:
    assert isinstance(event, Unable)
    # A device whose data do not fit takes a place in as few Rounds as possible.
    rest_s = LONGEST_PAUSE_S if event.is_lasting else REFUSED_PAUSE_S
    counts = state.phase is SessionPhase.TRAINING and not event.is_lasting
    num_failures = state.num_failures + counts
    after = replace(state, failure=event.reason, rest_s=rest_s, num_failures=num_failures)
    return _to(after, SessionPhase.REPORTING)


def _denied(state: Session, event: SessionEvent, _rng: random.Random) -> tuple[Session, Step]:
    assert isinstance(event, Denied)
    return _stop(replace(state, code=event.code), event.reason)


def _stop(state: Session, reason: str) -> tuple[Session, Step]:
    after = replace(state, phase=SessionPhase.STOPPED, failure=reason)
    return after, Step(action=_action_of(after))


SessionTransition = Callable[[Session, SessionEvent, random.Random], tuple[Session, Step]]

_REPEATED: Final = (
    SessionPhase.ENROLLING,
    SessionPhase.IDLE,
    SessionPhase.FETCHING,
    SessionPhase.EXCHANGING,
    SessionPhase.TRAINING,
    SessionPhase.SENDING,
    SessionPhase.REPORTING,
)
"""The phases whose step is repeated after a failure of the connection."""
_CALLING: Final = (
    SessionPhase.ENROLLING,
    SessionPhase.IDLE,
    SessionPhase.REFRESHING,
    SessionPhase.TUNING,
    SessionPhase.FETCHING,
    SessionPhase.EXCHANGING,
    SessionPhase.SENDING,
    SessionPhase.REPORTING,
)
_WORKING: Final = (
    SessionPhase.REFRESHING,
    SessionPhase.TUNING,
    SessionPhase.FETCHING,
    SessionPhase.EXCHANGING,
    SessionPhase.TRAINING,
    SessionPhase.SENDING,
)
"""The phases whose step is long, and so checks the device's conditions."""

TRANSITIONS: Final[Mapping[tuple[SessionPhase, type[SessionEvent]], SessionTransition]] = MappingProxyType(
    {
        (SessionPhase.ENROLLING, Enrolled): _enrolled,
        (SessionPhase.IDLE, Answered): _answered,
        **{
            (phase, kind): _not_refreshed
            for phase in (SessionPhase.REFRESHING, SessionPhase.TUNING)
            for kind in (Lost, Moot, Unable)
        },
        (SessionPhase.REFRESHING, Refreshed): _refreshed,
        (SessionPhase.TUNING, Tuned): _refreshed,
        (SessionPhase.FETCHING, Fetched): _fetched,
        (SessionPhase.FETCHING, Moot): _moot,
        (SessionPhase.FETCHING, Unable): _unable,
        (SessionPhase.EXCHANGING, Exchanged): _exchanged,
        (SessionPhase.EXCHANGING, Moot): _moot,
        (SessionPhase.EXCHANGING, Unable): _unable,
        (SessionPhase.TRAINING, UpdateStored): _trained,
        (SessionPhase.TRAINING, Moot): _moot,
        (SessionPhase.TRAINING, Unable): _unable,
        (SessionPhase.SENDING, Replied): _replied,
        (SessionPhase.SENDING, Moot): _moot,
        (SessionPhase.SENDING, Unable): _unable,
        (SessionPhase.REPORTING, Replied): _reported,
        (SessionPhase.REPORTING, Moot): _reported,
        **{(phase, Lost): _lost for phase in _REPEATED},
        **{(phase, Denied): _denied for phase in _CALLING},
        **{(phase, WorkPaused): _paused for phase in _WORKING},
    }
)

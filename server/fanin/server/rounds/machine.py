"""The round machine: one Round from its first device to its Version, as a transition table.

Rule 1: every transition of a Round is in ``TRANSITIONS``. The diagram in docs/rounds.md is generated from it.
Rule 2: no clock, no IO, no randomness. ``step(event, now)`` returns the next Round and its effects. The driver
carries the effects out and reports each result as the next event.
Rule 3: an event that the table does not have raises ``IllegalEvent`` and changes nothing.
Rule 4: every phase has a failure exit. ``Failed`` is legal until the Round has ended.

The phases of a Round::

    SELECTING   places are free: each suitable device that checks in receives an Assignment
    TRAINING    all places are taken; a device that gives up frees one
    CLOSING     enough Updates are committed, or the deadline has passed: the set or the failure is being recorded
    FOLDING     the set is durable and final; the sum and the outer step are being computed
    PUBLISHING  the new parameters are stored; the Version is being recorded
    PUBLISHED   the Round has ended with a Version
    FAILING     an effect cannot be carried out; the failure is being recorded
    FAILED      no quorum at the deadline, a command of an operator, or an effect that cannot be carried out
    PAUSED      no device is assigned and the deadline stands still; Updates under way still count

``now`` and ``deadline`` are seconds on one monotonic clock, which the caller chooses.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from fanin.protos.control import RoundPhase
from fanin.server.rounds import events as e


class IllegalEvent(Exception):
    """An event that the phase does not allow. It is always our own mistake, never a peer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The Plan's settings for a Round; see ``protos.plans.CohortPlan``."""

    concurrency: int
    buffer: int
    quorum: int
    deadline_s: float
    min_report_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The state of one Round.

    Attributes:
        rules: The Plan's settings.
        phase: The current phase.
        at_work: Devices that hold a place. Some may work for an earlier Round, and their Updates count in this one.
        accepted: Devices whose Updates are committed, in the order of the commits.
        deadline: When the Round closes. None until as many devices as the quorum take part, because fewer devices
            cannot produce a Version however long they have. None while the Round is paused.
        left_s: Seconds to the deadline when the Round was paused.
        was_resumed: Whether the Round was under way when the coordinator ended.
    """

    rules: Rules
    phase: RoundPhase = RoundPhase.SELECTING
    at_work: frozenset[str] = frozenset()
    accepted: tuple[str, ...] = field(default=())
    deadline: float | None = None
    left_s: float | None = None
    was_resumed: bool = False

    def step(self, event: e.Event, now: float) -> tuple["Round", tuple[e.Effect, ...]]:
        """Return the Round after ``event`` and its effects. Raises IllegalEvent, and then changes nothing."""
        row = TRANSITIONS.get((self.phase, type(event)))
        if row is None:
            raise IllegalEvent(f"round: {type(event).__name__} in phase {self.phase.value}")
        after, effects = row.rule(self, event, now)
        assert after.phase in row.targets, f"{row.rule.__name__} went to {after.phase}"
        return after, effects

    @property
    def wake_at(self) -> float | None:
        """When time alone may close the Round: at the deadline or, with a quorum, ``min_report_s`` after the start."""
        if self.deadline is None or not self.assigns:
            return None
        early_s = max(self.rules.deadline_s - self.rules.min_report_s, 0.0)
        return self.deadline if len(self.accepted) < self.rules.quorum else self.deadline - early_s

    @property
    def num_places(self) -> int:
        """Number of devices that can still be assigned."""
        if self.phase is not RoundPhase.SELECTING:
            return 0
        return self.rules.concurrency - len(self.at_work) - len(self.accepted)

    @property
    def is_open(self) -> bool:
        """Whether the Round accepts Updates."""
        return self.phase in (*_ASSIGNING, RoundPhase.PAUSED)

    @property
    def assigns(self) -> bool:
        """Whether devices receive Assignments: new devices if a place is free, devices at work the same one again."""
        return self.phase in _ASSIGNING

    @property
    def has_ended(self) -> bool:
        """Whether the next Round may be opened."""
        return self.phase in (RoundPhase.PUBLISHED, RoundPhase.FAILED)


def _check_in(state: Round, event: e.Event, now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    assert isinstance(event, e.CheckedIn)
    if event.device in state.accepted:
        return state, ()
    if event.device not in state.at_work and state.phase is RoundPhase.TRAINING:
        return state, ()
    after, effects = _start_deadline(_by_places(replace(state, at_work=state.at_work | {event.device})), now)
    return after, (*effects, e.Assign(device=event.device))


def _give_up(state: Round, event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    assert isinstance(event, e.GaveUp)
    return _by_places(replace(state, at_work=state.at_work - {event.device})), ()


def _give_up_paused(state: Round, event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    assert isinstance(event, e.GaveUp)
    return replace(state, at_work=state.at_work - {event.device}), ()


def _commit(state: Round, event: e.Event, now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    assert isinstance(event, e.UpdateCommitted)
    if event.device in state.accepted:
        return state, ()
    accepted = (*state.accepted, event.device)
    after = replace(state, at_work=state.at_work - {event.device}, accepted=accepted)
    effects: tuple[e.Effect, ...] = (e.Accumulate(device=event.device),)
    if state.phase is RoundPhase.PAUSED:
        return after, effects
    # The device was assigned before a restart. The process may have ended before it recorded the deadline, and the
    # number of other devices at work is lost. So the deadline starts here.
    was_assigned_before = state.was_resumed and event.device not in state.at_work
    after, started = _start_deadline(after, now, has_quorum=was_assigned_before)
    effects = (*started, *effects)
    if len(accepted) < state.rules.buffer and (after.wake_at is None or now < after.wake_at):
        return _by_places(after), effects
    return replace(after, phase=RoundPhase.CLOSING), (*effects, e.Close())


def _look_at_deadline(state: Round, _event: e.Event, now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    if state.wake_at is None or now < state.wake_at:
        return state, ()
    # The record decides whether there is a quorum, because a commit may be under way at this moment.
    return replace(state, phase=RoundPhase.CLOSING), (e.Close(),)


def _break(state: Round, event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    assert isinstance(event, e.Broken)
    return replace(state, phase=RoundPhase.FAILING), (e.Fail(reason=event.reason),)


def _failed(state: Round, _event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    return replace(state, phase=RoundPhase.FAILED), (e.GoOn(),)


def _closed(state: Round, event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    assert isinstance(event, e.Closed)
    # The record decides. It may have an Update whose commit was under way when the deadline passed.
    if not set(state.accepted) <= set(event.accepted):
        raise IllegalEvent(f"round: closed with {sorted(event.accepted)}, expected all of {sorted(state.accepted)}")
    after = replace(state, phase=RoundPhase.FOLDING, accepted=event.accepted)
    return after, (e.Fold(accepted=event.accepted),)


def _stored(state: Round, _event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    return replace(state, phase=RoundPhase.PUBLISHING), (e.Publish(),)


def _published(state: Round, _event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    return replace(state, phase=RoundPhase.PUBLISHED), (e.GoOn(),)


def _pause(state: Round, _event: e.Event, now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    left_s = None if state.deadline is None else max(state.deadline - now, 0.0)
    return replace(state, phase=RoundPhase.PAUSED, deadline=None, left_s=left_s), ()


def _resume(state: Round, _event: e.Event, now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    if state.left_s is None:
        after, effects = _start_deadline(state, now)
    else:
        # The recorded deadline may be from before the pause.
        deadline = now + state.left_s
        after, effects = replace(state, deadline=deadline, left_s=None), (e.KeepDeadline(deadline=deadline),)
    if len(state.accepted) < state.rules.buffer:
        return _by_places(after), effects
    return replace(after, phase=RoundPhase.CLOSING), (*effects, e.Close())


def _nothing(state: Round, _event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    return state, ()


def opened(state: Round, now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    """Return a Round that begins, and its effects. Devices may still be at work for an earlier Round."""
    return _start_deadline(_by_places(state), now)


def _start_deadline(state: Round, now: float, *, has_quorum: bool = False) -> tuple[Round, tuple[e.Effect, ...]]:
    """Start the deadline of a Round that has, or is known to have had, as many devices as its quorum."""
    has_quorum = has_quorum or len(state.at_work) + len(state.accepted) >= state.rules.quorum
    if state.deadline is not None or not has_quorum:
        return state, ()
    deadline = now + state.rules.deadline_s
    return replace(state, deadline=deadline), (e.KeepDeadline(deadline=deadline),)


def _by_places(state: Round) -> Round:
    taken = len(state.at_work) + len(state.accepted)
    return replace(state, phase=RoundPhase.SELECTING if taken < state.rules.concurrency else RoundPhase.TRAINING)


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table: the rule, and the phases that it may lead to."""

    rule: Callable[[Round, e.Event, float], tuple[Round, tuple[e.Effect, ...]]]
    targets: frozenset[RoundPhase]


def _row(
    rule: Callable[[Round, e.Event, float], tuple[Round, tuple[e.Effect, ...]]], *targets: RoundPhase
) -> Transition:
    return Transition(rule, frozenset(targets))


_ASSIGNING: Final = (RoundPhase.SELECTING, RoundPhase.TRAINING)

TRANSITIONS: Final[Mapping[tuple[RoundPhase, type[e.Event]], Transition]] = MappingProxyType(
    {
        (RoundPhase.SELECTING, e.CheckedIn): _row(_check_in, *_ASSIGNING),
        (RoundPhase.SELECTING, e.GaveUp): _row(_give_up, RoundPhase.SELECTING),
        (RoundPhase.SELECTING, e.UpdateCommitted): _row(_commit, *_ASSIGNING, RoundPhase.CLOSING),
        (RoundPhase.SELECTING, e.TimePassed): _row(_look_at_deadline, RoundPhase.SELECTING, RoundPhase.CLOSING),
        (RoundPhase.SELECTING, e.Closed): _row(_closed, RoundPhase.FOLDING),
        (RoundPhase.SELECTING, e.Paused): _row(_pause, RoundPhase.PAUSED),
        # When a Run is resumed, its Round may be under way already.
        (RoundPhase.SELECTING, e.Resumed): _row(_nothing, RoundPhase.SELECTING),
        (RoundPhase.SELECTING, e.Broken): _row(_break, RoundPhase.FAILING),
        (RoundPhase.SELECTING, e.Failed): _row(_failed, RoundPhase.FAILED),
        (RoundPhase.TRAINING, e.CheckedIn): _row(_check_in, RoundPhase.TRAINING),
        (RoundPhase.TRAINING, e.GaveUp): _row(_give_up, *_ASSIGNING),
        (RoundPhase.TRAINING, e.UpdateCommitted): _row(_commit, RoundPhase.TRAINING, RoundPhase.CLOSING),
        (RoundPhase.TRAINING, e.TimePassed): _row(_look_at_deadline, RoundPhase.TRAINING, RoundPhase.CLOSING),
        (RoundPhase.TRAINING, e.Closed): _row(_closed, RoundPhase.FOLDING),
        (RoundPhase.TRAINING, e.Paused): _row(_pause, RoundPhase.PAUSED),
        (RoundPhase.TRAINING, e.Resumed): _row(_nothing, RoundPhase.TRAINING),
        (RoundPhase.TRAINING, e.Broken): _row(_break, RoundPhase.FAILING),
        (RoundPhase.TRAINING, e.Failed): _row(_failed, RoundPhase.FAILED),
        (RoundPhase.PAUSED, e.GaveUp): _row(_give_up_paused, RoundPhase.PAUSED),
        (RoundPhase.PAUSED, e.UpdateCommitted): _row(_commit, RoundPhase.PAUSED),
        (RoundPhase.PAUSED, e.TimePassed): _row(_nothing, RoundPhase.PAUSED),
        (RoundPhase.PAUSED, e.Paused): _row(_nothing, RoundPhase.PAUSED),
        (RoundPhase.PAUSED, e.Resumed): _row(_resume, *_ASSIGNING, RoundPhase.CLOSING),
        (RoundPhase.PAUSED, e.Broken): _row(_break, RoundPhase.FAILING),
        (RoundPhase.PAUSED, e.Failed): _row(_failed, RoundPhase.FAILED),
        # A pause or its end changes nothing once a Round closes; only its failure does.
        (RoundPhase.CLOSING, e.TimePassed): _row(_nothing, RoundPhase.CLOSING),
        (RoundPhase.CLOSING, e.Closed): _row(_closed, RoundPhase.FOLDING),
        (RoundPhase.CLOSING, e.Paused): _row(_nothing, RoundPhase.CLOSING),
        (RoundPhase.CLOSING, e.Resumed): _row(_nothing, RoundPhase.CLOSING),
        (RoundPhase.CLOSING, e.Broken): _row(_break, RoundPhase.FAILING),
        (RoundPhase.CLOSING, e.Failed): _row(_failed, RoundPhase.FAILED),
        (RoundPhase.FOLDING, e.TimePassed): _row(_nothing, RoundPhase.FOLDING),
        (RoundPhase.FOLDING, e.ParametersStored): _row(_stored, RoundPhase.PUBLISHING),
        (RoundPhase.FOLDING, e.Paused): _row(_nothing, RoundPhase.FOLDING),
        (RoundPhase.FOLDING, e.Resumed): _row(_nothing, RoundPhase.FOLDING),
        (RoundPhase.FOLDING, e.Broken): _row(_break, RoundPhase.FAILING),
        (RoundPhase.FOLDING, e.Failed): _row(_failed, RoundPhase.FAILED),
        (RoundPhase.PUBLISHING, e.TimePassed): _row(_nothing, RoundPhase.PUBLISHING),
        (RoundPhase.PUBLISHING, e.Published): _row(_published, RoundPhase.PUBLISHED),
        (RoundPhase.PUBLISHING, e.Paused): _row(_nothing, RoundPhase.PUBLISHING),
        (RoundPhase.PUBLISHING, e.Resumed): _row(_nothing, RoundPhase.PUBLISHING),
        (RoundPhase.PUBLISHING, e.Broken): _row(_break, RoundPhase.FAILING),
        (RoundPhase.PUBLISHING, e.Failed): _row(_failed, RoundPhase.FAILED),
        (RoundPhase.FAILING, e.TimePassed): _row(_nothing, RoundPhase.FAILING),
        # The error came after the Version was durable.
        (RoundPhase.FAILING, e.Published): _row(_published, RoundPhase.PUBLISHED),
        (RoundPhase.FAILING, e.Paused): _row(_nothing, RoundPhase.FAILING),
        (RoundPhase.FAILING, e.Resumed): _row(_nothing, RoundPhase.FAILING),
        (RoundPhase.FAILING, e.Failed): _row(_failed, RoundPhase.FAILED),
    }
)

"""The round machine: one Round from its first device to its Version, as a table.

Rule 1: every transition of a Round is in ``TRANSITIONS``; the diagram in docs/rounds.md is made from it.
Rule 2: no clock, no IO, no randomness. ``step(event, now)`` returns the next Round and what has to be done;
the driver does it and reports the outcome as the next event.
Rule 3: an event that the table does not have raises ``IllegalEvent`` and changes nothing.

Walk of a Round::

    SELECTING   places are free: each suitable device that checks in gets an Assignment
    TRAINING    all places are taken; a device that gives up frees one
    CLOSING     enough Updates are committed, or the deadline has passed: the record names the set, or the failure
    FOLDING     the set is durable and can no longer change; the sum and the outer step are computed
    PUBLISHING  the new parameters are known; the Version is being written
    PUBLISHED   done
    FAILING     an effect can never be carried out; the failure is being written
    FAILED      there was no quorum at the deadline, an operator ended it, or an effect could not be carried out
    PAUSED      nobody is assigned and the deadline stands still; Updates that were under way still count

Rule 4: every phase has a failure exit. ``Failed`` is legal until the Round has ended.

``now`` and ``deadline`` are seconds of one monotonic clock that the caller chooses.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Final

from fanin.server.rounds import events as e


class Phase(Enum):
    """Where a Round stands."""

    SELECTING = "selecting"
    TRAINING = "training"
    CLOSING = "closing"
    FOLDING = "folding"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    FAILING = "failing"
    FAILED = "failed"
    PAUSED = "paused"


class IllegalEvent(Exception):
    """An event that this phase cannot take: our own mistake, never a peer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the Plan asks of a Round; see ``protos.plans.CohortPlan``."""

    concurrency: int
    buffer: int
    quorum: int
    deadline_s: float
    min_report_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One Round. ``accepted`` is in the order of commits. Among those ``at_work`` may be devices whose work is for an
    earlier Round and counts in this one.

    The ``deadline`` starts once as many devices as the quorum have a part in the Round. Before that no Version could
    come of it, however long they had. While the Round is paused there is no deadline, but ``left_s``, the rest of it.
    A Round that ``was_resumed`` was under way when the coordinator ended.
    """

    rules: Rules
    phase: Phase = Phase.SELECTING
    at_work: frozenset[str] = frozenset()
    accepted: tuple[str, ...] = field(default=())
    deadline: float | None = None
    left_s: float | None = None
    was_resumed: bool = False

    def step(self, event: e.Event, now: float) -> tuple["Round", tuple[e.Effect, ...]]:
        """The Round after ``event``, and what to do now. Raises IllegalEvent and changes nothing."""
        row = TRANSITIONS.get((self.phase, type(event)))
        if row is None:
            raise IllegalEvent(f"round: {type(event).__name__} in phase {self.phase.value}")
        after, effects = row.rule(self, event, now)
        assert after.phase in row.targets, f"{row.rule.__name__} went to {after.phase}"
        return after, effects

    @property
    def wake_at(self) -> float | None:
        """The next moment at which time alone may close the Round: where a quorum suffices, or the deadline."""
        if self.deadline is None or not self.assigns:
            return None
        early_s = max(self.rules.deadline_s - self.rules.min_report_s, 0.0)
        return self.deadline if len(self.accepted) < self.rules.quorum else self.deadline - early_s

    @property
    def num_places(self) -> int:
        """How many more devices can be assigned."""
        if self.phase is not Phase.SELECTING:
            return 0
        return self.rules.concurrency - len(self.at_work) - len(self.accepted)

    @property
    def is_open(self) -> bool:
        """Whether Updates are still taken."""
        return self.phase in (*_ASSIGNING, Phase.PAUSED)

    @property
    def assigns(self) -> bool:
        """Whether devices are told what to do: a new one if there is a place, one at work again what it was told."""
        return self.phase in _ASSIGNING

    @property
    def has_ended(self) -> bool:
        """Whether the next Round may be opened."""
        return self.phase in (Phase.PUBLISHED, Phase.FAILED)


def _check_in(state: Round, event: e.Event, now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    assert isinstance(event, e.CheckedIn)
    if event.device in state.accepted:
        return state, ()
    if event.device not in state.at_work and state.phase is Phase.TRAINING:
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
    if state.phase is Phase.PAUSED:
        return after, effects
    # Assigned before a restart: the process that ended may have died before it recorded the deadline, and how many
    # other devices it had assigned is forgotten. So the deadline begins here.
    was_assigned_before = state.was_resumed and event.device not in state.at_work
    after, started = _start_deadline(after, now, has_quorum=was_assigned_before)
    effects = (*started, *effects)
    if len(accepted) < state.rules.buffer and (after.wake_at is None or now < after.wake_at):
        return _by_places(after), effects
    return replace(after, phase=Phase.CLOSING), (*effects, e.Close())


def _look_at_deadline(state: Round, _event: e.Event, now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    if state.wake_at is None or now < state.wake_at:
        return state, ()
    # Whether there is a quorum is the record's to say: a commit may be under way at this moment.
    return replace(state, phase=Phase.CLOSING), (e.Close(),)


def _break(state: Round, event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    assert isinstance(event, e.Broken)
    return replace(state, phase=Phase.FAILING), (e.Fail(reason=event.reason),)


def _failed(state: Round, _event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    return replace(state, phase=Phase.FAILED), (e.GoOn(),)


def _closed(state: Round, event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    assert isinstance(event, e.Closed)
    # The record decides. It can hold an Update whose commit was under way when the deadline passed.
    if not set(state.accepted) <= set(event.accepted):
        raise IllegalEvent(f"round: closed with {sorted(event.accepted)}, expected all of {sorted(state.accepted)}")
    after = replace(state, phase=Phase.FOLDING, accepted=event.accepted)
    return after, (e.Fold(accepted=event.accepted),)


def _folded(state: Round, _event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    return replace(state, phase=Phase.PUBLISHING), (e.Publish(),)


def _published(state: Round, _event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    return replace(state, phase=Phase.PUBLISHED), (e.GoOn(),)


def _pause(state: Round, _event: e.Event, now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    left_s = None if state.deadline is None else max(state.deadline - now, 0.0)
    return replace(state, phase=Phase.PAUSED, deadline=None, left_s=left_s), ()


def _resume(state: Round, _event: e.Event, now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    if state.left_s is None:
        after, effects = _start_deadline(state, now)
    else:
        # The one that was recorded may be from before the pause.
        deadline = now + state.left_s
        after, effects = replace(state, deadline=deadline, left_s=None), (e.KeepDeadline(deadline=deadline),)
    if len(state.accepted) < state.rules.buffer:
        return _by_places(after), effects
    return replace(after, phase=Phase.CLOSING), (*effects, e.Close())


def _nothing(state: Round, _event: e.Event, _now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    return state, ()


def opened(state: Round, now: float) -> tuple[Round, tuple[e.Effect, ...]]:
    """A Round that begins, perhaps with devices still at work for an earlier one, and what to do now."""
    return _start_deadline(_by_places(state), now)


def _start_deadline(state: Round, now: float, *, has_quorum: bool = False) -> tuple[Round, tuple[e.Effect, ...]]:
    """Start the clock of a Round that has, or is known to have had, as many devices as its quorum."""
    has_quorum = has_quorum or len(state.at_work) + len(state.accepted) >= state.rules.quorum
    if state.deadline is not None or not has_quorum:
        return state, ()
    deadline = now + state.rules.deadline_s
    return replace(state, deadline=deadline), (e.KeepDeadline(deadline=deadline),)


def _by_places(state: Round) -> Round:
    taken = len(state.at_work) + len(state.accepted)
    return replace(state, phase=Phase.SELECTING if taken < state.rules.concurrency else Phase.TRAINING)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: what to do, and where it may lead."""

    rule: Callable[[Round, e.Event, float], tuple[Round, tuple[e.Effect, ...]]]
    targets: frozenset[Phase]


def _row(rule: Callable[[Round, e.Event, float], tuple[Round, tuple[e.Effect, ...]]], *targets: Phase) -> Row:
    return Row(rule, frozenset(targets))


_ASSIGNING: Final = (Phase.SELECTING, Phase.TRAINING)

TRANSITIONS: Final[Mapping[tuple[Phase, type[e.Event]], Row]] = MappingProxyType(
    {
        (Phase.SELECTING, e.CheckedIn): _row(_check_in, *_ASSIGNING),
        (Phase.SELECTING, e.GaveUp): _row(_give_up, Phase.SELECTING),
        (Phase.SELECTING, e.UpdateCommitted): _row(_commit, *_ASSIGNING, Phase.CLOSING),
        (Phase.SELECTING, e.TimePassed): _row(_look_at_deadline, Phase.SELECTING, Phase.CLOSING),
        (Phase.SELECTING, e.Closed): _row(_closed, Phase.FOLDING),
        (Phase.SELECTING, e.Paused): _row(_pause, Phase.PAUSED),
        # A Run that is set going again may have its Round already, or still, under way.
        (Phase.SELECTING, e.Resumed): _row(_nothing, Phase.SELECTING),
        (Phase.SELECTING, e.Broken): _row(_break, Phase.FAILING),
        (Phase.SELECTING, e.Failed): _row(_failed, Phase.FAILED),
        (Phase.TRAINING, e.CheckedIn): _row(_check_in, Phase.TRAINING),
        (Phase.TRAINING, e.GaveUp): _row(_give_up, *_ASSIGNING),
        (Phase.TRAINING, e.UpdateCommitted): _row(_commit, Phase.TRAINING, Phase.CLOSING),
        (Phase.TRAINING, e.TimePassed): _row(_look_at_deadline, Phase.TRAINING, Phase.CLOSING),
        (Phase.TRAINING, e.Closed): _row(_closed, Phase.FOLDING),
        (Phase.TRAINING, e.Paused): _row(_pause, Phase.PAUSED),
        (Phase.TRAINING, e.Resumed): _row(_nothing, Phase.TRAINING),
        (Phase.TRAINING, e.Broken): _row(_break, Phase.FAILING),
        (Phase.TRAINING, e.Failed): _row(_failed, Phase.FAILED),
        (Phase.PAUSED, e.GaveUp): _row(_give_up_paused, Phase.PAUSED),
        (Phase.PAUSED, e.UpdateCommitted): _row(_commit, Phase.PAUSED),
        (Phase.PAUSED, e.TimePassed): _row(_nothing, Phase.PAUSED),
        (Phase.PAUSED, e.Paused): _row(_nothing, Phase.PAUSED),
        (Phase.PAUSED, e.Resumed): _row(_resume, *_ASSIGNING, Phase.CLOSING),
        (Phase.PAUSED, e.Broken): _row(_break, Phase.FAILING),
        (Phase.PAUSED, e.Failed): _row(_failed, Phase.FAILED),
        # A pause or its end changes nothing once a Round closes; only its failure does.
        (Phase.CLOSING, e.TimePassed): _row(_nothing, Phase.CLOSING),
        (Phase.CLOSING, e.Closed): _row(_closed, Phase.FOLDING),
        (Phase.CLOSING, e.Paused): _row(_nothing, Phase.CLOSING),
        (Phase.CLOSING, e.Resumed): _row(_nothing, Phase.CLOSING),
        (Phase.CLOSING, e.Broken): _row(_break, Phase.FAILING),
        (Phase.CLOSING, e.Failed): _row(_failed, Phase.FAILED),
        (Phase.FOLDING, e.TimePassed): _row(_nothing, Phase.FOLDING),
        (Phase.FOLDING, e.Folded): _row(_folded, Phase.PUBLISHING),
        (Phase.FOLDING, e.Paused): _row(_nothing, Phase.FOLDING),
        (Phase.FOLDING, e.Resumed): _row(_nothing, Phase.FOLDING),
        (Phase.FOLDING, e.Broken): _row(_break, Phase.FAILING),
        (Phase.FOLDING, e.Failed): _row(_failed, Phase.FAILED),
        (Phase.PUBLISHING, e.TimePassed): _row(_nothing, Phase.PUBLISHING),
        (Phase.PUBLISHING, e.Published): _row(_published, Phase.PUBLISHED),
        (Phase.PUBLISHING, e.Paused): _row(_nothing, Phase.PUBLISHING),
        (Phase.PUBLISHING, e.Resumed): _row(_nothing, Phase.PUBLISHING),
        (Phase.PUBLISHING, e.Broken): _row(_break, Phase.FAILING),
        (Phase.PUBLISHING, e.Failed): _row(_failed, Phase.FAILED),
        (Phase.FAILING, e.TimePassed): _row(_nothing, Phase.FAILING),
        # The error came after the Version was durable.
        (Phase.FAILING, e.Published): _row(_published, Phase.PUBLISHED),
        (Phase.FAILING, e.Paused): _row(_nothing, Phase.FAILING),
        (Phase.FAILING, e.Resumed): _row(_nothing, Phase.FAILING),
        (Phase.FAILING, e.Failed): _row(_failed, Phase.FAILED),
    }
)

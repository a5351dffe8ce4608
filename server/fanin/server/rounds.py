"""The round machine: one Round from its first device to its Version, as a table.

Rule 1: every transition of a Round is in ``TRANSITIONS``; the diagram in docs/rounds.md is made from it.
Rule 2: no clock, no IO, no randomness. ``step(event, now)`` returns the next Round and what has to be done;
the coordinator does it and tells the outcome as the next event.
Rule 3: an event that the table does not have raises ``IllegalEvent`` and changes nothing.

Walk of a Round::

    SELECTING   places are free: each suitable device that checks in gets an Assignment
    TRAINING    all places are taken; a device that gives up frees one
    CLOSING     enough Updates are committed, or the deadline has passed: the record names the set, or the failure
    FOLDING     the set is durable and can no longer change; the sum and the outer step are computed
    PUBLISHING  the new parameters are known; the Version is being written
    PUBLISHED   done
    FAILED      there was no quorum at the deadline, or an operator ended it
    PAUSED      nobody is assigned and the deadline stands still; Updates that were under way still count

``now`` and ``deadline`` are seconds of one monotonic clock that the caller chooses.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Final


class Phase(Enum):
    """Where a Round stands."""

    SELECTING = "selecting"
    TRAINING = "training"
    CLOSING = "closing"
    FOLDING = "folding"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    FAILED = "failed"
    PAUSED = "paused"


class IllegalEvent(Exception):
    """An event that this phase cannot take: our own mistake, never a peer's."""


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
class Missed:
    """The record says that there was no quorum at the deadline; the failure is durable."""


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
class Stopped:
    """The Round is to end without a Version, and that is durable unless its set was named before."""


Event = (
    CheckedIn
    | GaveUp
    | UpdateCommitted
    | TimePassed
    | Closed
    | Missed
    | Folded
    | Published
    | Paused
    | Resumed
    | Stopped
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
class GoOn:
    """Open the next Round, or let the Run rest."""


Effect = Assign | KeepDeadline | Accumulate | Close | Fold | Publish | GoOn


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
    """One Round. ``deadline`` is set by the first Assignment; ``accepted`` is in the order of commits. While the Round
    is paused there is no deadline, but ``left_s``, what was left of it. Among those ``at_work`` may be devices whose
    work is for an earlier Round and counts in this one."""

    rules: Rules
    phase: Phase = Phase.SELECTING
    at_work: frozenset[str] = frozenset()
    accepted: tuple[str, ...] = field(default=())
    deadline: float | None = None
    left_s: float | None = None

    def step(self, event: Event, now: float) -> tuple["Round", tuple[Effect, ...]]:
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


def _check_in(state: Round, event: Event, now: float) -> tuple[Round, tuple[Effect, ...]]:
    assert isinstance(event, CheckedIn)
    if event.device in state.accepted:
        return state, ()
    if event.device not in state.at_work and state.phase is Phase.TRAINING:
        return state, ()
    after = _by_places(replace(state, at_work=state.at_work | {event.device}))
    if state.deadline is not None:
        return after, (Assign(device=event.device),)
    deadline = now + state.rules.deadline_s
    return replace(after, deadline=deadline), (KeepDeadline(deadline=deadline), Assign(device=event.device))


def _give_up(state: Round, event: Event, _now: float) -> tuple[Round, tuple[Effect, ...]]:
    assert isinstance(event, GaveUp)
    return _by_places(replace(state, at_work=state.at_work - {event.device})), ()


def _give_up_paused(state: Round, event: Event, _now: float) -> tuple[Round, tuple[Effect, ...]]:
    assert isinstance(event, GaveUp)
    return replace(state, at_work=state.at_work - {event.device}), ()


def _commit(state: Round, event: Event, now: float) -> tuple[Round, tuple[Effect, ...]]:
    assert isinstance(event, UpdateCommitted)
    if event.device in state.accepted:
        return state, ()
    accepted = (*state.accepted, event.device)
    after = replace(state, at_work=state.at_work - {event.device}, accepted=accepted)
    effects: tuple[Effect, ...] = (Accumulate(device=event.device),)
    if state.phase is Phase.PAUSED:
        return after, effects
    if after.deadline is None:
        # The one of the first Assignment was lost with the process that had not recorded it yet.
        after = replace(after, deadline=now + state.rules.deadline_s)
        effects = (KeepDeadline(deadline=now + state.rules.deadline_s), *effects)
    if len(accepted) < state.rules.buffer and (after.wake_at is None or now < after.wake_at):
        return _by_places(after), effects
    return replace(after, phase=Phase.CLOSING), (*effects, Close())


def _look_at_deadline(state: Round, _event: Event, now: float) -> tuple[Round, tuple[Effect, ...]]:
    if state.wake_at is None or now < state.wake_at:
        return state, ()
    # Whether there is a quorum is the record's to say: a commit may be under way at this moment.
    return replace(state, phase=Phase.CLOSING), (Close(),)


def _missed(state: Round, _event: Event, _now: float) -> tuple[Round, tuple[Effect, ...]]:
    return replace(state, phase=Phase.FAILED), (GoOn(),)


def _closed(state: Round, event: Event, _now: float) -> tuple[Round, tuple[Effect, ...]]:
    assert isinstance(event, Closed)
    # The record decides. It can hold an Update whose commit was under way when the deadline passed.
    if not set(state.accepted) <= set(event.accepted):
        raise IllegalEvent(f"round: closed with {sorted(event.accepted)}, expected all of {sorted(state.accepted)}")
    after = replace(state, phase=Phase.FOLDING, accepted=event.accepted)
    return after, (Fold(accepted=event.accepted),)


def _folded(state: Round, _event: Event, _now: float) -> tuple[Round, tuple[Effect, ...]]:
    return replace(state, phase=Phase.PUBLISHING), (Publish(),)


def _published(state: Round, _event: Event, _now: float) -> tuple[Round, tuple[Effect, ...]]:
    return replace(state, phase=Phase.PUBLISHED), (GoOn(),)


def _pause(state: Round, _event: Event, now: float) -> tuple[Round, tuple[Effect, ...]]:
    left_s = None if state.deadline is None else max(state.deadline - now, 0.0)
    return replace(state, phase=Phase.PAUSED, deadline=None, left_s=left_s), ()


def _resume(state: Round, _event: Event, now: float) -> tuple[Round, tuple[Effect, ...]]:
    left_s = state.rules.deadline_s if state.left_s is None and state.accepted else state.left_s
    deadline = None if left_s is None else now + left_s
    # The one that was recorded may be from before the pause.
    effects: tuple[Effect, ...] = () if deadline is None else (KeepDeadline(deadline=deadline),)
    after = replace(state, deadline=deadline, left_s=None)
    if len(state.accepted) < state.rules.buffer:
        return _by_places(after), effects
    return replace(after, phase=Phase.CLOSING), (*effects, Close())


def _stop(state: Round, _event: Event, _now: float) -> tuple[Round, tuple[Effect, ...]]:
    return replace(state, phase=Phase.FAILED), (GoOn(),)


def _nothing(state: Round, _event: Event, _now: float) -> tuple[Round, tuple[Effect, ...]]:
    return state, ()


def opened(state: Round, now: float) -> tuple[Round, tuple[Effect, ...]]:
    """A Round that begins, perhaps with devices still at work for an earlier one, and what to do now."""
    if state.deadline is not None or not state.at_work:
        return _by_places(state), ()
    # Else nobody would ever give up on them.
    deadline = now + state.rules.deadline_s
    return _by_places(replace(state, deadline=deadline)), (KeepDeadline(deadline=deadline),)


def _by_places(state: Round) -> Round:
    taken = len(state.at_work) + len(state.accepted)
    return replace(state, phase=Phase.SELECTING if taken < state.rules.concurrency else Phase.TRAINING)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: what to do, and where it may lead."""

    rule: Callable[[Round, Event, float], tuple[Round, tuple[Effect, ...]]]
    targets: frozenset[Phase]


def _row(rule: Callable[[Round, Event, float], tuple[Round, tuple[Effect, ...]]], *targets: Phase) -> Row:
    return Row(rule, frozenset(targets))


_ASSIGNING: Final = (Phase.SELECTING, Phase.TRAINING)

TRANSITIONS: Final[Mapping[tuple[Phase, type[Event]], Row]] = MappingProxyType(
    {
        (Phase.SELECTING, CheckedIn): _row(_check_in, *_ASSIGNING),
        (Phase.SELECTING, GaveUp): _row(_give_up, Phase.SELECTING),
        (Phase.SELECTING, UpdateCommitted): _row(_commit, *_ASSIGNING, Phase.CLOSING),
        (Phase.SELECTING, TimePassed): _row(_look_at_deadline, Phase.SELECTING, Phase.CLOSING),
        (Phase.SELECTING, Closed): _row(_closed, Phase.FOLDING),
        (Phase.SELECTING, Paused): _row(_pause, Phase.PAUSED),
        # A Run that is set going again may have its Round already, or still, under way.
        (Phase.SELECTING, Resumed): _row(_nothing, Phase.SELECTING),
        (Phase.SELECTING, Stopped): _row(_stop, Phase.FAILED),
        (Phase.TRAINING, CheckedIn): _row(_check_in, Phase.TRAINING),
        (Phase.TRAINING, GaveUp): _row(_give_up, *_ASSIGNING),
        (Phase.TRAINING, UpdateCommitted): _row(_commit, Phase.TRAINING, Phase.CLOSING),
        (Phase.TRAINING, TimePassed): _row(_look_at_deadline, Phase.TRAINING, Phase.CLOSING),
        (Phase.TRAINING, Closed): _row(_closed, Phase.FOLDING),
        (Phase.TRAINING, Paused): _row(_pause, Phase.PAUSED),
        (Phase.TRAINING, Resumed): _row(_nothing, Phase.TRAINING),
        (Phase.TRAINING, Stopped): _row(_stop, Phase.FAILED),
        (Phase.PAUSED, GaveUp): _row(_give_up_paused, Phase.PAUSED),
        (Phase.PAUSED, UpdateCommitted): _row(_commit, Phase.PAUSED),
        (Phase.PAUSED, TimePassed): _row(_nothing, Phase.PAUSED),
        (Phase.PAUSED, Paused): _row(_nothing, Phase.PAUSED),
        (Phase.PAUSED, Resumed): _row(_resume, *_ASSIGNING, Phase.CLOSING),
        (Phase.PAUSED, Stopped): _row(_stop, Phase.FAILED),
        (Phase.CLOSING, TimePassed): _row(_nothing, Phase.CLOSING),
        (Phase.CLOSING, Closed): _row(_closed, Phase.FOLDING),
        (Phase.CLOSING, Missed): _row(_missed, Phase.FAILED),
        # What is being closed or folded goes on: the record, not the moment, says whether it was stopped before.
        (Phase.CLOSING, Paused): _row(_nothing, Phase.CLOSING),
        (Phase.CLOSING, Resumed): _row(_nothing, Phase.CLOSING),
        (Phase.CLOSING, Stopped): _row(_nothing, Phase.CLOSING),
        (Phase.FOLDING, TimePassed): _row(_nothing, Phase.FOLDING),
        (Phase.FOLDING, Folded): _row(_folded, Phase.PUBLISHING),
        (Phase.FOLDING, Paused): _row(_nothing, Phase.FOLDING),
        (Phase.FOLDING, Resumed): _row(_nothing, Phase.FOLDING),
        (Phase.FOLDING, Stopped): _row(_nothing, Phase.FOLDING),
        (Phase.PUBLISHING, TimePassed): _row(_nothing, Phase.PUBLISHING),
        (Phase.PUBLISHING, Published): _row(_published, Phase.PUBLISHED),
        (Phase.PUBLISHING, Paused): _row(_nothing, Phase.PUBLISHING),
        (Phase.PUBLISHING, Resumed): _row(_nothing, Phase.PUBLISHING),
        (Phase.PUBLISHING, Stopped): _row(_nothing, Phase.PUBLISHING),
    }
)

"""The plain round protocol: every Update is folded as its device sent it.

The phases before the shared ones (``endings``)::

    SELECTING   places are free: each suitable device that checks in receives an Assignment
    TRAINING    all places are taken; a device that gives up, or is silent for too long, frees one
    PAUSED      no device is assigned and the deadline stands still; Updates under way still count
"""

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from fanin.protos.messages import RoundPhase
from fanin.server.rounds import events as e
from fanin.server.rounds.endings import ENDING, close, failure_exits, stay, unchanged
from fanin.server.rounds.machine import (
    ASSIGNING,
    Outcome,
    Round,
    Rows,
    compose,
    row,
)

RECHECK_S: Final = 5.0
"""Shortest time between two looks for missing participants. Each reads the record of devices."""


def begin(state: Round, now: float) -> Outcome:
    """Return a Round that begins, and its effects. Devices may still be at work for an earlier Round."""
    return _start_deadline(_by_places(state), now)


def _check_in(state: Round, event: e.Event, now: float) -> Outcome:
    assert isinstance(event, e.CheckedIn)
    cohort = state.cohort
    if event.device in cohort.at_work:
        return state, (e.Assign(device=event.device),)
    if not state.may_join(event.device, now):
        return state, ()
    joined = replace(cohort, at_work=cohort.at_work.insert(event.device))
    after, effects = _start_deadline(_by_places(replace(state, cohort=joined)), now)
    return after, (*effects, e.Assign(device=event.device))


def _give_up(state: Round, event: e.Event, _now: float) -> Outcome:
    assert isinstance(event, e.GaveUp)
    cohort, device = state.cohort, event.device
    if device not in cohort.at_work:
        return state, ()
    after = replace(cohort, at_work=cohort.at_work.remove(device), gave_up=cohort.gave_up.insert(device))
    return _freed(replace(state, cohort=after)), ()


def _leave(state: Round, event: e.Event, _now: float) -> Outcome:
    assert isinstance(event, e.Gone)
    gone = tuple(device for device in event.devices if device in state.cohort.at_work)
    if not gone:
        return state, ()
    at_work = state.cohort.at_work
    for device in gone:
        at_work = at_work.remove(device)
    return _freed(replace(state, cohort=replace(state.cohort, at_work=at_work))), (e.RecordGone(devices=gone),)


def _commit(state: Round, event: e.Event, now: float) -> Outcome:
    assert isinstance(event, e.UpdateCommitted)
    cohort, device = state.cohort, event.device
    if device in cohort.accepted:
        return state, ()
    committed = replace(cohort, at_work=cohort.at_work.discard(device), accepted=cohort.accepted.insert(device))
    after = replace(state, cohort=committed, lack=state.lack.after(event.meets, event.examples))
    effects: tuple[e.Effect, ...] = (e.Accumulate(device=device),)
    if state.phase is RoundPhase.PAUSED:
        return _timed(after, now), effects
    # The device was assigned before a restart. The process may have ended before it recorded the deadline, and the
    # number of other devices at work is lost. So the deadline starts here.
    was_assigned_before = state.was_resumed and device not in cohort.at_work
    after, started = _start_deadline(after, now, has_quorum=was_assigned_before)
    after = _timed(after, now)
    effects = (*started, *effects)
    if len(committed.accepted) < state.rules.buffer and not _closes(after, now):
        return _by_places(after), effects
    return replace(after, phase=RoundPhase.CLOSING), (*effects, e.Close())


def _closes(state: Round, now: float) -> bool:
    """Return whether a Round with a place left closes now, after a commit."""
    if state.overdue_at is not None:
        return not state.lack and len(state.cohort.accepted) >= state.rules.quorum
    # At the deadline, ``TimePassed`` decides: devices may be making progress, or participants missing.
    return state.wake_at is not None and now >= state.wake_at and not state.lack and not state.may_extend(now)


def _look_at_deadline(state: Round, event: e.Event, now: float) -> Outcome:
    assert isinstance(event, e.TimePassed)
    if state.wake_at is None or state.deadline is None or now < state.wake_at:
        return state, ()
    if state.may_extend(now) and (event.progressing or state.may_have_progress) and state.overdue_at is None:
        extension_s = min(state.extension_s + state.rules.step_s, state.rules.max_extension_s)
        # From now on: after a restart, the recorded deadline may be long past.
        deadline = now + extension_s - state.extension_s
        after = replace(state, deadline=deadline, extension_s=extension_s, may_have_progress=False)
        # In this order, so that a crash between the two never grants more than the Plan's limit.
        record = e.RecordExtension(extension_s=extension_s, devices=event.progressing)
        return after, (record, e.KeepDeadline(deadline=deadline))
    if state.lack and state.rules.waits and len(state.cohort.accepted) < state.rules.buffer:
        return replace(state, overdue_at=now + max(state.rules.step_s, RECHECK_S)), (e.RecordLack(),)
    if state.overdue_at is not None and len(state.cohort.accepted) < state.rules.quorum:
        return replace(state, overdue_at=now + max(state.rules.step_s, RECHECK_S)), ()
    # The record decides whether there is a quorum, because a commit may be under way at this moment.
    return replace(state, phase=RoundPhase.CLOSING), (e.Close(),)


def _pause(state: Round, _event: e.Event, now: float) -> Outcome:
    left_s = None if state.deadline is None else max(state.deadline - now, 0.0)
    return replace(state, phase=RoundPhase.PAUSED, deadline=None, left_s=left_s, overdue_at=None), ()


def _resume(state: Round, _event: e.Event, now: float) -> Outcome:
    if state.left_s is None:
        after, effects = _start_deadline(state, now)
    else:
        # The recorded deadline may be from before the pause.
        deadline = now + state.left_s
        after, effects = replace(state, deadline=deadline, left_s=None), (e.KeepDeadline(deadline=deadline),)
    if len(state.cohort.accepted) < state.rules.buffer:
        return _by_places(after), effects
    return replace(after, phase=RoundPhase.CLOSING), (*effects, e.Close())


def _start_deadline(state: Round, now: float, *, has_quorum: bool = False) -> Outcome:
    """Start the deadline of a Round that has, or is known to have had, as many devices as its quorum."""
    has_quorum = has_quorum or state.cohort.num_taken >= state.rules.quorum
    if state.deadline is not None or not has_quorum:
        return state, ()
    deadline = now + state.rules.deadline_s
    return replace(state, deadline=deadline), (e.KeepDeadline(deadline=deadline),)


def _timed(state: Round, now: float) -> Round:
    """Note when the quorum was complete."""
    rules = state.rules
    if state.quorum_s is not None or len(state.cohort.accepted) < rules.quorum:
        return state
    left_s = state.left_s if state.deadline is None else state.deadline - now
    window_s = rules.deadline_s + state.extension_s
    return replace(state, quorum_s=0.0 if left_s is None else max(window_s - left_s, 0.0))


def _freed(state: Round) -> Round:
    """Return a Round after a device left its place."""
    return state if state.phase is RoundPhase.PAUSED else _by_places(state)


def _by_places(state: Round) -> Round:
    is_free = state.cohort.num_taken < state.rules.concurrency
    return replace(state, phase=RoundPhase.SELECTING if is_free else RoundPhase.TRAINING)


_COLLECTING: Final[Rows] = MappingProxyType(
    {
        (RoundPhase.SELECTING, e.CheckedIn): row(_check_in, *ASSIGNING),
        (RoundPhase.SELECTING, e.GaveUp): row(_give_up, RoundPhase.SELECTING),
        (RoundPhase.SELECTING, e.Gone): row(_leave, RoundPhase.SELECTING),
        (RoundPhase.SELECTING, e.UpdateCommitted): row(_commit, *ASSIGNING, RoundPhase.CLOSING),
        (RoundPhase.TRAINING, e.CheckedIn): row(_check_in, RoundPhase.TRAINING),
        (RoundPhase.TRAINING, e.GaveUp): row(_give_up, *ASSIGNING),
        (RoundPhase.TRAINING, e.Gone): row(_leave, *ASSIGNING),
        (RoundPhase.TRAINING, e.UpdateCommitted): row(_commit, RoundPhase.TRAINING, RoundPhase.CLOSING),
        **{(phase, e.TimePassed): row(_look_at_deadline, phase, RoundPhase.CLOSING) for phase in ASSIGNING},
        # After a restart, the record may have the set already.
        **{(phase, e.Closed): row(close, RoundPhase.FOLDING) for phase in ASSIGNING},
        **{(phase, e.Paused): row(_pause, RoundPhase.PAUSED) for phase in ASSIGNING},
        # When a Run is resumed, its Round may be under way already.
        **{(phase, e.Resumed): row(stay, phase) for phase in ASSIGNING},
    }
)
_PAUSED: Final[Rows] = MappingProxyType(
    {
        (RoundPhase.PAUSED, e.GaveUp): row(_give_up, RoundPhase.PAUSED),
        (RoundPhase.PAUSED, e.Gone): row(_leave, RoundPhase.PAUSED),
        (RoundPhase.PAUSED, e.UpdateCommitted): row(_commit, RoundPhase.PAUSED),
        (RoundPhase.PAUSED, e.Resumed): row(_resume, *ASSIGNING, RoundPhase.CLOSING),
        **unchanged([RoundPhase.PAUSED], (e.TimePassed, e.Paused)),
    }
)
PLAIN: Final = compose(
    "plain",
    RoundPhase.SELECTING,
    _COLLECTING,
    _PAUSED,
    failure_exits(*ASSIGNING, RoundPhase.PAUSED),
    ENDING,
)
"""The protocol of a Round without masks."""

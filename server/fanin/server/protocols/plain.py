"""The plain round protocol: every Update is folded as its device sent it.

The phases before the shared ones (``endings``)::

    SELECTING   places are free: each suitable device that checks in receives an Assignment
    TRAINING    all places are taken; a device that gives up, or is silent for too long, frees one
    PAUSED      no device is assigned and the deadline stands still; Updates under way still count
"""

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from fanin.server.protocols import events as e
from fanin.server.protocols.endings import ENDING, close, failure_exits, stay, unchanged
from fanin.server.protocols.machine import Outcome, Round, Rows, compose, row
from fanin.server.protocols.phases import CLOSING, FOLDING, PAUSED, SELECTING, TRAINING

ASSIGNING: Final = (SELECTING, TRAINING)
RECHECK_S: Final = 5.0
"""Shortest time between two looks for missing participants. Each reads the record of devices."""


def begin(state: Round, now: float) -> Outcome:
    """Return a Round that begins, and its effects. Devices may still be at work for an earlier Round."""
    return start_deadline(_by_places(state), now)


def check_in(state: Round, event: e.Event, now: float) -> Outcome:
    assert isinstance(event, e.CheckedIn)
    cohort = state.cohort
    if state.holds(event.device):
        return state, (e.Assign(device=event.device),)
    if not state.may_join(event.device, now):
        return state, ()
    joined = replace(cohort, at_work=cohort.at_work.insert(event.device))
    after, effects = start_deadline(_by_places(replace(state, cohort=joined)), now)
    return after, (*effects, e.Assign(device=event.device))


def give_up(state: Round, event: e.Event, _now: float) -> Outcome:
    assert isinstance(event, e.GaveUp)
    cohort, device = state.cohort, event.device
    if device not in cohort.at_work:
        return state, ()
    after = replace(cohort, at_work=cohort.at_work.remove(device), gave_up=cohort.gave_up.insert(device))
    return _freed(replace(state, cohort=after)), ()


def leave(state: Round, event: e.Event, _now: float) -> Outcome:
    assert isinstance(event, e.Gone)
    gone = tuple(device for device in event.devices if device in state.cohort.at_work)
    if not gone:
        return state, ()
    at_work = state.cohort.at_work
    for device in gone:
        at_work = at_work.remove(device)
    return _freed(replace(state, cohort=replace(state.cohort, at_work=at_work))), (e.RecordGone(devices=gone),)


def commit(state: Round, event: e.Event, now: float) -> Outcome:
    assert isinstance(event, e.UpdateCommitted)
    cohort, device = state.cohort, event.device
    if device in cohort.accepted:
        return state, ()
    committed = replace(cohort, at_work=cohort.at_work.discard(device), accepted=cohort.accepted.insert(device))
    after = replace(state, cohort=committed, lack=state.lack.after(event.meets, event.examples))
    effects: tuple[e.Effect, ...] = (e.Accumulate(device=device),)
    if state.phase is PAUSED:
        return timed(after, now), effects
    # The device was assigned before a restart. The process may have ended before it recorded the deadline, and the
    # number of other devices at work is lost. So the deadline starts here.
    was_assigned_before = state.was_resumed and device not in cohort.at_work
    after, started = start_deadline(after, now, has_quorum=was_assigned_before)
    after = timed(after, now)
    effects = (*started, *effects)
    if len(committed.accepted) < state.rules.buffer and not _closes(after, now):
        return _by_places(after), effects
    return replace(after, phase=CLOSING), (*effects, e.Close())


def _closes(state: Round, now: float) -> bool:
    """Return whether a Round with a place left closes now, after a commit."""
    if state.overdue_at is not None:
        return not state.lack and len(state.cohort.accepted) >= state.rules.quorum
    # At the deadline, ``TimePassed`` decides: devices may be making progress, or participants missing.
    return state.wake_at is not None and now >= state.wake_at and not state.lack and not state.may_extend(now)


def look_at_deadline(state: Round, event: e.Event, now: float) -> Outcome:
    assert isinstance(event, e.TimePassed)
    if event.num_waiting and state.deadline is None:
        has_quorum = state.cohort.num_taken + event.num_waiting >= state.rules.quorum
        after, effects = start_deadline(state, now, has_quorum=has_quorum)
        return after, (*effects, e.RecordLack()) if effects else ()
    if state.wake_at is None or state.deadline is None or now < state.wake_at:
        return state, ()
    lacks_updates = bool(state.lack) or len(state.cohort.accepted) < state.rules.quorum
    if event.is_blocked and lacks_updates and state.overdue_at is None:
        # The devices then have the whole deadline again, because each repeats its upload after a pause of its own.
        deadline = now + state.rules.deadline_s
        return replace(state, deadline=deadline), (e.KeepDeadline(deadline=deadline),)
    if state.may_extend(now) and (event.progressing or state.may_have_progress) and state.overdue_at is None:
        extension_s = min(state.extension_s + state.rules.step_s, state.rules.max_extension_s)
        # From now on: after a restart, the recorded deadline may be long past.
        deadline = now + extension_s - state.extension_s
        after = replace(state, deadline=deadline, extension_s=extension_s, may_have_progress=False)
        # In this order, so that a crash between the two never grants more than the Plan's limit.
        record = e.RecordExtension(extension_s=extension_s, devices=event.progressing)
        return after, (record, keep_deadline(state, deadline))
    if state.lack and state.rules.waits and len(state.cohort.accepted) < state.rules.buffer:
        return replace(state, overdue_at=now + max(state.rules.step_s, RECHECK_S)), (e.RecordLack(),)
    if state.overdue_at is not None and len(state.cohort.accepted) < state.rules.quorum:
        return replace(state, overdue_at=now + max(state.rules.step_s, RECHECK_S)), ()
    # The record decides whether there is a quorum, because a commit may be under way at this moment.
    return replace(state, phase=CLOSING), (e.Close(),)


def pause(state: Round, _event: e.Event, now: float) -> Outcome:
    left_s = None if state.deadline is None else max(state.deadline - now, 0.0)
    paused = replace(state, phase=PAUSED, paused_from=state.phase, deadline=None, left_s=left_s, overdue_at=None)
    return paused, ()


def resume(state: Round, _event: e.Event, now: float) -> Outcome:
    state = replace(state, phase=state.working, paused_from=None)
    if state.left_s is None:
        after, effects = start_deadline(state, now)
    else:
        # The recorded deadline may be from before the pause.
        deadline = now + state.left_s
        after, effects = replace(state, deadline=deadline, left_s=None), (keep_deadline(state, deadline),)
    if len(state.cohort.accepted) < state.rules.buffer:
        return _by_places(after), effects
    return replace(after, phase=CLOSING), (*effects, e.Close())


def start_deadline(state: Round, now: float, *, has_quorum: bool = False) -> Outcome:
    """Start the deadline of a Round that has, or is known to have had, as many devices as its quorum."""
    has_quorum = has_quorum or state.cohort.num_taken >= state.quorum
    if state.deadline is not None or not has_quorum:
        return state, ()
    deadline = now + state.window_s
    return replace(state, deadline=deadline), (keep_deadline(state, deadline),)


def keep_deadline(state: Round, deadline: float) -> e.KeepDeadline:
    """Return the effect that records a deadline of the current phase."""
    return e.KeepDeadline(deadline=deadline, num_rosters=state.num_rosters)


def timed(state: Round, now: float) -> Round:
    """Note when the quorum was complete."""
    rules = state.rules
    if state.quorum_s is not None or len(state.cohort.accepted) < rules.quorum:
        return state
    left_s = state.left_s if state.deadline is None else state.deadline - now
    window_s = rules.deadline_s + state.extension_s
    return replace(state, quorum_s=0.0 if left_s is None else max(window_s - left_s, 0.0))


def _freed(state: Round) -> Round:
    """Return a Round after a device left its place."""
    return state if state.phase is PAUSED else _by_places(state)


def _by_places(state: Round) -> Round:
    if not state.protocol.first.accepts_updates:
        # Its roster was frozen before the training.
        return state
    is_free = state.cohort.num_taken < state.rules.concurrency
    return replace(state, phase=SELECTING if is_free else TRAINING)


_COLLECTING: Final[Rows] = MappingProxyType(
    {
        (SELECTING, e.CheckedIn): row(check_in, *ASSIGNING),
        (SELECTING, e.GaveUp): row(give_up, SELECTING),
        (SELECTING, e.Gone): row(leave, SELECTING),
        (SELECTING, e.UpdateCommitted): row(commit, *ASSIGNING, CLOSING),
        (TRAINING, e.CheckedIn): row(check_in, TRAINING),
        (TRAINING, e.GaveUp): row(give_up, *ASSIGNING),
        (TRAINING, e.Gone): row(leave, *ASSIGNING),
        (TRAINING, e.UpdateCommitted): row(commit, TRAINING, CLOSING),
        **{(phase, e.TimePassed): row(look_at_deadline, phase, CLOSING) for phase in ASSIGNING},
        # After a restart, the record may have the set already.
        **{(phase, e.Closed): row(close, FOLDING) for phase in (*ASSIGNING, CLOSING)},
        **{(phase, e.Paused): row(pause, PAUSED) for phase in ASSIGNING},
        # When a Run is resumed, its Round may be under way already.
        **{(phase, e.Resumed): row(stay, phase) for phase in ASSIGNING},
    }
)
_PAUSED: Final[Rows] = MappingProxyType(
    {
        (PAUSED, e.GaveUp): row(give_up, PAUSED),
        (PAUSED, e.Gone): row(leave, PAUSED),
        (PAUSED, e.UpdateCommitted): row(commit, PAUSED),
        (PAUSED, e.Resumed): row(resume, *ASSIGNING, CLOSING),
        **unchanged([PAUSED], (e.TimePassed, e.Paused)),
    }
)
PLAIN: Final = compose(
    "plain",
    SELECTING,
    begin,
    _COLLECTING,
    _PAUSED,
    failure_exits(*ASSIGNING, PAUSED),
    ENDING,
)
"""The protocol of a Round without masks."""

"""Round protocols with messages: phases in which devices and coordinator exchange them, before and after the training.

    before[0] -> .. -> TRAINING -> CLOSING -> after[0] -> .. -> FOLDING
        |roster        |roster      |closed set   |roster

The first phase gives the places. A phase with messages ends when all expected ones are recorded, or once it has its
quorum and its time has come. Then its roster is recorded, and only the devices of the roster take part in the next
phase. A message that is late finds the roster frozen and is not recorded. Without a quorum the Round fails.

After a restart, the recorded rosters, messages and Updates become the same events again. So no phase has code for it.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from rpds import HashTrieSet

from fanin.server.protocols import events as e
from fanin.server.protocols.endings import ENDING, close, failure_exits, stay, unchanged
from fanin.server.protocols.machine import (
    Cohort,
    IllegalEvent,
    Outcome,
    Round,
    RoundProtocol,
    Rows,
    Rule,
    compose,
    row,
)
from fanin.server.protocols.phases import CLOSING, FOLDING, PAUSED, TRAINING, Phase
from fanin.server.protocols.plain import (
    check_in,
    commit,
    give_up,
    leave,
    look_at_deadline,
    pause,
    resume,
    start_deadline,
)
from fanin.server.selection.coverage import Lack

NO_ONE: "Final[HashTrieSet[str]]" = HashTrieSet()


def exchanging(
    name: str,
    before: Sequence[Phase],
    after: Sequence[Phase] = (),
    *,
    training: Phase = TRAINING,
) -> RoundProtocol:
    """Return a protocol with phases of messages around the training. ``replace`` adds a correction of the sum.

    Args:
        name: The name of the protocol.
        before: The phases before the training. The first one gives the places, so it has messages of devices.
        after: The phases after the closed set is recorded.
        training: The phase in which Updates are accepted. With an exchange of 0 bytes, its reply has the closed set.

    Raises:
        ValueError: The flags of a phase do not fit its place.
    """
    _check_flags(name, before, after, training)
    following = dict(pairwise((*before, training))) | dict(pairwise((*after, FOLDING)))

    def freeze(state: Round, event: e.Event, now: float) -> Outcome:
        assert isinstance(event, e.RosterFrozen)
        if state.working not in following:
            raise IllegalEvent(f"round: RosterFrozen in phase {state.phase}, paused in {state.working}")
        state = replace(state, num_rosters=state.num_rosters + 1)
        return _enter(state, following[state.working], event.devices, now)

    def end(state: Round, event: e.Event, now: float) -> Outcome:
        if not after:
            return close(state, event, now)
        assert isinstance(event, e.Closed)
        # Checks the set, as for each protocol.
        closed, _ = close(state, event, now)
        return _enter(replace(closed, closed=event.accepted), after[0], event.accepted, now)

    collecting = (*before, training)
    rows = [
        *(_gathering_rows(phase, following[phase], freeze) for phase in before),
        *(_asking_rows(phase, following[phase], freeze) for phase in after),
        _training_rows(training, end, after[0] if after else FOLDING),
        _paused_rows(collecting, freeze),
        failure_exits(*collecting, *after, PAUSED),
        ENDING,
    ]
    protocol = compose(name, before[0], start_deadline, *rows)
    return replace(protocol, after_close=frozenset(phase.name for phase in after))


def _check_flags(name: str, before: Sequence[Phase], after: Sequence[Phase], training: Phase) -> None:
    expected = [(phase, (index == 0, True, False, True)) for index, phase in enumerate(before)]
    expected += [(phase, (False, True, False, True)) for phase in after]
    expected += [(training, (False, True, True, training.exchange is not None))]
    if not before:
        raise ValueError(f"protocol {name}: got no phase before the training, expected one that gives the places")
    for phase, wanted in expected:
        flags = (phase.gives_places, phase.assigns, phase.accepts_updates, phase.exchange is not None)
        if flags != wanted:
            names = "gives_places, assigns, accepts_updates, an exchange"
            raise ValueError(f"protocol {name}: phase {phase}: got {flags} for ({names}), expected {wanted}")
    for phase in (*before, *after):
        if phase.exchange is not None and not phase.exchange.max_bytes:
            raise ValueError(f"protocol {name}: phase {phase}: got max_bytes 0, expected at least 1")
    if training.exchange is not None and training.exchange.max_bytes:
        raise ValueError(f"protocol {name}: phase {training}: got messages with the Updates, expected max_bytes 0")


def _enter(state: Round, phase: Phase, devices: tuple[str, ...], now: float) -> Outcome:
    """Begin a phase after the roster before it was recorded."""
    members = HashTrieSet(devices)
    after = replace(state, members=members, sent=NO_ONE, is_freezing=False, deadline=None, left_s=None, quorum_s=None)
    if phase is FOLDING:
        return replace(after, phase=FOLDING, cohort=Cohort(), closed=()), (e.Fold(accepted=state.closed),)
    if state.closed:
        after = replace(after, phase=phase, lack=Lack())
        return start_deadline(after, now, has_quorum=True)
    gave_up = state.cohort.gave_up
    present = HashTrieSet(device for device in devices if device not in gave_up)
    after = replace(after, cohort=replace(state.cohort, at_work=present))
    if state.paused_from is not None:
        # The deadline of the next phase begins when the Round is resumed.
        return replace(after, paused_from=phase), ()
    return start_deadline(replace(after, phase=phase), now, has_quorum=True)


def _gather(state: Round, event: e.Event, now: float) -> Outcome:
    assert isinstance(event, e.MessageCommitted)
    after = replace(state, sent=state.sent.insert(event.device))
    if state.phase is PAUSED:
        return after, ()
    if after.quorum_s is None and len(after.sent) >= after.quorum and after.deadline is not None:
        after = replace(after, quorum_s=max(after.window_s - (after.deadline - now), 0.0))
    return _freeze_if_complete(after)


def _look(state: Round, event: e.Event, now: float) -> Outcome:
    assert isinstance(event, e.TimePassed)
    if state.wake_at is None or now < state.wake_at or state.is_freezing:
        return state, ()
    # The record decides whether there is a quorum, because a commit may be under way at this moment.
    return _freeze(state)


def _freeze_if_complete(state: Round) -> Outcome:
    """Freeze the roster if no message can come any more."""
    if state.phase.gives_places and len(state.sent) < state.rules.concurrency:
        return state, ()
    expected = state.members if state.closed else state.cohort.at_work
    if state.is_freezing or len(state.sent) < state.quorum or not all(device in state.sent for device in expected):
        return state, ()
    return _freeze(state)


def _freeze(state: Round) -> Outcome:
    return replace(state, is_freezing=True, deadline=None), (e.Freeze(phase=state.phase.name, quorum=state.quorum),)


def _then_freeze(rule: Rule) -> Rule:
    """Return a rule after which the roster is frozen if no other message is expected."""

    def changed(state: Round, event: e.Event, now: float) -> Outcome:
        after, effects = rule(state, event, now)
        frozen, more = _freeze_if_complete(after)
        return frozen, (*effects, *more)

    return changed


def _resume(state: Round, event: e.Event, now: float) -> Outcome:
    after, effects = resume(state, event, now)
    if after.phase.exchange is None or after.phase.accepts_updates:
        return after, effects
    if after.is_freezing:
        # It was being recorded when the Round was paused.
        after = replace(after, deadline=None)
    frozen, more = _freeze_if_complete(after)
    return frozen, (*effects, *more)


def _gathering_rows(phase: Phase, then: Phase, freeze: Rule) -> Rows:
    """Return the rows of a phase before the training."""
    return MappingProxyType(
        {
            (phase, e.CheckedIn): row(check_in, phase),
            (phase, e.GaveUp): row(_then_freeze(give_up), phase),
            (phase, e.Gone): row(_then_freeze(leave), phase),
            (phase, e.MessageCommitted): row(_gather, phase),
            (phase, e.TimePassed): row(_look, phase),
            (phase, e.RosterFrozen): row(freeze, then),
            (phase, e.Paused): row(pause, PAUSED),
            (phase, e.Resumed): row(stay, phase),
        }
    )


def _asking_rows(phase: Phase, then: Phase, freeze: Rule) -> Rows:
    """Return the rows of a phase after the closed set is recorded. A pause changes nothing any more."""
    return MappingProxyType(
        {
            (phase, e.CheckedIn): row(check_in, phase),
            (phase, e.MessageCommitted): row(_gather, phase),
            (phase, e.TimePassed): row(_look, phase),
            (phase, e.RosterFrozen): row(freeze, then),
            **unchanged([phase], (e.Paused, e.Resumed)),
        }
    )


def _training_rows(training: Phase, end: Rule, then: Phase) -> Rows:
    return MappingProxyType(
        {
            (training, e.CheckedIn): row(check_in, training),
            (training, e.GaveUp): row(give_up, training),
            (training, e.Gone): row(leave, training),
            (training, e.UpdateCommitted): row(commit, training, CLOSING),
            (training, e.TimePassed): row(look_at_deadline, training, CLOSING),
            (training, e.Paused): row(pause, PAUSED),
            (training, e.Resumed): row(stay, training),
            # After a restart, the record may have the set already.
            **{(phase, e.Closed): row(end, then) for phase in (training, CLOSING)},
        }
    )


def _paused_rows(collecting: Sequence[Phase], freeze: Rule) -> Rows:
    return MappingProxyType(
        {
            (PAUSED, e.GaveUp): row(give_up, PAUSED),
            (PAUSED, e.Gone): row(leave, PAUSED),
            (PAUSED, e.UpdateCommitted): row(commit, PAUSED),
            (PAUSED, e.MessageCommitted): row(_gather, PAUSED),
            (PAUSED, e.RosterFrozen): row(freeze, PAUSED),
            (PAUSED, e.Resumed): row(_resume, *collecting, CLOSING),
            **unchanged([PAUSED], (e.TimePassed, e.Paused)),
        }
    )

"""Rows that every round protocol shares: from the closed set to the Version, and the failure exits.

The phases::

    CLOSING     enough Updates are committed, or the deadline has passed: the set or the failure is being recorded
    FOLDING     the set is durable and final; the sum and the outer step are being computed
    PUBLISHING  the new parameters are stored; the Version is being recorded
    PUBLISHED   the Round has ended with a Version
    FAILING     an effect cannot be carried out; the failure is being recorded
    FAILED      no quorum at the deadline, a command of an operator, or an effect that cannot be carried out
"""

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from fanin.server.protocols import events as e
from fanin.server.protocols.machine import Cohort, IllegalEvent, Outcome, Round, Rows, row
from fanin.server.protocols.phases import CLOSING, FAILED, FAILING, FOLDING, PUBLISHED, PUBLISHING, Phase


def stay(state: Round, _event: e.Event, _now: float) -> Outcome:
    """Change nothing."""
    return state, ()


def close(state: Round, event: e.Event, _now: float) -> Outcome:
    """Fold the recorded set. It may have an Update whose commit was under way when the deadline passed."""
    assert isinstance(event, e.Closed)
    recorded = set(event.accepted)
    if missing := sorted(device for device in state.cohort.accepted if device not in recorded):
        raise IllegalEvent(f"round: closed with {sorted(recorded)}, expected {missing} too")
    after = replace(state, phase=FOLDING, cohort=Cohort(), num_rosters=state.num_rosters + 1)
    return after, (e.Fold(accepted=event.accepted),)


def _stored(state: Round, _event: e.Event, _now: float) -> Outcome:
    return replace(state, phase=PUBLISHING), (e.Publish(),)


def _published(state: Round, _event: e.Event, _now: float) -> Outcome:
    return replace(state, phase=PUBLISHED), (e.GoOn(),)


def _break(state: Round, event: e.Event, _now: float) -> Outcome:
    assert isinstance(event, e.Broken)
    return replace(state, phase=FAILING, cohort=Cohort()), (e.Fail(reason=event.reason),)


def _failed(state: Round, _event: e.Event, _now: float) -> Outcome:
    return replace(state, phase=FAILED, cohort=Cohort()), (e.GoOn(),)


def failure_exits(*phases: Phase) -> Rows:
    """Return the rows by which a Round fails in each of these phases."""
    broken = {(phase, e.Broken): row(_break, FAILING) for phase in phases}
    return MappingProxyType(broken | {(phase, e.Failed): row(_failed, FAILED) for phase in phases})


def unchanged(phases: Iterable[Phase], events: Iterable[type[e.Event]]) -> Rows:
    """Return the rows for events that change nothing in these phases."""
    return MappingProxyType({(phase, event): row(stay, phase) for phase in phases for event in events})


_AFTER: Final = (CLOSING, FOLDING, PUBLISHING)
ENDING: Final[Rows] = MappingProxyType(
    {
        (FOLDING, e.ParametersStored): row(_stored, PUBLISHING),
        (PUBLISHING, e.Published): row(_published, PUBLISHED),
        **failure_exits(*_AFTER),
        # The error came after the Version was durable.
        (FAILING, e.Published): row(_published, PUBLISHED),
        (FAILING, e.Failed): row(_failed, FAILED),
        # Time, a pause or its end change nothing once a Round closes; only its failure does.
        **unchanged((*_AFTER, FAILING), (e.TimePassed, e.Paused, e.Resumed)),
    }
)
"""The rows from CLOSING on."""

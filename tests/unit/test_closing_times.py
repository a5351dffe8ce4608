"""When a Round with a quorum closes: after a multiple of the time that the quorum took, or when no device can come."""

import math
from dataclasses import replace

import pytest

from fanin.server.protocols import events as e
from fanin.server.protocols import phases
from fanin.server.protocols.machine import Round, Rules
from fanin.server.protocols.plain import PLAIN

ADAPTIVE = Rules(concurrency=4, buffer=4, quorum=3, deadline_s=60.0, min_report_s=1.0, report_factor=2.0)


def follow(state: Round, *events: e.Event, now: float = 0.0) -> tuple[Round, list[e.Effect]]:
    """Apply the events. Return the Round after them, and all their effects."""
    all_effects: list[e.Effect] = []
    for event in events:
        state, effects = state.step(event, now)
        all_effects += effects
    return state, all_effects


def check_in(*devices: str) -> list[e.Event]:
    return [e.CheckedIn(device=device) for device in devices]


def commit(*devices: str) -> list[e.Event]:
    return [e.UpdateCommitted(device=device) for device in devices]


def test_with_a_quorum_the_round_waits_for_a_multiple_of_the_time_that_the_quorum_took() -> None:
    state, _ = follow(Round(protocol=PLAIN, rules=ADAPTIVE), *check_in("a", "b", "c", "d"), now=100.0)
    assert state.wake_at == 160.0
    state, _ = follow(state, *commit("a", "b"), now=105.0)
    assert state.wake_at == 160.0
    state, _ = follow(state, *commit("c"), now=110.0)
    assert (state.quorum_s, state.wake_at) == (10.0, 120.0)
    assert follow(state, e.TimePassed(), now=119.9) == (state, [])
    closing, effects = follow(state, e.TimePassed(), now=120.0)
    assert (closing.phase, effects) == (phases.CLOSING, [e.Close()])


@pytest.mark.parametrize(
    ("quorum_s", "factor", "min_report_s", "wake_s"),
    [
        (0.2, 2.0, 1.0, 1.0),  # the floor
        (10.0, 1.0, 1.0, 10.0),
        (10.0, 3.0, 1.0, 30.0),
        (40.0, 2.0, 1.0, 60.0),  # the deadline
        (10.0, math.inf, 1.0, 60.0),
        (0.0, math.inf, 1.0, 60.0),
        (10.0, 2.0, math.inf, 60.0),
    ],
)
def test_the_wait_is_between_the_floor_and_the_deadline(
    quorum_s: float, factor: float, min_report_s: float, wake_s: float
) -> None:
    rules = replace(ADAPTIVE, min_report_s=min_report_s, report_factor=factor)
    state, _ = follow(Round(protocol=PLAIN, rules=rules), *check_in("a", "b", "c", "d"))
    state, effects = follow(state, *commit("a", "b", "c"), now=quorum_s)
    if factor == 1.0:
        assert effects[-1] == e.Close()
    else:
        assert state.wake_at == wake_s


def test_after_the_quorum_a_device_begins_only_if_there_is_time() -> None:
    """Its Update would come too late. A Round for which no device works or may begin closes at once."""
    state, _ = follow(Round(protocol=PLAIN, rules=ADAPTIVE), *check_in("a", "b", "c"))
    quick, _ = follow(state, *commit("a", "b", "c"), now=0.25)
    # The Round waits until 1.0 s, and a device takes 0.25 s.
    assert (quick.num_places(0.5), quick.num_places(0.75), quick.wake_at) == (1, 0, 0.75)
    slow, effects = follow(state, *commit("a", "b", "c"), now=10.0)
    assert (slow.phase, effects[-1]) == (phases.CLOSING, e.Close())
    # While another device works, the Round waits, and still assigns none.
    state, _ = follow(state, *check_in("d"), *commit("a", "b", "c"), now=10.0)
    state, _ = follow(state, e.GaveUp(device="d"), now=15.0)
    assert (state.phase, state.num_places(15.0), state.wake_at) == (phases.SELECTING, 0, 10.0)
    assert follow(state, e.TimePassed(), now=15.0)[1] == [e.Close()]
    # An Update for this Round may count in the next one.
    buffered = replace(ADAPTIVE, late_counts=True)
    state, _ = follow(Round(protocol=PLAIN, rules=buffered), *check_in("a", "b", "c"), *commit("a", "b", "c"), now=10.0)
    assert (state.num_places(15.0), state.wake_at) == (1, 11.0)


def test_a_quorum_of_a_paused_round_counts_the_time_before_the_pause() -> None:
    state, _ = follow(Round(protocol=PLAIN, rules=ADAPTIVE), *check_in("a", "b", "c", "d"))
    state, _ = follow(state, e.Paused(), now=10.0)
    state, _ = follow(state, *commit("a", "b", "c"), now=500.0)
    assert state.quorum_s == 10.0
    state, _ = follow(state, e.Resumed(), now=1000.0)
    assert state.wake_at == 1010.0


def test_at_the_deadline_the_record_decides() -> None:
    """A commit may be in progress at that moment. Only the record knows whether there is a quorum."""
    for quorum in (1, 2):
        rules = Rules(concurrency=3, buffer=3, quorum=quorum, deadline_s=60.0)
        state, _ = follow(Round(protocol=PLAIN, rules=rules), *check_in("a", "b"), *commit("b"))
        state, effects = follow(state, e.TimePassed(), now=60.0)
        assert effects == [e.Close()]
        assert state.phase is phases.CLOSING

"""The round machine: every (phase, event) pair, and the course of a Round."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises

from fanin.server.protocols import events as e
from fanin.server.protocols import machine as r
from fanin.server.protocols import phases
from fanin.server.protocols.endings import ENDING, close, failure_exits, stay
from fanin.server.protocols.machine import Round, Rules, diagram
from fanin.server.protocols.phases import Phase
from fanin.server.protocols.plain import PLAIN, begin
from fanin.server.selection.coverage import Lack

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "rounds.md"
RULES = Rules(concurrency=3, buffer=2, quorum=1, deadline_s=60.0)
SYNCHRONOUS = Rules(concurrency=2, buffer=2, quorum=2, deadline_s=60.0)
EAGER = replace(SYNCHRONOUS, quorum=1)
PATIENT = replace(EAGER, max_extension_s=4.0, waits=True)
PHASES = tuple(PLAIN.phases.values())
EVENT_KINDS: tuple[type[e.Event], ...] = get_args(e.Event)
SAMPLES: tuple[e.Event, ...] = (
    e.CheckedIn(device="a"),
    e.CheckedIn(device="new"),
    e.GaveUp(device="a"),
    e.GaveUp(device="new"),
    e.Gone(devices=("new",)),
    e.Gone(devices=("new", "a")),
    e.UpdateCommitted(device="a"),
    e.UpdateCommitted(device="new"),
    e.UpdateCommitted(device="a", meets=frozenset({"id:a"})),
    e.MessageCommitted(device="a"),
    e.RosterFrozen(devices=("a",)),
    e.TimePassed(),
    e.TimePassed(progressing=("a",)),
    e.Closed(accepted=("new", "a")),
    e.ParametersStored(),
    e.Published(),
    e.Paused(),
    e.Resumed(),
    e.Broken(reason="damaged"),
    e.Failed(),
)


@cache
def reachable() -> dict[Phase, list[Round]]:
    """Return the Rounds in each phase that sequences of at most seven sample events reach."""
    seen = {Round(protocol=PLAIN, rules=rules) for rules in (RULES, SYNCHRONOUS, EAGER)}
    lack = Lack((("id:a", 1),))
    seen |= {Round(protocol=PLAIN, rules=replace(PATIENT, waits=waits), lack=lack) for waits in (False, True)}
    edge = set(seen)
    for _ in range(7):
        fresh = set()
        for state, event, now in product(edge, SAMPLES, (0.0, 60.0)):
            if (state.phase, type(event)) in PLAIN.rows:
                fresh.add(state.step(event, now)[0])
        edge = fresh - seen
        seen |= fresh
    return {phase: [state for state in seen if state.phase is phase] for phase in PHASES}


def test_each_kind_of_event_has_a_sample() -> None:
    assert {type(event) for event in SAMPLES} == set(EVENT_KINDS)


@pytest.mark.parametrize(("phase", "kind"), list(product(PHASES, EVENT_KINDS)), ids=lambda value: str(value))
def test_each_pair_leads_to_a_target_of_the_table_or_is_illegal(phase: Phase, kind: type[e.Event]) -> None:
    row = PLAIN.rows.get((phase, kind))
    assert reachable()[phase]
    for state, event, now in product(reachable()[phase], SAMPLES, (0.0, 60.0)):
        if type(event) is not kind:
            continue
        before = replace(state)
        if row is None:
            with raises(r.IllegalEvent, f"round: {kind.__name__} in phase {phase}"):
                state.step(event, now)
        else:
            after, effects = state.step(event, now)
            assert after.phase in row.targets
            assert all(isinstance(effect, get_args(e.Effect)) for effect in effects)
        assert state == before


def test_a_round_that_has_ended_accepts_no_event() -> None:
    assert {phase for phase, _ in PLAIN.rows} == set(PHASES) - {phases.PUBLISHED, phases.FAILED}


def test_every_declared_target_is_reached() -> None:
    """An unreachable target would be a wrong arrow in the diagram."""
    targets: dict[tuple[Phase, type[e.Event]], set[Phase]] = {key: set() for key in PLAIN.rows}
    for (phase, kind), row in PLAIN.rows.items():
        for state, event, now in product(reachable()[phase], SAMPLES, (0.0, 60.0)):
            if type(event) is kind:
                targets[phase, kind].add(state.step(event, now)[0].phase)
        assert targets[phase, kind] == row.targets, (phase, kind)


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


def test_a_synchronous_round_from_its_first_device_to_its_version() -> None:
    state, effects = follow(Round(protocol=PLAIN, rules=SYNCHRONOUS), *check_in("a", "b"), now=5.0)
    assert effects == [e.Assign(device="a"), e.KeepDeadline(deadline=65.0), e.Assign(device="b")]
    assert state.phase is phases.TRAINING

    state, effects = follow(state, *commit("b", "a"), now=6.0)
    assert effects == [e.Accumulate(device="b"), e.Accumulate(device="a"), e.Close()]
    assert state.phase is phases.CLOSING

    state, effects = follow(state, e.Closed(accepted=("b", "a")), e.ParametersStored(), e.Published(), now=7.0)
    assert effects == [e.Fold(accepted=("b", "a")), e.Publish(), e.GoOn()]
    assert state.phase is phases.PUBLISHED


def test_a_device_that_checks_in_again_gets_the_same_assignment_and_no_second_place() -> None:
    state, _ = follow(Round(protocol=PLAIN, rules=RULES), *check_in("a"))
    next_state, effects = follow(state, *check_in("a"), now=9.0)
    assert effects == [e.Assign(device="a")]
    assert next_state == state


def test_the_same_assignment_is_returned_when_all_places_are_taken() -> None:
    state, _ = follow(Round(protocol=PLAIN, rules=RULES), *check_in("a", "b", "c"))
    assert state.phase is phases.TRAINING
    assert follow(state, *check_in("b")) == (state, [e.Assign(device="b")])
    assert follow(state, *check_in("d")) == (state, [])


def test_a_device_whose_update_is_committed_gets_nothing_more() -> None:
    state, _ = follow(Round(protocol=PLAIN, rules=RULES), *check_in("a"), *commit("a"))
    assert follow(state, *check_in("a")) == (state, [])
    assert follow(state, *commit("a")) == (state, [])


def test_with_a_buffer_below_concurrency_the_first_updates_close_the_round() -> None:
    state, _ = follow(Round(protocol=PLAIN, rules=RULES), *check_in("a", "b", "c"), *commit("c"))
    assert (state.phase, state.num_places(0.0)) == (phases.TRAINING, 0)
    state, effects = follow(state, *commit("a"))
    assert effects == [e.Accumulate(device="a"), e.Close()]
    assert set(state.cohort.at_work) == {"b"}
    assert not state.is_open


def test_a_device_that_gives_up_frees_its_place() -> None:
    state, _ = follow(Round(protocol=PLAIN, rules=RULES), *check_in("a", "b", "c"))
    state, effects = follow(state, e.GaveUp(device="b"))
    assert effects == []
    assert (state.phase, state.num_places(0.0)) == (phases.SELECTING, 1)
    state, effects = follow(state, *check_in("d"), now=30.0)
    assert effects == [e.Assign(device="d")]
    assert (state.phase, state.deadline) == (phases.TRAINING, 60.0)


def test_the_round_does_not_wait_for_a_device_that_is_gone_and_counts_its_late_update() -> None:
    rules = replace(SYNCHRONOUS, concurrency=3, buffer=3)
    state, _ = follow(Round(protocol=PLAIN, rules=rules), *check_in("a", "b", "c"))
    state, effects = follow(state, e.Gone(devices=("c", "stranger")), now=10.0)
    assert effects == [e.RecordGone(devices=("c",))]
    assert (state.phase, state.num_places(10.0), state.cohort.at_work) == (phases.SELECTING, 1, {"a", "b"})
    assert follow(state, *check_in("c"), now=11.0)[1] == [e.Assign(device="c")]
    state, _ = follow(state, *check_in("d"), now=11.0)
    late, effects = follow(state, *commit("c"), now=12.0)
    assert effects == [e.Accumulate(device="c")]
    assert (late.phase, late.num_places(12.0)) == (phases.TRAINING, 0)


def test_giving_up_without_an_assignment_changes_nothing() -> None:
    state, _ = follow(Round(protocol=PLAIN, rules=RULES), *check_in("a", "b", "c"))
    assert follow(state, e.GaveUp(device="stranger")) == (state, [])


@pytest.mark.parametrize("quorum", [1, 2, 3])
def test_the_deadline_counts_from_the_assignment_that_completes_the_quorum(quorum: int) -> None:
    state = Round(protocol=PLAIN, rules=Rules(concurrency=3, buffer=3, quorum=quorum, deadline_s=60.0))
    for number, device in enumerate("abc", 1):
        assert state.deadline is None or number > quorum
        assert follow(state, e.TimePassed(), now=100.0 * number - 50.0)[0].phase is not phases.CLOSING
        state, effects = follow(state, *check_in(device), now=100.0 * number)
        assert (e.KeepDeadline(deadline=100.0 * quorum + 60.0) in effects) == (number == quorum)
        if state.deadline is not None:
            break
    assert state.deadline == 100.0 * quorum + 60.0
    assert follow(state, e.TimePassed(), now=state.deadline - 0.1) == (state, [])


@pytest.mark.parametrize(("paused_at", "remaining_s"), [(10.0, 50.0), (59.0, 1.0), (75.0, 0.0)])
def test_a_resumed_round_has_the_remaining_seconds(paused_at: float, remaining_s: float) -> None:
    state, _ = follow(Round(protocol=PLAIN, rules=SYNCHRONOUS), *check_in("a", "b"))
    assert state.deadline == 60.0
    state, effects = follow(state, e.Paused(), now=paused_at)
    assert (state.deadline, state.left_s, effects) == (None, remaining_s, [])
    assert follow(state, e.TimePassed(), now=1e6) == (state, [])
    state, effects = follow(state, e.Resumed(), now=1000.0)
    assert (state.deadline, state.left_s) == (1000.0 + remaining_s, None)
    assert effects == [e.KeepDeadline(deadline=1000.0 + remaining_s)]


def test_a_round_that_was_paused_without_a_deadline_resumes_without_one() -> None:
    state, effects = follow(Round(protocol=PLAIN, rules=SYNCHRONOUS), *check_in("a"), e.Paused(), e.Resumed(), now=10.0)
    assert (state.deadline, state.left_s) == (None, None) and not any(isinstance(x, e.KeepDeadline) for x in effects)


def test_an_early_device_waits_with_its_update_for_the_others() -> None:
    """No device has failed: the Round has never had enough devices."""
    state, _ = follow(Round(protocol=PLAIN, rules=SYNCHRONOUS), *check_in("a"), *commit("a"))
    assert follow(state, e.TimePassed(), now=1e9) == (state, [])
    state, effects = follow(state, *check_in("b"), now=1e9)
    assert effects == [e.KeepDeadline(deadline=1e9 + 60.0), e.Assign(device="b")]
    assert follow(state, *commit("b"), now=1e9)[0].phase is phases.CLOSING


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in (phases.PUBLISHED, phases.FAILED)])
def test_every_phase_has_a_failure_exit(phase: Phase) -> None:
    for state in reachable()[phase]:
        assert follow(state, e.Failed()) == (replace(state, phase=phases.FAILED, cohort=r.Cohort()), [e.GoOn()])
        if phase is not phases.FAILING:
            failing, effects = follow(state, e.Broken(reason="damaged"))
            assert (failing.phase, effects) == (phases.FAILING, [e.Fail(reason="damaged")])
            # No device holds a place any more, and time has no effect.
            assert (failing.is_open, failing.num_places(0.0), failing.wake_at) == (False, 0, None)


def test_a_round_whose_version_was_durable_before_the_error_has_not_failed() -> None:
    state, _ = follow(
        Round(protocol=PLAIN, rules=RULES),
        e.Closed(accepted=("a",)),
        e.ParametersStored(),
        e.Broken(reason="the reply was lost"),
    )
    state, effects = follow(state, e.Published())
    assert (state.phase, effects) == (phases.PUBLISHED, [e.GoOn()])


def test_from_the_minimum_reporting_time_on_a_quorum_suffices() -> None:
    rules = Rules(concurrency=4, buffer=4, quorum=2, deadline_s=60.0, min_report_s=20.0)
    state, _ = follow(Round(protocol=PLAIN, rules=rules), *check_in("a", "b", "c", "d"), *commit("a"))
    assert state.wake_at == 60.0
    assert follow(state, e.TimePassed(), now=59.0) == (state, [])
    early, _ = follow(state, *commit("b"), now=5.0)
    assert (early.phase, early.wake_at) == (phases.TRAINING, 20.0)
    assert follow(early, e.TimePassed(), now=19.0) == (early, [])
    closing, effects = follow(early, e.TimePassed(), now=20.0)
    assert (closing.phase, effects) == (phases.CLOSING, [e.Close()])
    # Later, the Update that completes the quorum closes the Round.
    closing, effects = follow(state, *commit("b"), now=30.0)
    assert (closing.phase, effects) == (phases.CLOSING, [e.Accumulate(device="b"), e.Close()])


def test_a_round_fails_when_the_record_has_no_quorum() -> None:
    state, _ = follow(Round(protocol=PLAIN, rules=SYNCHRONOUS), *check_in("a", "b"), *commit("b"))
    state, effects = follow(state, e.TimePassed(), e.Failed(), now=60.0)
    assert effects == [e.Close(), e.GoOn()]
    assert state.phase is phases.FAILED


def test_a_round_whose_deadline_was_lost_gets_one_with_its_first_update() -> None:
    """The coordinator restarted before it recorded the deadline. The devices at work only upload, none checks in."""
    state, effects = follow(Round(protocol=PLAIN, rules=SYNCHRONOUS, was_resumed=True), *commit("a"), now=100.0)
    assert effects == [e.KeepDeadline(deadline=160.0), e.Accumulate(device="a")]
    assert follow(state, e.TimePassed(), now=160.0)[0].phase is phases.CLOSING


def test_an_update_of_a_device_without_a_place_starts_no_deadline_before_the_quorum_is_there() -> None:
    """A device that gave up can still upload. It must not close, and so fail, a Round that waits for its quorum."""
    rules = Rules(concurrency=3, buffer=3, quorum=3, deadline_s=60.0)
    state, effects = follow(Round(protocol=PLAIN, rules=rules), *check_in("a"), e.GaveUp(device="a"), *commit("a"))
    assert effects == [e.Assign(device="a"), e.Accumulate(device="a")]
    assert (state.deadline, set(state.cohort.accepted)) == (None, {"a"})
    assert follow(state, e.TimePassed(), now=1e9)[0].phase is phases.SELECTING


def test_a_commit_that_was_under_way_while_closing_is_in_the_set() -> None:
    """The record decides. It closed the set after that commit, so the Update is folded too."""
    state, _ = follow(Round(protocol=PLAIN, rules=RULES), *check_in("a", "b"), *commit("b"))
    state, _ = follow(state, e.TimePassed(), now=60.0)
    state, effects = follow(state, e.Closed(accepted=("b", "a")), now=61.0)
    assert effects == [e.Fold(accepted=("b", "a"))]


def test_a_closed_set_without_an_accepted_update_is_illegal() -> None:
    state, _ = follow(Round(protocol=PLAIN, rules=RULES), *check_in("a", "b"), *commit("b", "a"))
    with raises(r.IllegalEvent, "round: closed with ['b'], expected ['a'] too"):
        state.step(e.Closed(accepted=("b",)), 0.0)


def test_after_a_restart_the_records_set_is_folded_from_any_open_phase() -> None:
    for state in (
        Round(protocol=PLAIN, rules=RULES),
        follow(Round(protocol=PLAIN, rules=RULES), *check_in("a", "b", "c"))[0],
    ):
        after, effects = follow(state, e.Closed(accepted=("a", "b")))
        assert (after.phase, effects) == (phases.FOLDING, [e.Fold(accepted=("a", "b"))])


def test_time_does_not_matter_once_the_round_closes() -> None:
    for phase in (phases.CLOSING, phases.FOLDING, phases.PUBLISHING):
        state = Round(protocol=PLAIN, rules=RULES, phase=phase, deadline=60.0)
        assert follow(state, e.TimePassed(), now=1e9) == (state, [])


ADAPTIVE = Rules(concurrency=4, buffer=4, quorum=3, deadline_s=60.0, min_report_s=1.0, report_factor=2.0)
EVENTS = st.sampled_from(
    [e.TimePassed()]
    + [kind(device=name) for kind in (e.CheckedIn, e.GaveUp, e.UpdateCommitted) for name in "abcde"]
    + [e.Gone(devices=(name,)) for name in "abcde"]
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 100)), max_size=30), st.sampled_from((RULES, SYNCHRONOUS, ADAPTIVE)))
def test_no_sequence_of_events_uses_more_places_than_there_are(
    sequence: list[tuple[e.Event, float]], rules: Rules
) -> None:
    state, assigned, now = Round(protocol=PLAIN, rules=rules), set[str](), 0.0
    for event, moment in sequence:
        now = max(now, moment)
        if not state.is_open:
            break
        # Only an assigned device can commit an Update.
        if isinstance(event, e.UpdateCommitted) and event.device not in assigned:
            continue
        state, effects = state.step(event, now)
        assigned |= {effect.device for effect in effects if isinstance(effect, e.Assign)}
        assert len(state.cohort.accepted) <= rules.buffer
        assert not set(state.cohort.at_work) & set(state.cohort.accepted)
        assert len(state.cohort.at_work) <= rules.concurrency
        assert 0 <= state.num_places(now) <= max(rules.concurrency - state.cohort.num_taken, 0)
        assert state.phase is phases.SELECTING or not state.num_places(now)


def test_another_protocol_shares_the_rows_that_end_a_round() -> None:
    rows = {
        (phases.SELECTING, e.CheckedIn): r.row(
            lambda state, *_: (replace(state, phase=phases.CLOSING), ()), phases.CLOSING
        ),
        (phases.CLOSING, e.Closed): r.row(close, phases.FOLDING),
    }
    protocol = r.compose("hasty", phases.SELECTING, begin, rows, failure_exits(phases.SELECTING), ENDING)
    state, effects = follow(
        Round(protocol=protocol, rules=RULES),
        *check_in("a"),
        e.Closed(accepted=("a",)),
        e.ParametersStored(),
        e.Published(),
    )
    assert (state.phase, effects) == (phases.PUBLISHED, [e.Fold(accepted=("a",)), e.Publish(), e.GoOn()])
    with raises(r.IllegalEvent, "round: UpdateCommitted in phase selecting"):
        follow(Round(protocol=protocol, rules=RULES), *commit("a"))


SELECTING_ONLY = {(phases.SELECTING, e.TimePassed): r.row(stay, phases.SELECTING)}


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        ((ENDING, failure_exits(phases.CLOSING)), "got two rows for (closing, Broken), expected one"),
        (
            ({(phases.SELECTING, e.CheckedIn): r.row(stay, phases.TRAINING)}, ENDING),
            "got no row for phase training, which some row leads to",
        ),
        ((ENDING,), "got no row for phase selecting, which some row leads to"),
        ((SELECTING_ONLY, ENDING), "got no failure exit for phase selecting, expected a row for Failed"),
    ],
)
def test_a_table_with_a_gap_is_no_protocol(groups: tuple[r.Rows, ...], error: str) -> None:
    with raises(ValueError, f"protocol broken: {error}"):
        r.compose("broken", phases.SELECTING, begin, *groups)


def test_the_page_in_docs_shows_this_table() -> None:
    text = PAGE.read_text()
    assert f"```mermaid\n{diagram(PLAIN)}```" in text, (
        f"put what fanin.server.protocols.machine.diagram(PLAIN) returns into {PAGE}"
    )
    for phase in PHASES:
        assert f"**{phase}**" in text, f"{PAGE} says nothing of {phase}"

"""The device's session: every (phase, event) pair, and what a device does."""

import random
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
from support.errors import raises
from support.values import assignment

from fanin.clients.device import session as s
from fanin.clients.device.session import Phase, Session
from fanin.protos import messages as m

WORK = assignment()
EVENT_KINDS: tuple[type[s.Event], ...] = get_args(s.Event)


def replied(state: m.UpdateState, round_state: m.RoundState = m.RoundState.OPEN) -> s.Replied:
    return s.Replied(reply=m.UploadReply(round_state=round_state, update_state=state))


SAMPLES: tuple[s.Event, ...] = (
    s.Enrolled(),
    s.Answered(answer=m.Assigned(assignment=WORK)),
    s.Answered(answer=m.Wait(retry_min_s=2.0, retry_max_s=4.0)),
    s.Answered(answer=m.Wait(retry_min_s=2.0, retry_max_s=4.0, newest=WORK.publication)),
    *(s.Answered(answer=m.Rejected(reason=reason, text="why")) for reason in m.RejectReason),
    s.Refreshed(),
    s.Fetched(),
    s.Trained(),
    *(replied(state) for state in m.UpdateState),
    s.Lost(reason="line"),
    s.Moot(reason="moot"),
    s.Unable(reason="unable"),
    s.Denied(reason="denied"),
)
# Where each row may lead: the phases of the walk in the module's docstring.
TARGETS: dict[tuple[Phase, type[s.Event]], set[Phase]] = {
    (Phase.ENROLLING, s.Enrolled): {Phase.IDLE},
    (Phase.IDLE, s.Answered): {Phase.IDLE, Phase.REFRESHING, Phase.FETCHING, Phase.STOPPED},
    (Phase.REFRESHING, s.Refreshed): {Phase.IDLE},
    (Phase.REFRESHING, s.Moot): {Phase.IDLE},
    (Phase.REFRESHING, s.Unable): {Phase.IDLE},
    (Phase.REFRESHING, s.Lost): {Phase.IDLE},
    (Phase.REFRESHING, s.Denied): {Phase.STOPPED},
    (Phase.FETCHING, s.Fetched): {Phase.TRAINING},
    (Phase.FETCHING, s.Moot): {Phase.IDLE},
    (Phase.FETCHING, s.Unable): {Phase.REPORTING},
    (Phase.TRAINING, s.Trained): {Phase.SENDING},
    (Phase.TRAINING, s.Unable): {Phase.REPORTING},
    (Phase.TRAINING, s.Lost): {Phase.TRAINING},
    (Phase.SENDING, s.Replied): {Phase.IDLE, Phase.SENDING},
    (Phase.SENDING, s.Moot): {Phase.IDLE},
    (Phase.SENDING, s.Unable): {Phase.REPORTING},
    (Phase.REPORTING, s.Replied): {Phase.IDLE},
    (Phase.REPORTING, s.Moot): {Phase.IDLE},
    (Phase.ENROLLING, s.Lost): {Phase.ENROLLING},
    (Phase.IDLE, s.Lost): {Phase.IDLE},
    (Phase.FETCHING, s.Lost): {Phase.FETCHING},
    (Phase.SENDING, s.Lost): {Phase.SENDING},
    (Phase.REPORTING, s.Lost): {Phase.REPORTING},
    (Phase.ENROLLING, s.Denied): {Phase.STOPPED},
    (Phase.IDLE, s.Denied): {Phase.STOPPED},
    (Phase.FETCHING, s.Denied): {Phase.STOPPED},
    (Phase.SENDING, s.Denied): {Phase.STOPPED},
    (Phase.REPORTING, s.Denied): {Phase.STOPPED},
}
ACTIONS = {
    Phase.ENROLLING: s.Enroll,
    Phase.IDLE: s.CheckIn,
    Phase.REFRESHING: s.Refresh,
    Phase.FETCHING: s.Fetch,
    Phase.TRAINING: s.Train,
    Phase.SENDING: s.Send,
    Phase.REPORTING: s.GiveUp,
    Phase.STOPPED: s.Stop,
}


def session(phase: Phase) -> Session:
    """A session as it stands in a phase."""
    has_work = phase not in (Phase.ENROLLING, Phase.IDLE, Phase.REFRESHING, Phase.STOPPED)
    failure = "why" if phase in (Phase.REPORTING, Phase.STOPPED) else ""
    newest = WORK.publication if phase is Phase.REFRESHING else None
    return Session(phase=phase, assignment=WORK if has_work else None, newest=newest, failure=failure)


def test_each_kind_of_event_has_a_sample_and_each_row_a_target() -> None:
    assert {type(event) for event in SAMPLES} == set(EVENT_KINDS)
    assert set(s.TRANSITIONS) == set(TARGETS)


@pytest.mark.parametrize(("phase", "kind"), list(product(Phase, EVENT_KINDS)), ids=str)
def test_each_pair_leads_where_it_should_or_is_illegal(phase: Phase, kind: type[s.Event]) -> None:
    state, reached = session(phase), set()
    before, rng = replace(state), random.Random(1)
    for event in SAMPLES:
        if type(event) is not kind:
            continue
        if (phase, kind) not in s.TRANSITIONS:
            with raises(s.IllegalEvent, f"session: {kind.__name__} in phase {phase.value}"):
                state.step(event, rng)
            assert rng.getstate() == random.Random(1).getstate()
        else:
            after, todo = state.step(event, rng)
            reached.add(after.phase)
            # One thing to do, and it is the one that a restart in this phase would begin with.
            assert todo.action == after.begin().action
            assert type(todo.action) is ACTIONS[after.phase]
            assert 0 <= todo.pause_s <= s.LONGEST_PAUSE_S
        assert state == before
    assert reached == TARGETS.get((phase, kind), set())


@pytest.mark.parametrize("phase", Phase)
def test_each_phase_begins_with_its_action(phase: Phase) -> None:
    todo = session(phase).begin()
    assert type(todo.action) is ACTIONS[phase]
    assert (todo.pause_s, todo.forget) == (0.0, "")


def follow(state: Session, *events: s.Event, seed: int = 1) -> tuple[Session, s.Todo]:
    """A story: the session after some events, and the last thing to do."""
    rng, todo = random.Random(seed), state.begin()
    for event in events:
        state, todo = state.step(event, rng)
    return state, todo


def test_an_update_from_enrollment_to_acceptance() -> None:
    state, todo = follow(
        Session(), s.Enrolled(), s.Answered(answer=m.Assigned(assignment=WORK)), s.Fetched(), s.Trained()
    )
    assert todo == s.Todo(action=s.Send(assignment=WORK))
    state, todo = follow(state, replied(m.UpdateState.ACCEPTED, m.RoundState.CLOSED))
    assert todo == s.Todo(action=s.CheckIn(), forget=WORK.assignment_id)
    assert (state.num_accepted, state.assignment, state.phase) == (1, None, Phase.IDLE)


def test_only_accepted_updates_count() -> None:
    state, todo = follow(session(Phase.SENDING), replied(m.UpdateState.DISCARDED, m.RoundState.CLOSED))
    assert todo == s.Todo(action=s.CheckIn(), forget=WORK.assignment_id)
    assert (state.num_accepted, state.assignment) == (0, None)


@pytest.mark.parametrize("verdict", [m.UpdateState.RECEIVING, m.UpdateState.RECEIVED])
def test_an_update_without_a_verdict_is_kept_and_sent_again(verdict: m.UpdateState) -> None:
    state, todo = follow(session(Phase.SENDING), replied(verdict))
    assert todo.action == s.Send(assignment=WORK)
    assert todo.forget == ""
    assert todo.pause_s > 0
    assert state.num_lost == 1


def test_moot_work_is_dropped_and_its_update_forgotten() -> None:
    for phase in (Phase.FETCHING, Phase.SENDING):
        state, todo = follow(session(phase), s.Moot(reason="gone"))
        assert (todo.action, todo.forget) == (s.CheckIn(), WORK.assignment_id)
        assert 0 < todo.pause_s <= s.FIRST_PAUSE_S
        assert state.assignment is None


def test_work_that_cannot_be_done_is_reported_then_dropped_after_a_pause() -> None:
    state, todo = follow(session(Phase.TRAINING), s.Unable(reason="it diverged"))
    assert todo == s.Todo(action=s.GiveUp(assignment=WORK, reason="it diverged"))
    for end in (replied(m.UpdateState.DISCARDED), replied(m.UpdateState.ACCEPTED)):
        after, todo = follow(state, end)
        assert todo == s.Todo(action=s.CheckIn(), pause_s=s.REFUSED_PAUSE_S, forget=WORK.assignment_id)
        assert (after.failure, after.num_accepted) == ("", 0)


@pytest.mark.parametrize("seed", range(5))
def test_pauses_double_with_jitter_up_to_a_bound(seed: int) -> None:
    state, rng, pauses = session(Phase.SENDING), random.Random(seed), []
    for _ in range(2000):
        state, todo = state.step(s.Lost(reason="line"), rng)
        pauses.append(todo.pause_s)
        assert todo.action == s.Send(assignment=WORK)
    longest = [min(s.FIRST_PAUSE_S * 2**index, s.LONGEST_PAUSE_S) for index in range(10)] + [s.LONGEST_PAUSE_S] * 1990
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, longest, strict=True))
    assert len(set(pauses)) > 1900


def test_success_begins_the_pauses_anew() -> None:
    lost = [s.Lost(reason="line")] * 8
    state, _ = follow(session(Phase.IDLE), *lost)
    assert state.num_lost == 8
    state, todo = follow(state, s.Answered(answer=m.Assigned(assignment=WORK)), s.Lost(reason="line"))
    assert todo.pause_s <= s.FIRST_PAUSE_S
    assert state.num_lost == 1


@pytest.mark.parametrize("end", [replied(m.UpdateState.ACCEPTED), s.Moot(reason="gone")], ids=["accepted", "moot"])
def test_an_end_of_the_work_begins_the_pauses_anew(end: s.Event) -> None:
    state, todo = follow(session(Phase.SENDING), *[s.Lost(reason="line")] * 8, end, s.Lost(reason="line"))
    assert todo.pause_s <= s.FIRST_PAUSE_S
    assert state.num_lost == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_device_comes_back_within_its_window(seed: int) -> None:
    _, todo = follow(session(Phase.IDLE), s.Answered(answer=m.Wait(retry_min_s=2.0, retry_max_s=4.0)), seed=seed)
    assert todo.action == s.CheckIn()
    assert 2.0 <= todo.pause_s <= 4.0


def test_a_device_that_is_too_old_stops_and_says_why() -> None:
    refused = s.Answered(answer=m.Rejected(reason=m.RejectReason.UPGRADE, text="protocol 1 is too old"))
    state, todo = follow(session(Phase.IDLE), refused)
    assert todo == s.Todo(action=s.Stop(reason="protocol 1 is too old"))
    assert state.begin() == todo


@pytest.mark.parametrize("seed", range(5))
def test_a_device_that_no_run_suits_today_asks_again(seed: int) -> None:
    refused = s.Answered(answer=m.Rejected(reason=m.RejectReason.UNSUITABLE, text="codec"))
    state, todo = follow(session(Phase.IDLE), refused, seed=seed)
    assert (state.phase, todo.action) == (Phase.IDLE, s.CheckIn())
    assert s.LONGEST_PAUSE_S / 2 <= todo.pause_s <= s.LONGEST_PAUSE_S
    assert todo.pause_s != follow(session(Phase.IDLE), refused, seed=seed + 1)[1].pause_s


def test_a_denied_device_stops_and_keeps_its_update() -> None:
    state, todo = follow(session(Phase.SENDING), s.Denied(reason="not authenticated"))
    assert todo == s.Todo(action=s.Stop(reason="not authenticated"))
    assert state.phase is Phase.STOPPED


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("answer", "least_s", "most_s"),
    [
        (m.Wait(retry_min_s=2.0, retry_max_s=4.0, newest=WORK.publication), 2.0, 4.0),
        (m.Rejected(reason=m.RejectReason.UNSUITABLE, text="codec", newest=WORK.publication), 30.0, 60.0),
    ],
    ids=["wait", "rejected"],
)
def test_a_newer_version_is_fetched_within_the_window_and_then_work_is_asked_for(
    answer: m.CheckInAnswer, least_s: float, most_s: float, seed: int
) -> None:
    state, todo = follow(session(Phase.IDLE), s.Answered(answer=answer), seed=seed)
    assert todo.action == s.Refresh(publication=WORK.publication)
    assert least_s <= todo.pause_s <= most_s
    state, todo = follow(state, s.Refreshed())
    assert todo == s.Todo(action=s.CheckIn())
    assert state == Session(phase=Phase.IDLE)


@pytest.mark.parametrize("failure", [s.Lost(reason="line"), s.Moot(reason="gone"), s.Unable(reason="damaged")], ids=str)
def test_a_version_that_never_arrives_does_not_keep_a_device_from_work(failure: s.Event) -> None:
    named = s.Answered(answer=m.Wait(retry_min_s=0.0, retry_max_s=0.0, newest=WORK.publication))
    state, pauses = session(Phase.IDLE), []
    for _ in range(12):
        state, todo = follow(state, named, failure)
        assert todo.action == s.CheckIn()
        pauses.append(todo.pause_s)
    assert pauses[0] <= s.FIRST_PAUSE_S
    assert s.LONGEST_PAUSE_S / 2 <= pauses[-1] <= s.LONGEST_PAUSE_S
    state, _ = follow(state, s.Answered(answer=m.Assigned(assignment=WORK)))
    assert (state.phase, state.num_lost) == (Phase.FETCHING, 0)

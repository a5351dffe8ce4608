"""The device's session: every (phase, event) pair, and the actions of a device."""

import random
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
from support.errors import raises
from support.values import assignment

from fanin.clients.device.session import events as e
from fanin.clients.device.session import machine as s
from fanin.clients.device.session.events import SessionPhase
from fanin.clients.device.session.machine import Session
from fanin.edge.runtimes.evaluations import quality_of
from fanin.protos import messages as m

WORK = assignment()
EVENT_KINDS: tuple[type[e.SessionEvent], ...] = get_args(e.SessionEvent)


def replied(state: m.UpdateState, round_state: m.RoundState = m.RoundState.OPEN) -> e.Replied:
    return e.Replied(reply=m.UploadReply(round_state=round_state, update_state=state))


SAMPLES: tuple[e.SessionEvent, ...] = (
    e.Enrolled(),
    e.Answered(answer=m.Assigned(assignment=WORK)),
    e.Answered(answer=m.Wait(retry_min_s=2.0, retry_max_s=4.0)),
    e.Answered(answer=m.Wait(retry_min_s=2.0, retry_max_s=4.0, newest=WORK.publication)),
    *(e.Answered(answer=m.Rejected(reason=reason, text="why")) for reason in m.RejectReason),
    e.Refreshed(),
    e.Fetched(),
    e.Fetched(before=("first", "second"), after=("last",)),
    e.Exchanged(outcome=m.ExchangeAnswer(message=b"answer")),
    e.Exchanged(outcome=m.ExchangePause(retry_min_s=0.5, retry_max_s=1.0)),
    e.Exchanged(outcome=m.ExchangeEnd(reason="over")),
    e.UpdateStored(),
    *(replied(state) for state in m.UpdateState),
    e.Answered(answer=m.Wait(retry_min_s=1.0, retry_max_s=2.0, finished=WORK.training)),
    e.Tuned(run_id="run", version=1, epochs=2, before=quality_of({}), after=quality_of({})),
    e.Lost(reason="line"),
    e.Moot(reason="moot"),
    e.Unable(reason="unable"),
    e.WorkPaused(reason="unplugged"),
    e.Denied(reason="denied", code="FN-0650"),
)
# The targets of each row: the phases of the walk in the module's docstring.
TARGETS: dict[tuple[SessionPhase, type[e.SessionEvent]], set[SessionPhase]] = {
    (SessionPhase.ENROLLING, e.Enrolled): {SessionPhase.IDLE},
    (SessionPhase.IDLE, e.Answered): {
        SessionPhase.IDLE,
        SessionPhase.REFRESHING,
        SessionPhase.TUNING,
        SessionPhase.FETCHING,
        SessionPhase.STOPPED,
    },
    (SessionPhase.TUNING, e.Tuned): {SessionPhase.IDLE},
    (SessionPhase.TUNING, e.Moot): {SessionPhase.IDLE},
    (SessionPhase.TUNING, e.Unable): {SessionPhase.IDLE},
    (SessionPhase.TUNING, e.WorkPaused): {SessionPhase.IDLE},
    (SessionPhase.TUNING, e.Lost): {SessionPhase.IDLE},
    (SessionPhase.TUNING, e.Denied): {SessionPhase.STOPPED},
    (SessionPhase.REFRESHING, e.Refreshed): {SessionPhase.IDLE},
    (SessionPhase.REFRESHING, e.Moot): {SessionPhase.IDLE},
    (SessionPhase.REFRESHING, e.Unable): {SessionPhase.IDLE},
    (SessionPhase.REFRESHING, e.WorkPaused): {SessionPhase.IDLE},
    (SessionPhase.FETCHING, e.WorkPaused): {SessionPhase.IDLE},
    (SessionPhase.TRAINING, e.WorkPaused): {SessionPhase.IDLE},
    (SessionPhase.SENDING, e.WorkPaused): {SessionPhase.IDLE},
    (SessionPhase.REFRESHING, e.Lost): {SessionPhase.IDLE},
    (SessionPhase.REFRESHING, e.Denied): {SessionPhase.STOPPED},
    (SessionPhase.FETCHING, e.Fetched): {SessionPhase.TRAINING, SessionPhase.EXCHANGING},
    (SessionPhase.EXCHANGING, e.Exchanged): {SessionPhase.TRAINING, SessionPhase.EXCHANGING, SessionPhase.IDLE},
    (SessionPhase.EXCHANGING, e.Moot): {SessionPhase.IDLE},
    (SessionPhase.EXCHANGING, e.Unable): {SessionPhase.REPORTING},
    (SessionPhase.EXCHANGING, e.WorkPaused): {SessionPhase.IDLE},
    (SessionPhase.EXCHANGING, e.Lost): {SessionPhase.EXCHANGING},
    (SessionPhase.EXCHANGING, e.Denied): {SessionPhase.STOPPED},
    (SessionPhase.FETCHING, e.Moot): {SessionPhase.IDLE},
    (SessionPhase.FETCHING, e.Unable): {SessionPhase.REPORTING},
    (SessionPhase.TRAINING, e.UpdateStored): {SessionPhase.SENDING},
    (SessionPhase.TRAINING, e.Moot): {SessionPhase.IDLE},
    (SessionPhase.TRAINING, e.Unable): {SessionPhase.REPORTING},
    (SessionPhase.TRAINING, e.Lost): {SessionPhase.TRAINING},
    (SessionPhase.SENDING, e.Replied): {SessionPhase.IDLE, SessionPhase.SENDING},
    (SessionPhase.SENDING, e.Moot): {SessionPhase.IDLE},
    (SessionPhase.SENDING, e.Unable): {SessionPhase.REPORTING},
    # A session with a limit of failures stops instead: see below.
    (SessionPhase.REPORTING, e.Replied): {SessionPhase.IDLE},
    (SessionPhase.REPORTING, e.Moot): {SessionPhase.IDLE},
    (SessionPhase.ENROLLING, e.Lost): {SessionPhase.ENROLLING},
    (SessionPhase.IDLE, e.Lost): {SessionPhase.IDLE},
    (SessionPhase.FETCHING, e.Lost): {SessionPhase.FETCHING},
    (SessionPhase.SENDING, e.Lost): {SessionPhase.SENDING},
    (SessionPhase.REPORTING, e.Lost): {SessionPhase.REPORTING},
    (SessionPhase.ENROLLING, e.Denied): {SessionPhase.STOPPED},
    (SessionPhase.IDLE, e.Denied): {SessionPhase.STOPPED},
    (SessionPhase.FETCHING, e.Denied): {SessionPhase.STOPPED},
    (SessionPhase.SENDING, e.Denied): {SessionPhase.STOPPED},
    (SessionPhase.REPORTING, e.Denied): {SessionPhase.STOPPED},
}
ACTIONS = {
    SessionPhase.ENROLLING: e.Enroll,
    SessionPhase.IDLE: e.Poll,
    SessionPhase.REFRESHING: e.Refresh,
    SessionPhase.TUNING: e.Tune,
    SessionPhase.FETCHING: e.Fetch,
    SessionPhase.EXCHANGING: e.SendMessage,
    SessionPhase.TRAINING: e.Train,
    SessionPhase.SENDING: e.Send,
    SessionPhase.REPORTING: e.Abandon,
    SessionPhase.STOPPED: e.EndSession,
}


def session(phase: SessionPhase) -> Session:
    """Return a session in this phase."""
    has_work = phase not in (
        SessionPhase.ENROLLING,
        SessionPhase.IDLE,
        SessionPhase.REFRESHING,
        SessionPhase.TUNING,
        SessionPhase.STOPPED,
    )
    failure = "why" if phase in (SessionPhase.REPORTING, SessionPhase.STOPPED) else ""
    newest = WORK.publication if phase is SessionPhase.REFRESHING else None
    exchanges = ("last",) if phase is SessionPhase.EXCHANGING else ()
    return Session(
        phase=phase,
        assignment=WORK if has_work else None,
        newest=newest,
        finished=WORK.training if phase is SessionPhase.TUNING else None,
        exchanges=exchanges,
        failure=failure,
    )


def test_a_session_sends_the_messages_of_each_phase_in_order() -> None:
    state, rng = session(SessionPhase.FETCHING), random.Random(1)
    answer, phases = e.Exchanged(outcome=m.ExchangeAnswer()), []
    state, step = state.step(e.Fetched(before=("first", "second"), after=("third", "last")), rng)
    events = [answer, e.Lost(reason="line"), answer, e.UpdateStored(), replied(m.UpdateState.ACCEPTED), answer, answer]
    for event in events:
        phases.append(step.action.phase if isinstance(step.action, e.SendMessage) else type(step.action).__name__)
        state, step = state.step(event, rng)
    assert phases == ["first", "second", "second", "Train", "Send", "third", "last"]
    assert (state.phase, state.num_accepted, step.forget) == (SessionPhase.IDLE, 1, WORK.assignment_id)


def test_each_kind_of_event_has_a_sample_and_each_row_a_target() -> None:
    assert {type(event) for event in SAMPLES} == set(EVENT_KINDS)
    assert set(s.TRANSITIONS) == set(TARGETS)


@pytest.mark.parametrize(("phase", "kind"), list(product(SessionPhase, EVENT_KINDS)), ids=str)
def test_each_pair_leads_to_its_targets_or_is_illegal(phase: SessionPhase, kind: type[e.SessionEvent]) -> None:
    state, targets = session(phase), set()
    before, rng = replace(state), random.Random(1)
    for event in SAMPLES:
        if type(event) is not kind:
            continue
        if (phase, kind) not in s.TRANSITIONS:
            with raises(s.IllegalSessionEvent, f"session: {kind.__name__} in phase {phase.value}"):
                state.step(event, rng)
            assert rng.getstate() == random.Random(1).getstate()
        else:
            after, todo = state.step(event, rng)
            targets.add(after.phase)
            # The one next action equals the action after a restart in this phase.
            assert todo.action == after.begin().action
            assert type(todo.action) is ACTIONS[after.phase]
            assert 0 <= todo.pause_s <= s.LONGEST_PAUSE_S
        assert state == before
    assert targets == TARGETS.get((phase, kind), set())


@pytest.mark.parametrize("phase", SessionPhase)
def test_each_phase_begins_with_its_action(phase: SessionPhase) -> None:
    todo = session(phase).begin()
    assert type(todo.action) is ACTIONS[phase]
    assert (todo.pause_s, todo.forget) == (0.0, "")


def follow(state: Session, *events: e.SessionEvent, seed: int = 1) -> tuple[Session, e.Step]:
    """Apply the events. Return the session after them, and its last step."""
    rng, todo = random.Random(seed), state.begin()
    for event in events:
        state, todo = state.step(event, rng)
    return state, todo


def test_an_update_from_enrollment_to_acceptance() -> None:
    state, todo = follow(
        Session(), e.Enrolled(), e.Answered(answer=m.Assigned(assignment=WORK)), e.Fetched(), e.UpdateStored()
    )
    assert todo == e.Step(action=e.Send(assignment=WORK))
    state, todo = follow(state, replied(m.UpdateState.ACCEPTED, m.RoundState.CLOSED))
    assert todo == e.Step(action=e.Poll(), forget=WORK.assignment_id)
    assert (state.num_accepted, state.assignment, state.phase) == (1, None, SessionPhase.IDLE)


def test_only_accepted_updates_count() -> None:
    state, todo = follow(session(SessionPhase.SENDING), replied(m.UpdateState.DISCARDED, m.RoundState.CLOSED))
    assert todo == e.Step(action=e.Poll(), forget=WORK.assignment_id)
    assert (state.num_accepted, state.assignment) == (0, None)


@pytest.mark.parametrize("verdict", [m.UpdateState.RECEIVING, m.UpdateState.RECEIVED])
def test_an_update_without_a_verdict_is_kept_and_sent_again(verdict: m.UpdateState) -> None:
    state, todo = follow(session(SessionPhase.SENDING), replied(verdict))
    assert todo.action == e.Send(assignment=WORK)
    assert todo.forget == ""
    assert todo.pause_s > 0
    assert state.num_lost == 1


def test_moot_work_is_dropped_and_its_update_forgotten() -> None:
    for phase in (SessionPhase.FETCHING, SessionPhase.SENDING):
        state, todo = follow(session(phase), e.Moot(reason="gone"))
        assert (todo.action, todo.forget) == (e.Poll(), WORK.assignment_id)
        assert 0 < todo.pause_s <= s.FIRST_PAUSE_S
        assert state.assignment is None


def test_work_that_cannot_be_done_is_reported_then_dropped_after_a_pause() -> None:
    state, todo = follow(session(SessionPhase.TRAINING), e.Unable(reason="it diverged"))
    assert todo == e.Step(action=e.Abandon(assignment=WORK, reason="it diverged"))
    for end in (replied(m.UpdateState.DISCARDED), replied(m.UpdateState.ACCEPTED)):
        after, todo = follow(state, end)
        assert todo == e.Step(action=e.Poll(), pause_s=s.REFUSED_PAUSE_S, forget=WORK.assignment_id)
        assert (after.failure, after.num_accepted) == ("", 0)


def fail_training(state: Session, reason: str = "no data", *, is_lasting: bool = False) -> tuple[Session, e.Step]:
    """Let a session fail one training, and report it."""
    work = e.Answered(answer=m.Assigned(assignment=WORK))
    unable = e.Unable(reason=reason, is_lasting=is_lasting)
    return follow(state, work, e.Fetched(), unable, replied(m.UpdateState.DISCARDED))


def test_a_session_stops_after_the_bounded_number_of_failed_trainings_in_a_row() -> None:
    state = Session(phase=SessionPhase.IDLE, max_failures=3)
    for _ in range(2):
        state, todo = fail_training(state)
        assert todo.action == e.Poll()
    # A successful training resets the count, even if its Update is not accepted.
    work = e.Answered(answer=m.Assigned(assignment=WORK))
    state, _ = follow(state, work, e.Fetched(), e.UpdateStored(), replied(m.UpdateState.DISCARDED))
    for _ in range(2):
        state, todo = fail_training(state)
        assert todo.action == e.Poll()
    # Data that do not fit may change later, and damaged downloads are no failed trainings: neither counts.
    state, _ = fail_training(state, is_lasting=True)
    state, _ = follow(state, work, e.Unable(reason="damaged"), replied(m.UpdateState.DISCARDED))
    state, todo = fail_training(state, "still no data")
    expected = (
        "3 trainings failed in a row, the last with: still no data; correct the cause, then start this device again"
    )
    assert (state.phase, todo.action) == (SessionPhase.STOPPED, e.EndSession(reason=expected, code="FN-0844"))


@pytest.mark.parametrize("report", [e.Moot(reason="gone"), replied(m.UpdateState.ACCEPTED)])
def test_a_session_stops_however_the_report_of_its_last_failure_ends(report: e.SessionEvent) -> None:
    state = replace(session(SessionPhase.TRAINING), max_failures=1)
    _, todo = follow(state, e.Unable(reason="no data"), report)
    assert isinstance(todo.action, e.EndSession)


def test_a_session_without_a_bound_never_stops_for_failed_trainings() -> None:
    state = session(SessionPhase.IDLE)
    for _ in range(50):
        state, todo = fail_training(state)
        assert todo.action == e.Poll()


@pytest.mark.parametrize("seed", range(5))
def test_pauses_double_with_jitter_up_to_a_bound(seed: int) -> None:
    state, rng, pauses = session(SessionPhase.SENDING), random.Random(seed), []
    for _ in range(2000):
        state, todo = state.step(e.Lost(reason="line"), rng)
        pauses.append(todo.pause_s)
        assert todo.action == e.Send(assignment=WORK)
    longest = [min(s.FIRST_PAUSE_S * 2**index, s.LONGEST_PAUSE_S) for index in range(10)] + [s.LONGEST_PAUSE_S] * 1990
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, longest, strict=True))
    assert len(set(pauses)) > 1900


def test_success_resets_the_pauses() -> None:
    lost = [e.Lost(reason="line")] * 8
    state, _ = follow(session(SessionPhase.IDLE), *lost)
    assert state.num_lost == 8
    state, todo = follow(state, e.Answered(answer=m.Assigned(assignment=WORK)), e.Lost(reason="line"))
    assert todo.pause_s <= s.FIRST_PAUSE_S
    assert state.num_lost == 1


@pytest.mark.parametrize("end", [replied(m.UpdateState.ACCEPTED), e.Moot(reason="gone")], ids=["accepted", "moot"])
def test_an_end_of_the_work_resets_the_pauses(end: e.SessionEvent) -> None:
    state, todo = follow(session(SessionPhase.SENDING), *[e.Lost(reason="line")] * 8, end, e.Lost(reason="line"))
    assert todo.pause_s <= s.FIRST_PAUSE_S
    assert state.num_lost == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_device_comes_back_within_its_window(seed: int) -> None:
    _, todo = follow(session(SessionPhase.IDLE), e.Answered(answer=m.Wait(retry_min_s=2.0, retry_max_s=4.0)), seed=seed)
    assert todo.action == e.Poll()
    assert 2.0 <= todo.pause_s <= 4.0


def test_devices_come_back_spread_over_their_window() -> None:
    wait = e.Answered(answer=m.Wait(retry_min_s=2.0, retry_max_s=4.0))
    pauses = [follow(session(SessionPhase.IDLE), wait, seed=seed)[1].pause_s for seed in range(100)]
    assert min(pauses) < 2.2
    assert max(pauses) > 3.8


def test_a_device_that_is_too_old_stops_with_the_reason() -> None:
    answer = e.Answered(answer=m.Rejected(reason=m.RejectReason.UPGRADE, text="protocol 1 is too old"))
    state, todo = follow(session(SessionPhase.IDLE), answer)
    assert todo == e.Step(action=e.EndSession(reason="protocol 1 is too old", code="FN-0844"))
    assert state.begin() == todo


@pytest.mark.parametrize("seed", range(5))
def test_a_device_that_suits_no_run_checks_in_again(seed: int) -> None:
    answer = e.Answered(answer=m.Rejected(reason=m.RejectReason.UNSUITABLE, text="codec"))
    state, todo = follow(session(SessionPhase.IDLE), answer, seed=seed)
    assert (state.phase, todo.action) == (SessionPhase.IDLE, e.Poll())
    assert s.LONGEST_PAUSE_S / 2 <= todo.pause_s <= s.LONGEST_PAUSE_S
    assert todo.pause_s != follow(session(SessionPhase.IDLE), answer, seed=seed + 1)[1].pause_s


def test_a_denied_device_stops_and_keeps_its_update() -> None:
    state, todo = follow(session(SessionPhase.SENDING), e.Denied(reason="not authenticated", code="FN-0018"))
    assert todo == e.Step(action=e.EndSession(reason="not authenticated", code="FN-0018"))
    assert state.phase is SessionPhase.STOPPED


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("answer", "least_s", "most_s"),
    [
        (m.Wait(retry_min_s=2.0, retry_max_s=4.0, newest=WORK.publication), 2.0, 4.0),
        (m.Rejected(reason=m.RejectReason.UNSUITABLE, text="codec", newest=WORK.publication), 30.0, 60.0),
    ],
    ids=["wait", "rejected"],
)
def test_a_newer_version_is_fetched_within_the_window_before_the_next_check_in(
    answer: m.CheckInAnswer, least_s: float, most_s: float, seed: int
) -> None:
    state, todo = follow(session(SessionPhase.IDLE), e.Answered(answer=answer), seed=seed)
    assert todo.action == e.Refresh(publication=WORK.publication)
    assert least_s <= todo.pause_s <= most_s
    state, todo = follow(state, e.Refreshed())
    assert todo == e.Step(action=e.Poll())
    assert state == Session(phase=SessionPhase.IDLE)


@pytest.mark.parametrize("failure", [e.Lost(reason="line"), e.Moot(reason="gone"), e.Unable(reason="damaged")], ids=str)
def test_a_version_that_never_arrives_does_not_keep_a_device_from_work(failure: e.SessionEvent) -> None:
    answer = e.Answered(answer=m.Wait(retry_min_s=0.0, retry_max_s=0.0, newest=WORK.publication))
    state, pauses = session(SessionPhase.IDLE), []
    for _ in range(12):
        state, todo = follow(state, answer, failure)
        assert todo.action == e.Poll()
        pauses.append(todo.pause_s)
    assert pauses[0] <= s.FIRST_PAUSE_S
    assert s.LONGEST_PAUSE_S / 2 <= pauses[-1] <= s.LONGEST_PAUSE_S
    state, _ = follow(state, e.Answered(answer=m.Assigned(assignment=WORK)))
    assert (state.phase, state.num_lost) == (SessionPhase.FETCHING, 0)


@pytest.mark.parametrize("phase", [SessionPhase.FETCHING, SessionPhase.TRAINING, SessionPhase.SENDING])
def test_a_device_that_pauses_checks_in_next_and_keeps_its_update(phase: SessionPhase) -> None:
    state, todo = follow(session(phase), e.WorkPaused(reason="unplugged"))
    assert (state.phase, state.assignment) == (SessionPhase.IDLE, None)
    assert (todo.action, todo.forget) == (e.Poll(), "")
    assert 0.0 < todo.pause_s <= s.FIRST_PAUSE_S

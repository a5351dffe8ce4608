"""Reports of progress of a device: from a thread of their own, while it works, and at no other time."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.values import assignment

from fanin.clients.device.client import Heartbeat
from fanin.clients.device.conditions import AssignmentOver, Conditions
from fanin.protos import messages as m
from fanin.protos.errors import FaninError, NotFound, PermissionDenied, Unauthenticated, Unavailable
from fanin.protos.plans import RoundPlan

INTERVAL_S = 0.02
WORK = replace(assignment(), progress_s=INTERVAL_S)
OPEN = m.UploadReply(round_state=m.RoundState.OPEN, update_state=m.UpdateState.RECEIVING)


@dataclass
class Line:
    """A connection that records reports. It breaks for the first ``num_lost`` of them. Then it has one answer."""

    num_lost: int = 0
    answer: m.UploadReply | FaninError = OPEN
    reports: list[m.Report] = field(default_factory=list)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def send(self, report: m.Report) -> m.UploadReply:
        self.reports.append(report)
        self.arrived.release()
        if len(self.reports) <= self.num_lost:
            raise Unavailable("the line broke")
        if isinstance(self.answer, FaninError):
            raise self.answer
        return self.answer

    def wait(self, number: int) -> None:
        for _ in range(number):
            assert self.arrived.acquire(timeout=10.0), "no report has arrived"


class Trainer:
    """A trainer that is at step 3 of 9 of its Assignment, or fails to say so."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def progress_of(self, assignment_id: str) -> m.TrainingProgress:
        if self._error is not None:
            raise self._error
        return (
            m.TrainingProgress(step=3, num_steps=9, epoch=1, num_epochs=2)
            if assignment_id == WORK.assignment_id
            else m.TrainingProgress()
        )


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def conditions() -> Conditions:
    return Conditions(lambda: True, time.monotonic)


@pytest.fixture
def beating(line: Line, conditions: Conditions) -> Iterator[Heartbeat]:
    heartbeat = Heartbeat(line.send, Trainer(), conditions)
    yield heartbeat
    heartbeat.stop()


def test_a_device_reports_its_step_while_it_works(line: Line, beating: Heartbeat) -> None:
    beating.follow(WORK)
    line.wait(2)
    progress = m.TrainingProgress(step=3, num_steps=9, epoch=1, num_epochs=2)
    assert line.reports[1] == m.Report(assignment_id=WORK.assignment_id, progress=progress)
    beating.follow(replace(WORK, assignment_id="run.2.tag"))
    while line.reports[-1].assignment_id == WORK.assignment_id:
        line.wait(1)
    assert line.reports[-1].progress == m.TrainingProgress()
    beating.follow(None)
    time.sleep(2 * INTERVAL_S)
    num_reports = len(line.reports)
    time.sleep(5 * INTERVAL_S)
    assert len(line.reports) == num_reports


@pytest.mark.parametrize("trainer", [object(), Trainer(ValueError("not now"))], ids=["without", "failing"])
def test_a_device_whose_trainer_knows_no_step_reports_that_it_works(
    line: Line, trainer: object, conditions: Conditions
) -> None:
    heartbeat = Heartbeat(line.send, trainer, conditions)
    heartbeat.follow(WORK)
    line.wait(1)
    heartbeat.stop()
    assert line.reports[0].progress == m.TrainingProgress()


def test_a_device_with_masks_does_not_report_its_steps(line: Line, beating: Heartbeat) -> None:
    beating.follow(replace(WORK, round_protocol=RoundPlan(protocol="secagg")))
    line.wait(1)
    assert line.reports[0] == m.Report(assignment_id=WORK.assignment_id, progress=m.TrainingProgress())


def test_a_lost_report_is_followed_by_the_next_one(line: Line, beating: Heartbeat) -> None:
    line.num_lost = 2
    beating.follow(WORK)
    line.wait(4)


def test_there_is_no_thread_without_an_interval(conditions: Conditions) -> None:
    heartbeat = Heartbeat(Line().send, object(), conditions)
    before = threading.active_count()
    heartbeat.follow(replace(WORK, progress_s=0.0))
    heartbeat.follow(None)
    assert threading.active_count() == before


def test_the_same_assignment_again_does_not_delay_the_next_report(line: Line, beating: Heartbeat) -> None:
    beating.follow(WORK)
    for _ in range(50):
        beating.follow(WORK)
        time.sleep(INTERVAL_S / 4)
    assert len(line.reports) >= 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (replace(OPEN, round_state=m.RoundState.CLOSED), "the round has closed, or does not need this update"),
        (NotFound("assignment run.1.tag: not made for device a; check in again"), "assignment run.1.tag: not made"),
        (PermissionDenied("device a: banned"), "device a: banned"),
        (Unauthenticated("not authenticated"), "not authenticated"),
    ],
    ids=["closed", "unknown", "banned", "removed"],
)
def test_a_reply_that_the_assignment_is_over_ends_a_pause_and_the_work(
    line: Line, beating: Heartbeat, conditions: Conditions, answer: m.UploadReply | FaninError, reason: str
) -> None:
    beating.follow(WORK)
    line.wait(1)
    assert conditions.should_continue()
    line.answer = answer
    # A pause before the next try of an upload lasts up to a minute.
    began_s = time.monotonic()
    assert not conditions.wait(60.0)
    assert time.monotonic() - began_s < 30.0
    with pytest.raises(AssignmentOver, match=reason):
        conditions.should_continue()
    line.answer = OPEN
    beating.follow(replace(WORK, assignment_id="run.2.tag"))
    assert conditions.should_continue()


def test_a_late_reply_does_not_end_the_next_assignment(conditions: Conditions) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    def send(report: m.Report) -> m.UploadReply:
        if report.assignment_id != WORK.assignment_id:
            return OPEN
        asked.set()
        may_answer.wait(10.0)
        return replace(OPEN, round_state=m.RoundState.CLOSED)

    heartbeat = Heartbeat(send, object(), conditions)
    heartbeat.follow(WORK)
    assert asked.wait(10.0)
    heartbeat.follow(replace(WORK, assignment_id="run.2.tag"))
    may_answer.set()
    time.sleep(5 * INTERVAL_S)
    heartbeat.stop()
    assert conditions.should_continue()


def test_a_may_work_that_returns_no_bool_counts_as_false_with_one_error(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Any] = [None, None]
    conditions = Conditions(lambda: answers.pop(0) if answers else True, time.monotonic)
    assert [conditions.hold() for _ in range(3)] == [False, False, True]
    (text,) = caplog.messages
    assert "may_work: InvalidInput: returned NoneType, expected True or False; return True to work" in text

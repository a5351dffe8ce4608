"""Reports of progress of a device: from a thread of their own, while it works, and at no other time."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from support.values import assignment

from fanin.clients.device.client import Heartbeat
from fanin.protos import messages as m
from fanin.protos.errors import Unavailable

INTERVAL_S = 0.02
WORK = replace(assignment(), progress_s=INTERVAL_S)


@dataclass
class Line:
    """A connection that records reports. It breaks for the first ``num_lost`` of them."""

    num_lost: int = 0
    reports: list[m.Report] = field(default_factory=list)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def send(self, report: m.Report) -> None:
        self.reports.append(report)
        self.arrived.release()
        if len(self.reports) <= self.num_lost:
            raise Unavailable("the line broke")

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
            m.TrainingProgress(step=3, num_steps=9, loss=0.5)
            if assignment_id == WORK.assignment_id
            else m.TrainingProgress()
        )


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def beating(line: Line) -> Iterator[Heartbeat]:
    heartbeat = Heartbeat(line.send, Trainer())
    yield heartbeat
    heartbeat.stop()


def test_a_device_reports_its_step_while_it_works(line: Line, beating: Heartbeat) -> None:
    beating.follow(WORK)
    line.wait(2)
    progress = m.TrainingProgress(step=3, num_steps=9, loss=0.5)
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
def test_a_device_whose_trainer_knows_no_step_reports_that_it_works(line: Line, trainer: object) -> None:
    heartbeat = Heartbeat(line.send, trainer)
    heartbeat.follow(WORK)
    line.wait(1)
    heartbeat.stop()
    assert line.reports[0].progress == m.TrainingProgress()


def test_a_lost_report_is_followed_by_the_next_one(line: Line, beating: Heartbeat) -> None:
    line.num_lost = 2
    beating.follow(WORK)
    line.wait(4)


def test_there_is_no_thread_without_an_interval() -> None:
    heartbeat = Heartbeat(Line().send, object())
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

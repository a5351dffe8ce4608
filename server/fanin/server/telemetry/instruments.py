"""What a coordinator measures of itself while it works: the observers of its Rounds, of its devices and of its calls.

``fanin serve`` creates one for each coordinator and passes it to the parts that it observes. ``exposition`` reads its
counters. Traces are observed only if they have a destination.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from google.protobuf.message import Message

from fanin.edge.spans import SpanSink
from fanin.protos.messages import Assigned, CheckInAnswer
from fanin.server.fleet.observer import AssignedWork, FleetObserver, WorkOutcome
from fanin.server.protocols.events import Effect
from fanin.server.rounds.worker import Observer
from fanin.server.runs.catalog import Runs
from fanin.server.telemetry.calls import Metadata
from fanin.server.telemetry.counts import CallCounts, FleetCounts
from fanin.server.telemetry.rounds import FindPlace, RoundClock, RoundName, RunPlace
from fanin.server.telemetry.traces import RoundTraces, TracedCall


class Instruments:
    """The observers of one coordinator. It is a CallObserver.

    Args:
        wall: The clock of the record, in seconds.
        spans: Receives the spans of traces; None for no traces.

    Attributes:
        counts: The counters of devices.
        calls: The counters of calls.
        clock: The parts of Rounds.
        fleet: The observer of the calls of devices.
    """

    def __init__(self, wall: Callable[[], float], spans: SpanSink | None = None) -> None:
        self.counts = FleetCounts()
        self.calls = CallCounts()
        self._traces = None if spans is None else RoundTraces(spans, wall)
        self.fleet: FleetObserver = self.counts
        if self._traces is None:
            self.clock = RoundClock(wall, (self.counts,))
        else:
            self.clock = RoundClock(wall, (self.counts, self._traces))
            self.fleet = _TracedFleet(self.counts, self._traces, self.clock)

    def observing(self, first: Observer) -> Observer:
        """Return the observer of the Runs: the given one, then the clock."""
        return _Both(first, self.clock)

    def follow(self, runs: Runs) -> None:
        """Observe these Runs. Call it before they start."""
        self.clock.find_with(finder(runs))

    def resume(self, runs: Runs) -> None:
        """Observe the Rounds that were under way before the start. Call it when the Runs have started."""
        for publications in runs.publications():
            self.clock.resume(publications.view.run_id)

    @property
    def is_tracing(self) -> bool:
        """See CallObserver."""
        return self._traces is not None

    def begin(self, method: str, traceparent: str) -> "ObservedCall":
        """See CallObserver."""
        self.calls.begin()
        name = method.rpartition("/")[2]
        return ObservedCall(self.calls, name, None if self._traces is None else self._traces.begin(name, traceparent))


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """A ServedCall that is counted and, maybe, traced."""

    counts: CallCounts
    method: str
    traced: TracedCall | None

    def replied(self, reply: Message) -> Metadata:
        """See ServedCall."""
        return () if self.traced is None else self.traced.replied(reply)

    def ended(self, status: str, code: str, seconds: float) -> None:
        """See ServedCall."""
        self.counts.end(self.method, status, code, seconds)
        if self.traced is not None:
            self.traced.ended(status, code, seconds)


@dataclass(frozen=True, slots=True)
class _Both:
    """Two observers of Runs, one after the other."""

    first: Observer
    second: Observer

    def starting(self, run_id: str, effect: Effect) -> None:
        """See Observer."""
        self.first.starting(run_id, effect)
        self.second.starting(run_id, effect)

    def finished(self, run_id: str, effect: Effect) -> None:
        """See Observer."""
        self.first.finished(run_id, effect)
        self.second.finished(run_id, effect)


@dataclass(frozen=True, slots=True)
class _TracedFleet:
    """Two observers of devices, one after the other."""

    first: FleetObserver
    second: FleetObserver
    clock: RoundClock

    def answered(self, device: str, answer: CheckInAnswer) -> None:
        """See FleetObserver."""
        self.first.answered(device, answer)
        if isinstance(answer, Assigned):
            # Devices are assigned before the effect that opened the Round is finished.
            self.clock.look(answer.assignment.run_id)
        self.second.answered(device, answer)

    def sent(self, num_bytes: int) -> None:
        """See FleetObserver."""
        self.first.sent(num_bytes)
        self.second.sent(num_bytes)

    def received(self, num_bytes: int) -> None:
        """See FleetObserver."""
        self.first.received(num_bytes)
        self.second.received(num_bytes)

    @contextmanager
    def committing(self, work: AssignedWork) -> Iterator[None]:
        """See FleetObserver."""
        with self.first.committing(work), self.second.committing(work):
            yield

    def concluded(self, work: AssignedWork, outcome: WorkOutcome, code: str = "") -> None:
        """See FleetObserver."""
        self.first.concluded(work, outcome, code)
        self.second.concluded(work, outcome, code)


def finder(runs: Runs) -> FindPlace:
    """Return the function that finds the Round under way of a Run."""

    def find(run_id: str) -> RunPlace | None:
        driver = runs.drivers.find(run_id)
        if driver is None or driver.course.work is None or driver.course.round is None:
            return None
        record, machine = driver.course.work.record, driver.course.round
        return RunPlace(
            name=RoundName(run_id=run_id, round=record.round, opened_at_s=record.opened_at_s),
            phase=machine.phase,
            has_deadline=machine.deadline is not None or not machine.is_open,
            outer_step_at_s=driver.course.work.outer_step_at_s,
        )

    return find

"""Observers of a training: the events that they receive, their decisions, and their failures."""

import re

import pytest

from fanin.datacenter.observers.contract import check_observer
from fanin.datacenter.observers.events import Event, StepEnded, StepSettled, StepStarted, TrainingStarted
from fanin.datacenter.observers.loading import guest_of
from fanin.datacenter.observers.observer import Decision, Failure, Finish, Guest, Interrupt, Observers, strongest
from fanin.protos.errors import InvalidInput

STARTED, SETTLED = StepStarted(step=0), StepSettled(num_steps=1)


class Recorder:
    """An observer that logs the events under its name, and returns a decision."""

    def __init__(self, log: list[tuple[str, Event]], name: str, decision: Decision | None = None) -> None:
        self._log = log
        self._name = name
        self._decision = decision

    def on(self, event: Event) -> Decision | None:
        self._log.append((self._name, event))
        return self._decision


class Broken:
    """An observer that raises an error on the start of a step."""

    def on(self, event: Event) -> None:
        if isinstance(event, StepStarted):
            raise ArithmeticError("no\nnumber")


class Exit:
    """An observer that ends the process."""

    def on(self, event: Event) -> None:
        raise SystemExit(3)


class Odd:
    """An observer that returns another type than a decision."""

    def on(self, event: Event) -> bool:
        return True


def test_observers_receive_each_event_in_their_order() -> None:
    log: list[tuple[str, Event]] = []
    observers = Observers([Recorder(log, "a"), Recorder(log, "b")])
    observers.publish(STARTED)
    observers.publish(SETTLED)
    assert log == [("a", STARTED), ("b", STARTED), ("a", SETTLED), ("b", SETTLED)]
    assert observers.verdict() is None


@pytest.mark.parametrize("first", [True, False])
def test_the_strongest_decision_counts_once(first: bool) -> None:
    decisions: list[Decision] = [Finish(reason="low"), Interrupt(reason="time")]
    recorders = [Recorder([], "x", each) for each in (decisions if first else reversed(decisions))]
    observers = Observers(recorders)
    observers.publish(STARTED)
    assert observers.verdict() == Interrupt(reason="time")
    assert observers.verdict() is None
    assert strongest([None, Finish(reason="1"), Finish(reason="2"), None]) == Finish(reason="1")


@pytest.mark.parametrize(
    ("observer", "message"),
    [
        (Broken(), "observer 'x': raised ArithmeticError on StepStarted: no number"),
        (Exit(), "observer 'x': raised SystemExit on StepStarted: 3"),
        (Odd(), "observer 'x': got True from on(StepStarted), expected None, Finish or Interrupt"),
    ],
)
def test_a_failing_guest_is_named_and_silences_no_other(observer: object, message: str) -> None:
    log: list[tuple[str, Event]] = []
    observers = Observers([guest_of("'x'", observer), Recorder(log, "last", Finish(reason="low"))])
    observers.publish(STARTED)
    observers.publish(SETTLED)
    assert [event for _, event in log] == [STARTED, SETTLED]
    assert observers.verdict() == observers.verdict() == Failure(reason=message)


def test_the_failure_of_any_guest_is_the_verdict() -> None:
    observers = Observers([guest_of("'well'", Recorder([], "well")), guest_of("'ill'", Broken())])
    observers.publish(STARTED)
    failure = Failure(reason="observer 'ill': raised ArithmeticError on StepStarted: no number")
    assert observers.verdict() == failure


def test_a_keyboard_interrupt_ends_the_training() -> None:
    class Interrupted:
        def on(self, event: Event) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guest_of("'x'", Interrupted()).on(STARTED)


def test_a_guests_decision_names_it() -> None:
    observers = Observers([Guest("'x'", Recorder([], "x", Finish(reason="low")))])
    observers.publish(SETTLED)
    assert observers.verdict() == Finish(reason="observer 'x': low")


class TwoEvents:
    def on(self, event: Event, other: Event) -> None:
        """Expect one argument too many."""


class Named:
    on = "on"


@pytest.mark.parametrize(
    ("observer", "message"),
    [
        (object(), "observer 0: got object, expected an object with a method on(event)"),
        (Named(), "observer 0: got Named, expected an object with a method on(event)"),
        (TwoEvents(), "observer 0: got on(event: "),
    ],
)
def test_an_object_that_is_no_observer_is_refused(observer: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        guest_of("0", observer)


class Careless:
    """An observer that breaks one clause of the contract."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._num = 0

    def on(self, event: Event) -> object:
        match self._fault, event:
            case "resume", StepEnded(step=step):
                self._num += 1
                assert self._num == step + 1, "the first step is 0"
            case "loss", StepEnded(loss=loss, skipped=skipped):
                return None if skipped and loss is not None else round(loss, 2) and None  # type: ignore[arg-type]
            case "later", _ if not type(event).__module__.endswith(".events"):
                raise TypeError(type(event).__name__)
            case "value", TrainingStarted():
                return "go on"
        return None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("resume", "observer in a job that resumes: raised AssertionError on StepEnded: the first step is 0"),
        ("loss", "observer in a job that has losses that are not finite: raised TypeError on StepEnded"),
        ("later", "observer in a job that publishes events of a later release: raised TypeError on _LaterEvent"),
        ("value", "observer in a job that ends: got 'go on' from on(TrainingStarted), expected None"),
    ],
)
def test_the_contract_reports_each_fault(fault: str, message: str) -> None:
    check_observer(lambda: Careless("none"))
    with pytest.raises(AssertionError, match=re.escape(message)):
        check_observer(lambda: Careless(fault))

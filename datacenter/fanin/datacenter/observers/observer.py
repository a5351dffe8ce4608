"""Observers of a training, and the list through which the training publishes its events.

An observer receives every event of its rank, in the training's thread. It may return a decision: ``Finish`` or
``Interrupt``. Decisions and failures take effect after the current step, on all ranks together
(``training.decisions``). An observer must not call collectives, because another rank may not have the same observer.

The order of a job's observers is fixed: timeline, traffic, meter, watchdog, checkpoints, those of the config, those of
the caller, the stop signal. So a row is written, the watchdog has seen the progress and a due checkpoint is saved
before any code of others runs. No failure of that code reaches them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from fanin.datacenter.observers.events import Event

LOGGER: Final = logging.getLogger(__name__)
MAX_ERROR_CHARS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Ends the training as after its last step: with a final evaluation, a checkpoint and the weights."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """Ends the training at once, with a checkpoint alone. The same job resumes from it later."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Ends the training with an error, because an observer has failed."""

    reason: str


Decision = Finish | Interrupt
Verdict = Finish | Interrupt | Failure
SEVERITY: Final[tuple[type[Verdict], ...]] = (Finish, Interrupt, Failure)
"""From the weakest to the strongest. The strongest verdict of a step counts; of equal ones, the first."""


@runtime_checkable
class TrainingObserver(Protocol):
    """Receives the events of a training. ``contract.check_observer`` checks an implementation."""

    def on(self, event: Event) -> Decision | None:
        """Receive an event. Return a decision to end the training, or None to continue."""


class Guest:
    """An observer that is not fanin's own: its errors never interrupt a step, and never reach other observers.

    After its first error the observer receives no more events, and ``failure`` names it. ``sys.exit`` is such an error.
    """

    def __init__(self, name: str, observer: TrainingObserver) -> None:
        self.failure: Failure | None = None
        self._name = name
        self._observer = observer

    def on(self, event: Event) -> Decision | None:
        """Pass an event on, unless the observer has failed."""
        if self.failure is not None:
            return None
        kind = type(event).__name__
        try:
            decision: object = self._observer.on(event)
        except (Exception, SystemExit) as exc:  # Any error: the code is not fanin's. It may even call sys.exit.
            LOGGER.exception("observer %s: raised an error on %s", self._name, kind)
            text = " ".join(str(exc).split())[:MAX_ERROR_CHARS]
            self.failure = Failure(reason=f"observer {self._name}: raised {type(exc).__name__} on {kind}: {text}")
            return None
        match decision:
            case None:
                return None
            case Finish(reason=reason):
                return Finish(reason=f"observer {self._name}: {reason}")
            case Interrupt(reason=reason):
                return Interrupt(reason=f"observer {self._name}: {reason}")
        self.failure = Failure(
            reason=f"observer {self._name}: got {decision!r} from on({kind}), expected None, Finish or Interrupt"
        )
        return None


class Observers:
    """The observers of a job on one rank, in the order in which they receive each event.

    Args:
        observers: The observers.
        shared: Whether the ranks agree on a verdict after each step, which is a collective. All ranks give the same
            value. It is needed if any rank has an observer that can end the training.
    """

    def __init__(self, observers: Sequence[TrainingObserver] = (), *, shared: bool = False) -> None:
        self.shared = shared
        self._observers = tuple(observers)
        self._guests = tuple(each for each in self._observers if isinstance(each, Guest))
        self._decision: Decision | None = None

    def __bool__(self) -> bool:
        return bool(self._observers)

    def publish(self, event: Event) -> None:
        """Pass an event to all observers. An error of fanin's own observers propagates."""
        for observer in self._observers:
            decision = observer.on(event)
            if decision is not None:
                self._decision = strongest([self._decision, decision])  # type: ignore[assignment]

    def verdict(self) -> Verdict | None:
        """Return this rank's verdict since the last call: a failure of a guest, or the strongest decision."""
        decision, self._decision = self._decision, None
        return strongest([decision, *(guest.failure for guest in self._guests)])


def strongest(verdicts: Sequence[Verdict | None]) -> Verdict | None:
    """Return the strongest verdict, and of equal ones the first; None if there is none."""
    some = [each for each in verdicts if each is not None]
    return max(some, key=lambda each: SEVERITY.index(type(each)), default=None)


Publish = Callable[[Event], None]
"""The function by which a part of the training publishes its events."""

"""The contract of observers, as a check for the tests of one's own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fanin.datacenter.observers.events import (
    CheckpointWaited,
    CheckpointWritten,
    DataRead,
    EvaluationBatch,
    EvaluationEnded,
    Event,
    StageComputed,
    StepComputed,
    StepEnded,
    StepSettled,
    StepStarted,
    TrainingEnded,
    TrainingFailed,
    TrainingStarted,
)
from fanin.datacenter.observers.loading import guest_of

NUM_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaterEvent:
    """An event of a later release."""


def check_observer(factory: Callable[[], object]) -> None:
    """Check that an observer accepts the events of any job.

    Args:
        factory: Returns a new observer.

    Raises:
        AssertionError: The observer breaks the contract. The text names the event and the job.
        InvalidInput: It has no method ``on`` of one event.
    """
    for name, events in _jobs().items():
        guest = guest_of(f"in a job that {name}", factory())
        for event in events:
            guest.on(event)
            assert guest.failure is None, guest.failure.reason


def _jobs() -> dict[str, list[Event]]:
    """Return the events of some jobs, by a description of the job."""
    end = TrainingEnded(num_steps=NUM_STEPS, reason="steps", interrupted=False)
    later: Event = _LaterEvent()  # type: ignore[assignment]
    return {
        "ends": [TrainingStarted(num_steps=0), *_steps(0, loss=1.5), end],
        "resumes": [TrainingStarted(num_steps=2), *_steps(2, loss=0.5), end],
        "has nothing left to do": [TrainingStarted(num_steps=NUM_STEPS), end],
        "has losses that are not finite": [TrainingStarted(num_steps=0), *_steps(0, loss=None), end],
        "is interrupted": [
            TrainingStarted(num_steps=0),
            TrainingEnded(num_steps=1, reason="SIGTERM", interrupted=True),
        ],
        "fails": [TrainingStarted(num_steps=0), TrainingFailed(num_steps=1, error="Diverged: the loss is nan")],
        "publishes events of a later release": [TrainingStarted(num_steps=0), later, *_steps(0, loss=1.0), end],
    }


def _steps(first: int, *, loss: float | None) -> Iterator[Event]:
    for step in range(first, NUM_STEPS):
        num_steps = step + 1
        yield StepStarted(step=step)
        yield DataRead(step=step, started_s=1.0 * step, seconds=0.1)
        yield StageComputed(stage=0, work="forward", started_s=step + 0.1, seconds=0.1)
        yield StageComputed(stage=0, work="backward", started_s=step + 0.2, seconds=0.2)
        yield StepComputed(step=step, started_s=step + 0.1, seconds=0.3)
        yield StepEnded(step=step, loss=loss, rate=0.1, norm=loss, units=16, skipped=loss is None)
        if num_steps % 2 == 0:
            yield EvaluationBatch(num_steps=num_steps)
            yield EvaluationEnded(
                num_steps=num_steps,
                epoch=0,
                train_loss=loss,
                validation_loss=1.0,
                validation_accuracy=0.5,
                best=num_steps == 2,
            )
        yield StepSettled(num_steps=num_steps)
        yield CheckpointWaited(num_steps=num_steps)
        yield CheckpointWritten(num_steps=num_steps)

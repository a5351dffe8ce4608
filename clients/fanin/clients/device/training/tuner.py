"""The fine-tuning of a device: after the end of a Run it trains the last Version for its own app.

    Run has finished -> train the served Version -> measure -> store -> serve

1. It starts from the Version that the device serves, with the device's personal parameters if the Bundle has any.
2. The Version and the result are evaluated on the validation part. The numbers stay on this device.
3. The result is stored durably before it is served, so that a restart serves it again. A kill before that costs some
   seconds of the training, which resumes from its saved state.

A later Version of the Run, or of another one, replaces the result. It is fine-tuned when its Run has finished.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.serving import Serving
from fanin.clients.device.session import events as e
from fanin.clients.device.storage.personal import keep_tuned
from fanin.clients.device.storage.protocols import DeviceFolder
from fanin.clients.device.training.tuning import FineTuning, start_of, tuned
from fanin.clients.device.updates import Change, Trainer
from fanin.edge.codecs.stages import EVALUATE_ONLY
from fanin.edge.runtimes.evaluations import quality_of
from fanin.edge.runtimes.quality import Quality
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput

LOG = logging.getLogger("fanin.clients")
NO_VALIDATION: Final = "FN-1869"
Fetch = Callable[[m.Publication, m.Assignment], Awaitable[OpenedModel]]
"""Returns the model of a Publication with the graphs that a training for an Assignment needs."""
Train = Callable[[OpenedModel, m.Assignment, ShouldContinue], Awaitable[Change]]


@runtime_checkable
class MeasuresRanges(Protocol):
    """A trainer that measures the ranges of a model's activations on the training examples of the device."""

    def own_ranges(self, model: OpenedModel, should_continue: ShouldContinue) -> Float32s | None:
        """Return the ranges (2 * activations,) for int8; those of the model if there is nothing to measure."""
        ...


def own_ranges(trainer: Trainer, model: OpenedModel, should_continue: ShouldContinue) -> Float32s | None:
    """Return the ranges of a model of this device alone; those of the model if the trainer cannot measure them."""
    return trainer.own_ranges(model, should_continue) if isinstance(trainer, MeasuresRanges) else model.ranges


@dataclass(frozen=True, slots=True)
class TuningCalls:
    """What a fine-tuning uses of its driver."""

    fetch: Fetch
    train: Train
    should_continue: ShouldContinue


class DeviceTuner:
    """Fine-tunes the served Version once its Run has finished.

    Args:
        fine_tuning: The epochs and the learning rate.
        store: The device's folder.
        serving: The served model.
        trainer: Trains and evaluates.
    """

    def __init__(self, fine_tuning: FineTuning, store: DeviceFolder, serving: Serving, trainer: Trainer) -> None:
        self._fine_tuning = fine_tuning
        self._store = store
        self._serving = serving
        self._trainer = trainer
        # The Version whose fine-tuning failed. It fails again in this process, so the device does not repeat it.
        self._failed: m.Publication | None = None

    @property
    def awaits_end(self) -> bool:
        """Whether the served Version is still to be fine-tuned."""
        publication = self._serving.publication
        return publication is not None and publication != self._failed and not self._serving.is_tuned

    async def tune(self, training: m.Training, calls: TuningCalls) -> e.Tuned:
        """Fine-tune the served Version, store the result and serve it.

        Args:
            training: The settings of training of the Run.
            calls: Fetches the model and trains it.

        Raises:
            InvalidInput: The examples do not fit the model, or the training diverged.
            Interrupted: The device must stop.
        """
        publication = self._serving.publication
        assert publication is not None, "a device awaits the end of the Run whose Version it serves"
        try:
            return await self._tune(publication, self._fine_tuning.assignment(publication, training), calls)
        except ValueError as exc:
            self._failed = publication
            raise InvalidInput(f"fine-tuning: {exc}", code="FN-0842") from exc
        except InvalidInput:
            self._failed = publication
            raise

    async def _tune(self, publication: m.Publication, assignment: m.Assignment, calls: TuningCalls) -> e.Tuned:
        LOG.info("run %s has finished: fine-tuning version %d", publication.run_id, publication.version.number)
        model = await calls.fetch(publication, assignment)
        saved = None if self._store.trainings is None else self._store.trainings.open(assignment)
        start = start_of(model)
        change = await calls.train(replace(start, saved=saved), assignment, calls.should_continue)
        own = tuned(start, change)
        own = replace(own, ranges=own_ranges(self._trainer, own, calls.should_continue))
        # The global model is that of the simulation's reports: personal parameters have their initial values.
        before, after = [await _quality(each, assignment, calls) for each in (replace(model, local=None), own)]
        keep_tuned(self._store.tuned, publication.version, own)
        self._serving.tune(publication, own)
        if self._store.trainings is not None:
            self._store.trainings.clear()
        return e.Tuned(
            run_id=publication.run_id,
            version=publication.version.number,
            epochs=self._fine_tuning.epochs,
            before=before,
            after=after,
        )


def tuner_of(
    fine_tuning: FineTuning | None, store: DeviceFolder, serving: Serving | None, trainer: Trainer
) -> DeviceTuner | None:
    """Return the tuner of a device; None without a fine-tuning, and for a device that serves no model."""
    if fine_tuning is None or serving is None:
        return None
    return DeviceTuner(fine_tuning, store, serving, trainer)


async def _quality(model: OpenedModel, assignment: m.Assignment, calls: TuningCalls) -> Quality:
    """Return the quality of a model on the validation part; that of no example without one."""
    work = replace(assignment, stages=(m.StageSpec(name=EVALUATE_ONLY),))
    try:
        change = await calls.train(model, work, calls.should_continue)
    except InvalidInput as exc:
        if exc.code != NO_VALIDATION:
            raise
        return quality_of({})
    return quality_of(change.counts)

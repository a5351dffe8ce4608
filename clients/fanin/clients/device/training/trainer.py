"""Local SGD over a runtime: FedAvg's ClientUpdate.

A training runs some epochs over the local examples, in a new random order each epoch. The batch size is the Plan's or
the Bundle's. The seed is (seed, partition, round), so a repeated training after a crash is bit-identical, and so is one
that resumes from a saved state (``resuming``).

The graphs of the newest Bundle stay open between Rounds. An interruption waits for the current batch. It also waits for
``preprocess``, which converts all new examples at once.

Reference:
    McMahan et al. 2017, arXiv 1602.05629, algorithm 1.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from fanin.clients.data.batching import batches, num_batches
from fanin.clients.data.stores import ExampleStore, MemoryStore
from fanin.clients.device.conditions import AssignmentOver, Interrupted, ShouldContinue
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.models import OpenedModel, keeps_copy
from fanin.clients.device.training.local_data import LocalData
from fanin.clients.device.training.passes import Extent, TrainingPass, begin_pass, extents_of, passes_of
from fanin.clients.device.training.resuming import (
    DEFAULT_POLICY,
    NO_STATE,
    PartialTraining,
    SavePolicy,
    Saver,
    digest_of,
)
from fanin.clients.device.training.statistics import answer
from fanin.clients.device.training.work import PlannedWork, WorkPolicy, all_steps, steps_to_do, work_counts
from fanin.clients.device.updates import Change
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.codecs.stages import EVALUATE_ONLY
from fanin.edge.runtimes.base import PaddedBatch, Runtime, TrainStep
from fanin.edge.runtimes.evaluations import loss_count
from fanin.edge.runtimes.graphs import optimizer_table
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import Diverged, InvalidInput
from fanin.protos.plans.schedule import rate_of_step
from fanin.protos.texts import counted

if TYPE_CHECKING:
    from fanin.edge.metrics.metric import Metric

LOG = logging.getLogger("fanin.clients")


class RuntimeTrainer:
    """A Trainer over a runtime and an example store.

    Args:
        runtime: Runs the graphs.
        store: The examples.
        metrics: Metrics of your own by name, for the Plan's statistics ``evaluate.NAME``.
        policy: How often the state of a training is saved.
        work: How many of its steps the device does.
    """

    def __init__(
        self,
        runtime: Runtime,
        store: ExampleStore,
        metrics: "Mapping[str, Metric]" = MappingProxyType({}),
        policy: SavePolicy = DEFAULT_POLICY,
        work: WorkPolicy = all_steps,
    ) -> None:
        self._graphs = BundleGraphs(runtime)
        self._data = LocalData(self._graphs, store, metrics)
        self._policy = policy
        self._work = work
        # The Assignment under way and its last step.
        self._progress = "", m.TrainingProgress()

    @property
    def runtime(self) -> str:
        """The library and its version."""
        return self._graphs.name

    @property
    def graph_format(self) -> str:
        """The format of the runtime's graphs."""
        return self._graphs.graph_format

    @property
    def answers_queries(self) -> bool:
        """See AnswersQueries."""
        return True

    def row_sizes(self, bundle: Bundle) -> Collection[int]:
        """Return the lengths of the rows that the next training uses. See SizingTrainer."""
        return self._data.row_sizes(bundle)

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Validate the Version, then run local SGD from it, or answer the query of the Bundle. See Trainer.

        Raises:
            Interrupted: ``should_continue`` raised it.
            Diverged: The loss is not finite.
            ValueError: The examples do not fit the model.
            InvalidInput: The store cannot be read, or the Bundle has no graph for the Assignment's batch size.
            TooLittleWork: The device does fewer steps than the Plan demands.
        """
        if model.bundle.manifest.query is not None:
            should_continue()
            return answer(model, self._data.store)
        bundle = trained_bundle(model, assignment)
        examples = self._data.examples(model.bundle)
        if any(stage.name == EVALUATE_ONLY for stage in assignment.stages):
            return self._evaluated(model, examples, assignment, should_continue)
        planned = planned_work(examples, model, assignment)
        num_steps = steps_to_do(self._work, assignment, planned)
        passes = passes_of(model, assignment, examples.partition)
        settings, own = passes[-1].settings, passes[0].start
        digest = partial(digest_of, examples, settings, assignment.training, self.runtime, own)
        saver = Saver(model.saved, digest, self._policy, self._policy.now)
        initial = model.values()
        ended = saver.read(len(initial), optimizer_table(bundle.manifest).num_values)
        if ended is None:
            ended = PartialTraining(
                state=NO_STATE,
                loss_sum=0.0,
                counts=self._data.before_training(model, examples, assignment, should_continue),
                ranges=self._data.ranges(model, examples, assignment, should_continue),
            )
        step = self._graphs.open_train(bundle)
        works = [planned_work(examples, model, each.assignment) for each in passes]
        extents = extents_of(works, num_steps)
        for number in range(ended.num_passes, len(passes)):
            loop = _Loop(part=passes[number], extent=extents[number], saver=saver, report=self._note_progress)
            begun = begin_pass(step, passes[number], number, ended)
            rest = training_batches(examples, model, passes[number].assignment, begun.state.num_steps)
            ended = loop.run(step, begun, rest, should_continue)
        counts = {**ended.counts, **training_counts(ended.loss_sum, num_steps, planned, examples, model)}
        values, local = bundle.manifest.split(difference(ended.state.parameters, initial))
        if local.size:
            local = bundle.manifest.split(ended.state.parameters)[1]
        elif keeps_copy(bundle, assignment.training):
            local = ended.own
        return Change(
            values=values,
            counts=counts,
            num_steps=ended.state.num_steps,
            planned_steps=planned.num_steps,
            local=local if local.size else None,
            ranges=ended.ranges,
        )

    def _evaluated(
        self, model: OpenedModel, examples: MemoryStore, assignment: m.Assignment, should_continue: ShouldContinue
    ) -> Change:
        """Return the statistics of the Version on the validation part, and no change."""
        counts, manifest = (
            self._data.evaluate(model, examples.validation, assignment, should_continue),
            model.bundle.manifest,
        )
        if not counts.get(m.EVAL_EXAMPLES):
            raise InvalidInput(
                "evaluation: this device has no validation part, expected one: this run only evaluates; join with "
                "--validation above 0",
                code="FN-1869",
            )
        return Change(
            values=np.zeros(manifest.table.num_values, np.float32),
            counts={**counts, m.EXAMPLES: 1},
            local=model.kept_values(assignment.training),
        )

    def own_ranges(self, model: OpenedModel, should_continue: ShouldContinue) -> Float32s | None:
        """Return the ranges of a model of this device alone, for int8. See ``LocalData.own_ranges``."""
        return self._data.own_ranges(model, should_continue)

    def _note_progress(self, assignment_id: str, progress: m.TrainingProgress) -> None:
        self._progress = assignment_id, progress

    def progress_of(self, assignment_id: str) -> m.TrainingProgress:
        """See ``ReportsSteps``."""
        now_id, progress = self._progress
        return progress if now_id == assignment_id else m.TrainingProgress()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """The steps of one pass of a training: the first ones of all that are planned."""

    part: TrainingPass
    extent: Extent
    saver: Saver
    report: Callable[[str, m.TrainingProgress], None]

    def run(
        self,
        step: TrainStep,
        begun: PartialTraining,
        batches_left: Iterator[PaddedBatch],
        should_continue: ShouldContinue,
    ) -> PartialTraining:
        """Run the batches that are left, and return the training after them."""
        work, extent, state, loss_sum = self.part.assignment, self.extent, begun.state, begun.loss_sum
        training, settings = work.training, self.part.settings
        if state.num_steps:
            LOG.info(
                "round %d of run %s: training resumes after step %d of %d",
                work.round,
                work.run_id,
                extent.before + state.num_steps,
                extent.total,
            )
        first, begun = state.num_steps, replace(begun, state=NO_STATE)
        # The pass before has ended, and its end is not saved yet.
        is_later_pass = begun.num_passes > 0 and not first
        if is_later_pass and self.saver.is_due(ends_epoch=True):
            self.saver.save(replace(begun, state=state))
        self._report(first)
        for batch in islice(batches_left, max(extent.num_steps - first, 0)):
            try:
                should_continue()
            except AssignmentOver:
                raise
            except Interrupted:
                if state.num_steps > first or is_later_pass:
                    self.saver.save(replace(begun, state=state, loss_sum=loss_sum))
                raise
            rate = rate_of_step(training, state.num_steps, extent.planned, work.round)
            if rate != settings.learning_rate:
                settings = replace(settings, learning_rate=rate)
            state, loss = step(state, batch, settings)
            loss_sum += finite(loss, state.num_steps, training) * float(batch.mask.sum())
            self._report(state.num_steps)
            ends_epoch = state.num_steps % extent.per_epoch == 0
            # After the last step the Update is stored, at once.
            if state.num_steps < extent.num_steps and self.saver.is_due(ends_epoch=ends_epoch):
                self.saver.save(replace(begun, state=state, loss_sum=loss_sum))
        return replace(begun, state=state, loss_sum=loss_sum)

    def _report(self, num_steps: int) -> None:
        self.report(self.part.assignment.assignment_id, self.extent.progress(num_steps))


def trained_bundle(model: OpenedModel, assignment: m.Assignment) -> Bundle:
    """Return the Bundle with the train graph for the batch size of an Assignment. Raises InvalidInput."""
    return model.bundle.at_batch(assignment.training.batch_size)


def training_batches(
    examples: MemoryStore, model: OpenedModel, assignment: m.Assignment, first: int = 0
) -> Iterator[PaddedBatch]:
    """Yield the batches of all epochs of an Assignment, from number ``first`` on."""
    seed = (assignment.training.seed, examples.partition, assignment.round)
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    manifest = trained_bundle(model, assignment).manifest
    per_epoch = num_batches(examples.train, manifest.batch_size, manifest.lengths) if first else 0
    for epoch in range(assignment.training.epochs):
        # An epoch that is skipped draws its order, too.
        num_skipped = min(max(first - epoch * per_epoch, 0), per_epoch)
        yield from batches(examples.train, manifest.batch_size, rng, manifest.lengths, num_skipped)


def planned_work(examples: MemoryStore, model: OpenedModel, assignment: m.Assignment) -> PlannedWork:
    """Return the complete work of an Assignment: the batches of all epochs."""
    manifest, epochs = trained_bundle(model, assignment).manifest, assignment.training.epochs
    per_epoch = num_batches(examples.train, manifest.batch_size, manifest.lengths)
    return PlannedWork(num_steps=per_epoch * epochs, num_epochs=epochs)


def training_counts(
    loss_sum: float, num_steps: int, planned: PlannedWork, examples: MemoryStore, model: OpenedModel
) -> dict[str, int]:
    """Return the counts of a training.

    Args:
        loss_sum: Sum of the loss over all samples of all steps.
        num_steps: Steps of the training.
        planned: The complete work.
        examples: The examples of the device.
        model: The model before the training.
    """
    num, num_classes = len(examples.train), model.bundle.manifest.num_classes
    epochs = planned.num_epochs * num_steps / planned.num_steps
    return {
        m.EXAMPLES: num,
        m.TRAIN_LOSS: loss_count(loss_sum / epochs, num, num_classes),
        **work_counts(num_steps, planned),
    }


def finite(loss: float, num_steps: int, training: m.Training) -> float:
    """Return the loss of a step. Raises Diverged if it is not finite."""
    if not math.isfinite(loss):
        raise Diverged(
            f"training: loss became {loss} after {counted(num_steps, 'step')}, expected a finite one; "
            f"lower the learning rate ({training.learning_rate:g})",
            code="FN-0842",
        )
    return loss


def difference(after: Float32s, before: Float32s) -> Float32s:
    """Return the change of the parameters (num_values,): the exact difference, rounded once to float32."""
    return np.subtract(after, before, dtype=np.float32)

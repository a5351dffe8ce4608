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
from typing import TYPE_CHECKING, Final

import numpy as np

from fanin.clients.data.batching import batches, num_batches
from fanin.clients.data.stores import ExampleStore, MemoryStore
from fanin.clients.device.conditions import AssignmentOver, Interrupted, ShouldContinue
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.local_data import LocalData
from fanin.clients.device.training.resuming import (
    DEFAULT_POLICY,
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
from fanin.edge.runtimes.base import PaddedBatch, Runtime, StepSettings, TrainState, TrainStep
from fanin.edge.runtimes.evaluations import loss_count
from fanin.edge.runtimes.graphs import CONTROL, control_ports, optimizer_table
from fanin.edge.runtimes.randomness import random_key
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import Diverged, InvalidInput
from fanin.protos.plans.schedule import rate_of_step
from fanin.protos.texts import counted

if TYPE_CHECKING:
    from fanin.edge.metrics.metric import Metric

LOG = logging.getLogger("fanin.clients")
NO_STATE: Final = TrainState(parameters=np.empty(0, np.float32), optimizer=np.empty(0, np.float32))
"""Stands for a state that is not held: a step reuses the memory of a state once its caller holds it no more."""


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
        initial, control = model.values(), control_of(model)
        training, planned = assignment.training, planned_work(examples, model, assignment)
        num_steps = steps_to_do(self._work, assignment, planned)
        settings = StepSettings(
            learning_rate=training.learning_rate,
            proximal_weight=training.proximal_weight,
            anchor=initial,
            control=control,
            random_key=random_key(training.seed, examples.partition, assignment.round),
            optimizer=training.optimizer,
        )
        digest = partial(digest_of, examples, settings, training, self.runtime)
        saver = Saver(model.saved, digest, self._policy, self._policy.now)
        begun = saver.read(len(initial), optimizer_table(bundle.manifest).num_values)
        if begun is None:
            begun = PartialTraining(
                state=NO_STATE,
                loss_sum=0.0,
                counts=self._data.before_training(model, examples, assignment, should_continue),
                ranges=self._data.ranges(model, examples, assignment, should_continue),
            )
        step = self._graphs.open_train(bundle)
        if begun.state is NO_STATE:
            begun = replace(begun, state=step.begin(initial))
        loop = _Loop(
            assignment=assignment,
            num_batches=planned.num_steps,
            num_steps=num_steps,
            saver=saver,
            report=self._note_progress,
        )
        rest = training_batches(examples, model, assignment, begun.state.num_steps)
        rest = islice(rest, max(num_steps - begun.state.num_steps, 0))
        ended = loop.run(step, settings, begun, rest, should_continue)
        counts = {**ended.counts, **training_counts(ended.loss_sum, num_steps, planned, examples, model)}
        parameters = ended.state.parameters
        values, _ = bundle.manifest.split(difference(parameters, initial))
        local = None if bundle.manifest.local is None else bundle.manifest.split(parameters)[1]
        return Change(
            values=values,
            counts=counts,
            num_steps=ended.state.num_steps,
            planned_steps=planned.num_steps,
            local=local,
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
        _, local = manifest.split(model.values())
        return Change(
            values=np.zeros(manifest.table.num_values, np.float32),
            counts={**counts, m.EXAMPLES: 1},
            local=None if manifest.local is None else local,
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
    """The steps of one training: the first ``num_steps`` of ``num_batches``."""

    assignment: m.Assignment
    num_batches: int
    num_steps: int
    saver: Saver
    report: Callable[[str, m.TrainingProgress], None]

    def run(
        self,
        step: TrainStep,
        settings: StepSettings,
        begun: PartialTraining,
        rest: Iterator[PaddedBatch],
        should_continue: ShouldContinue,
    ) -> PartialTraining:
        """Run the batches that are left, and return the training after them."""
        training, state, loss_sum = self.assignment.training, begun.state, begun.loss_sum
        if state.num_steps:
            LOG.info(
                "round %d of run %s: training resumes after step %d of %d",
                self.assignment.round,
                self.assignment.run_id,
                state.num_steps,
                self.num_steps,
            )
        first, begun = state.num_steps, replace(begun, state=NO_STATE)
        self._report(first)
        for batch in rest:
            try:
                should_continue()
            except AssignmentOver:
                raise
            except Interrupted:
                if state.num_steps > first:
                    self.saver.save(replace(begun, state=state, loss_sum=loss_sum))
                raise
            rate = rate_of_step(training, state.num_steps, self.num_batches, self.assignment.round)
            if rate != settings.learning_rate:
                settings = replace(settings, learning_rate=rate)
            state, loss = step(state, batch, settings)
            loss_sum += finite(loss, state.num_steps, training) * float(batch.mask.sum())
            self._report(state.num_steps)
            ends_epoch = state.num_steps % self.batches_per_epoch == 0
            # After the last step the Update is stored, at once.
            if state.num_steps < self.num_steps and self.saver.is_due(ends_epoch=ends_epoch):
                self.saver.save(replace(begun, state=state, loss_sum=loss_sum))
        return replace(begun, state=state, loss_sum=loss_sum)

    @property
    def batches_per_epoch(self) -> int:
        """The steps of one epoch."""
        return self.num_batches // self.assignment.training.epochs

    def _report(self, num_steps: int) -> None:
        epochs = self.assignment.training.epochs
        progress = m.TrainingProgress(
            step=num_steps,
            num_steps=max(self.num_steps, num_steps),
            epoch=min(num_steps // self.batches_per_epoch + 1, epochs),
            num_epochs=epochs,
        )
        self.report(self.assignment.assignment_id, progress)


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


def control_of(model: OpenedModel) -> Float32s | None:
    """Return the values that the stages add to the gradient; None without such a stage. Raises InvalidInput."""
    if set(model.inputs) - {CONTROL}:
        raise InvalidInput(
            f"stages: got the inputs {sorted(model.inputs)} for the train graph, expected at most {CONTROL!r}; correct "
            "the stage",
            code="FN-0839",
        )
    manifest = model.bundle.manifest
    if model.inputs and not control_ports(manifest.table, manifest.signatures["train"].inputs):
        raise InvalidInput(
            f"stages: got the input {CONTROL!r}, but the bundle's train graph has no inputs {CONTROL}.<p>; export the "
            "App with Recipe(scaffold=True)",
            code="FN-0840",
        )
    control, local = model.inputs.get(CONTROL), manifest.local
    if control is None or local is None:
        return control
    # No other device has personal parameters like these, so nothing corrects their gradients.
    return manifest.join(control, np.zeros(local.table.num_values, np.float32))


def difference(after: Float32s, before: Float32s) -> Float32s:
    """Return the change of the parameters (num_values,): the exact difference, rounded once to float32."""
    return np.subtract(after, before, dtype=np.float32)

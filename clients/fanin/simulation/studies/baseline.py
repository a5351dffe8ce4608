"""The centralized baseline: one model that trains on the pooled examples of all clients.

It has the train graph, batch size and learning rate of the clients. In each Round it takes as many gradient steps as
the clients whose Updates count take together. So both train on equally many examples, and the difference is the
federation. Unlike a client's, its optimizer state lasts from Round to Round. The validation parts of the clients stay
out of it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fanin.clients.data.batching import batches, batches_in_order
from fanin.clients.data.examples import Examples, joined
from fanin.clients.data.stores import memory_store
from fanin.clients.device.graphs import BundleGraphs
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.base import PaddedBatch, StepSettings, VersionValues
from fanin.edge.runtimes.measure import measure
from fanin.edge.runtimes.randomness import random_key
from fanin.edge.tensors import Float32s
from fanin.protos.errors import Diverged
from fanin.protos.plans import Plan
from fanin.protos.plans.schedule import rate_of_step
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.rows import ClientRow, RoundRow

STREAM: Final = 0x62617365
"""Separates the generator of the baseline from all other generators of a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRow:
    """The baseline after as many gradient steps as the clients' total at the end of a Round.

    Attributes:
        round: The Round.
        num_steps: Gradient steps so far.
        train_loss: Mean loss of its steps in this Round; NaN without a step.
        test_loss: Loss on the test data; NaN without test data.
        test_accuracy: Accuracy on the test data, in float; NaN without labels.
    """

    round: int
    num_steps: int
    train_loss: float
    test_loss: float
    test_accuracy: float


def pooled(clients: Partition, validation_fraction: float) -> Examples:
    """Return the examples on which the clients train, together."""
    parts = [memory_store(part, client, validation_fraction).train for client, part in enumerate(clients)]
    return joined(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A centralized training.

    Attributes:
        bundle: The Bundle.
        graphs: The open graphs.
        train: The pooled examples as inputs of the model.
        test: The test data as inputs of the model; None for no evaluation.
        plan: Learning rate, batch size, epochs and seed of the clients.
    """

    bundle: Bundle
    graphs: BundleGraphs
    train: Examples
    test: Examples | None
    plan: Plan

    def rows(self, rounds: Sequence[RoundRow], clients: Sequence[ClientRow]) -> Iterator[BaselineRow]:
        """Train, and yield a row for each Round.

        Raises:
            Diverged: The loss is no longer finite.
        """
        parameters = self.bundle.completed(self.bundle.initial_parameters())
        rng = np.random.default_rng((STREAM, self.plan.training.seed))
        trained = self.bundle.at_batch(self.plan.training_in(1).batch_size)
        state, stream = self.graphs.open_train(trained).begin(parameters), self._batches(trained, rng)
        num_steps = 0
        for row in rounds:
            losses = []
            training = self.plan.training_in(max(row.round, 1))
            size = self.bundle.at_batch(training.batch_size).manifest.batch_size
            if size != trained.manifest.batch_size:
                trained = self.bundle.at_batch(size)
                stream = self._batches(trained, rng)
            step = self.graphs.open_train(trained)
            settings = StepSettings(
                learning_rate=training.learning_rate,
                random_key=random_key(training.seed, 0, 0),
                optimizer=training.optimizer,
            )
            num_batches = [-(-each.num_examples // size) for each in clients if each.round == row.round]
            num = training.epochs * sum(num_batches)
            for number in range(num):
                rate = rate_of_step(training, number, num, max(row.round, 1))
                state, loss = step(state, next(stream), replace(settings, learning_rate=rate))
                if not math.isfinite(loss):
                    raise Diverged(
                        f"baseline: the loss became {loss} in round {row.round}, expected a finite one; lower the "
                        "learning rate",
                        code="FN-1190",
                    )
                losses.append(loss)
            num_steps += len(losses)
            parameters = state.parameters
            test_loss, test_accuracy = self._tested(parameters)
            yield BaselineRow(
                round=row.round,
                num_steps=num_steps,
                train_loss=math.fsum(losses) / len(losses) if losses else math.nan,
                test_loss=test_loss,
                test_accuracy=test_accuracy,
            )

    def _batches(self, trained: Bundle, rng: np.random.Generator) -> Iterator[PaddedBatch]:
        """Yield batches for a train graph without end, each epoch in a new random order."""
        while True:
            yield from batches(self.train, trained.manifest.batch_size, rng, trained.manifest.lengths)

    def _tested(self, parameters: Float32s) -> tuple[float, float]:
        """Return loss and accuracy on the test data; NaN if there is none."""
        if self.test is None:
            return math.nan, math.nan
        in_order = batches_in_order(self.test, self.bundle.manifest.batch_size, self.bundle.manifest.lengths)
        quality = measure(self.graphs, self.bundle, VersionValues(parameters=parameters), in_order)
        has_labels = quality.num_predictions > 0
        return quality.loss_sum / quality.num_examples, quality.accuracy_float if has_labels else math.nan

"""Training on a device: local SGD on its own examples, and the validation of the int8 model.

The trainer runs FedAvg's ClientUpdate: some epochs over the local examples, in batches of the Bundle's size, in a new
random order each epoch. The seed is (seed, partition, round), so a repeated training after a crash is bit-identical.

The example store is read once at the start of each Round, so a Round uses one state of data that may grow. The Bundle's
``preprocess`` converts raw examples once for each Bundle and ``Examples`` object.

Before it trains, a device evaluates the Version on its validation part, in float and in int8. It reports sums over
examples, never examples.

Reference:
    McMahan et al. 2017, arXiv 1602.05629, algorithm 1.
"""

import time
import weakref
from dataclasses import dataclass

import numpy as np

from fanin.clients.data.batching import batches, batches_in_order
from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import ExampleStore, MemoryStore, snapshot
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import TrainingOutcome
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.base import Preprocess, Runtime, StepSettings
from fanin.edge.runtimes.evaluations import counts_of, loss_count
from fanin.edge.runtimes.measure import measure
from fanin.edge.runtimes.models import model_inputs, open_preprocess
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.release import __version__


class RuntimeTrainer:
    """A Trainer over a runtime and an example store."""

    def __init__(self, runtime: Runtime, store: ExampleStore) -> None:
        self._runtime = runtime
        self._store = store
        self._mapped: dict[str, _Mapped] = {}

    @property
    def runtime(self) -> str:
        """The library and its version."""
        return self._runtime.name

    @property
    def graph_format(self) -> str:
        """The format of the runtime's graphs."""
        return self._runtime.graph_format

    def train(self, model: OpenedModel, assignment: m.Assignment, bytes_downloaded: int) -> TrainingOutcome:
        """Validate the Version, then run local SGD from it. See Trainer.

        Raises:
            ValueError: Training diverged, or the examples do not fit the model.
            InvalidInput: The store cannot be read.
        """
        started_s = time.monotonic()
        examples = self._examples(model.bundle)
        counts = self._evaluate(model, examples.validation)
        step = self._runtime.open_train(model.bundle)
        training, batch_size = assignment.training, model.bundle.manifest.batch_size
        rng = np.random.default_rng(np.random.SeedSequence((training.seed, examples.partition, assignment.round)))
        state = step.begin(model.parameters)
        settings = StepSettings(
            learning_rate=training.learning_rate, proximal_weight=training.proximal_weight, anchor=model.parameters
        )
        loss_sum, num_steps = 0.0, 0
        for _ in range(training.epochs):
            for batch in batches(examples.train, batch_size, rng):
                state, loss = step(state, batch, settings)
                if not np.isfinite(loss):
                    raise ValueError(
                        f"loss became {loss} after {num_steps + 1} steps, expected a finite one; "
                        f"lower the learning rate ({training.learning_rate:g})"
                    )
                loss_sum += loss * float(batch.mask.sum())
                num_steps += 1
        counts |= {
            m.EXAMPLES: len(examples.train),
            m.TRAIN_LOSS: loss_count(
                loss_sum / training.epochs, len(examples.train), model.bundle.manifest.num_classes
            ),
        }
        telemetry = m.Telemetry(
            runtime=self._runtime.name,
            train_s=time.monotonic() - started_s,
            num_steps=num_steps,
            bytes_downloaded=bytes_downloaded,
            fanin_version=__version__,
        )
        return TrainingOutcome(change=_change(state.parameters, model.parameters), counts=counts, telemetry=telemetry)

    def _examples(self, bundle: Bundle) -> MemoryStore:
        """Return the store's current examples as inputs of the Bundle's model."""
        now = snapshot(self._store)
        parts = {"training": now.train, "validation": now.validation}
        # Free the outdated parts before new ones are allocated.
        self._mapped = {name: self._mapped[name] for name in parts if self._is_mapped(bundle, name, parts[name])}
        if len(self._mapped) < len(parts):
            preprocess = open_preprocess(self._runtime, bundle)
            for name, part in parts.items():
                if name not in self._mapped:
                    self._mapped[name] = _mapped(name, bundle, part, preprocess)
        return MemoryStore(
            partition=now.partition,
            train=self._mapped["training"].of(now.train),
            validation=self._mapped["validation"].of(now.validation),
        )

    def _is_mapped(self, bundle: Bundle, name: str, source: Examples) -> bool:
        mapped = self._mapped.get(name)
        return mapped is not None and mapped.bundle_sha256 == bundle.sha256 and mapped.source() is source

    def _evaluate(self, model: OpenedModel, validation: Examples) -> dict[str, int]:
        measured = measure(
            self._runtime,
            model.bundle,
            model.parameters,
            batches_in_order(validation, model.bundle.manifest.batch_size),
        )
        return counts_of(measured, model.bundle.manifest.num_classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapped:
    """A part of the store, converted for the model of one Bundle.

    ``source`` is weak, so a part that the store has replaced is freed. ``examples`` is None if the part needs no
    conversion.
    """

    bundle_sha256: str
    source: weakref.ref[Examples]
    examples: Examples | None

    def of(self, source: Examples) -> Examples:
        """Return the examples of this source for the model."""
        return source if self.examples is None else self.examples


def _mapped(part: str, bundle: Bundle, examples: Examples, preprocess: Preprocess | None) -> _Mapped:
    try:
        x = model_inputs(bundle, examples.x, preprocess)
    except ValueError as exc:
        raise ValueError(f"{part} examples: {exc}") from exc
    return _Mapped(
        bundle_sha256=bundle.sha256,
        source=weakref.ref(examples),
        examples=None if x is examples.x else Examples(x=x, y=examples.y),
    )


def _change(after: Float32s, before: Float32s) -> Float32s:
    """Return the change of the parameters: computed in float64, rounded once to float32."""
    return (after.astype(np.float64) - before).astype(np.float32)

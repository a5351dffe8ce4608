"""Training on a device: local SGD on its own examples, and the validation of the int8 model.

The trainer runs FedAvg's ClientUpdate: some epochs over the local examples, in batches of the Bundle's size, in a new
random order each epoch. The seed is (seed, partition, round), so a repeated training after a crash is bit-identical.

The example store is read once at the start of each Round, so a Round uses one state of data that may grow. The Bundle's
``preprocess`` converts raw examples once for each Bundle and ``Examples`` object.

The graphs of the newest Bundle stay open between Rounds. An interruption waits for the current batch. It also waits for
``preprocess``, which converts all new examples at once.

Before it trains, a device evaluates the Version on its validation part, in float and in int8. It reports sums over
examples, never examples.

Reference:
    McMahan et al. 2017, arXiv 1602.05629, algorithm 1.
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fanin.clients.data.batching import batches, batches_in_order
from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import ExampleStore, MemoryStore, snapshot
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.base import PaddedBatch, Preprocess, Runtime, StepSettings
from fanin.edge.runtimes.evaluations import counts_of, loss_count
from fanin.edge.runtimes.graphs import CONTROL, control_ports
from fanin.edge.runtimes.measure import measure
from fanin.edge.runtimes.models import model_inputs
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput


class RuntimeTrainer:
    """A Trainer over a runtime and an example store."""

    def __init__(self, runtime: Runtime, store: ExampleStore) -> None:
        self._graphs = BundleGraphs(runtime)
        self._store = store
        self._mapped: dict[str, _Mapped] = {}

    @property
    def runtime(self) -> str:
        """The library and its version."""
        return self._graphs.name

    @property
    def graph_format(self) -> str:
        """The format of the runtime's graphs."""
        return self._graphs.graph_format

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Validate the Version, then run local SGD from it. See Trainer.

        Raises:
            Interrupted: ``should_continue`` raised it.
            ValueError: Training diverged, or the examples do not fit the model.
            InvalidInput: The store cannot be read.
        """
        examples = self._examples(model.bundle)
        counts = self._evaluate(model, examples.validation, should_continue)
        control = _control(model)
        step = self._graphs.open_train(model.bundle)
        training, batch_size = assignment.training, model.bundle.manifest.batch_size
        rng = np.random.default_rng(np.random.SeedSequence((training.seed, examples.partition, assignment.round)))
        state = step.begin(model.parameters)
        settings = StepSettings(
            learning_rate=training.learning_rate,
            proximal_weight=training.proximal_weight,
            anchor=model.parameters,
            control=control,
        )
        loss_sum, num_steps = 0.0, 0
        for _ in range(training.epochs):
            for batch in interruptible(batches(examples.train, batch_size, rng), should_continue):
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
        return Change(values=_difference(state.parameters, model.parameters), counts=counts, num_steps=num_steps)

    def _examples(self, bundle: Bundle) -> MemoryStore:
        """Return the store's current examples as inputs of the Bundle's model."""
        now = snapshot(self._store)
        parts = {"training": now.train, "validation": now.validation}
        # Free the outdated parts before new ones are allocated.
        self._mapped = {name: self._mapped[name] for name in parts if self._is_mapped(bundle, name, parts[name])}
        if len(self._mapped) < len(parts):
            preprocess = self._graphs.preprocess(bundle)
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

    def _evaluate(self, model: OpenedModel, validation: Examples, should_continue: ShouldContinue) -> dict[str, int]:
        in_order = batches_in_order(validation, model.bundle.manifest.batch_size)
        measured = measure(self._graphs, model.bundle, model.parameters, interruptible(in_order, should_continue))
        return counts_of(measured, model.bundle.manifest.num_classes)


def _control(model: OpenedModel) -> Float32s | None:
    """Return what the stages add to the gradient; None without such a stage. Raises InvalidInput."""
    if set(model.inputs) - {CONTROL}:
        raise InvalidInput(
            f"stages: got the inputs {sorted(model.inputs)} for the train graph, expected at most {CONTROL!r}; correct "
            "the stage"
        )
    manifest = model.bundle.manifest
    if model.inputs and not control_ports(manifest.table, manifest.signatures["train"].inputs):
        raise InvalidInput(
            f"stages: got the input {CONTROL!r}, but the bundle's train graph has no inputs {CONTROL}.<p>; export the "
            "App with Recipe(scaffold=True)"
        )
    return model.inputs.get(CONTROL)


def interruptible(batches: Iterable[PaddedBatch], should_continue: ShouldContinue) -> Iterator[PaddedBatch]:
    """Yield batches, and call ``should_continue`` before each."""
    for batch in batches:
        should_continue()
        yield batch


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


def _difference(after: Float32s, before: Float32s) -> Float32s:
    """Return the change of the parameters: computed in float64, rounded once to float32."""
    return (after.astype(np.float64) - before).astype(np.float32)

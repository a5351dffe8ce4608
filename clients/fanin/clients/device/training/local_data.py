"""The examples of one device: read once a Round, converted once for a Bundle, and measured before the training.

A Round uses one state of data that may grow. The Bundle's ``preprocess`` converts raw examples once for each Bundle and
``Examples`` object.

Before it trains, a device evaluates the Version on its validation part, in float and in int8. It reports sums over
examples, never examples. A device without a validation part does not evaluate. The ranges of the activations, if the
Assignment asks for them, are counts of training examples.
"""

import logging
import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import Examples, Y, calibration_part
from fanin.clients.data.stores import ExampleStore, MemoryStore, snapshot
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import UnfitExamples
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.codecs.statistics import range_counts_of
from fanin.edge.ranges import columns, initial_ranges
from fanin.edge.runtimes.base import PaddedBatch, Preprocess, VersionValues
from fanin.edge.runtimes.evaluations import (
    OF_GLOBAL,
    OF_PERSONAL,
    OF_VALIDATION,
    OF_VALIDATIONS,
    VERSION_LOSS,
    counts_of,
    metric_count,
)
from fanin.edge.runtimes.measure import measure, measure_data, measure_ranges
from fanin.edge.runtimes.models import check_targets, model_inputs
from fanin.edge.runtimes.quality import Quality
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import Diverged, InvalidBundle, InvalidInput

if TYPE_CHECKING:
    from fanin.edge.metrics.metric import Metric

LOG = logging.getLogger("fanin.clients")
RANGES_STREAM: Final = 0x72616E67
"""Separates the choice of the examples of ranges from the order of the training."""


class LocalData:
    """The examples of one device, the graphs for its evaluations, and its own metrics by name."""

    def __init__(
        self, graphs: BundleGraphs, store: ExampleStore, metrics: "Mapping[str, Metric]" = MappingProxyType({})
    ) -> None:
        self._graphs = graphs
        self.store = store
        self._metrics = metrics
        self._mapped: dict[str, _Mapped] = {}
        # The examples of the next training with a Bundle, by its digest.
        self._next: tuple[str, MemoryStore] | None = None
        self._logged = ""

    def row_sizes(self, bundle: Bundle) -> Collection[int]:
        """Return the lengths of the rows that ``examples`` returns next for a Bundle, also if the store changes before.

        Raises:
            UnfitExamples: A row is longer than the longest length.
            InvalidInput: The store cannot be read.
        """
        now, self._next = self._read(), None
        lengths = bundle.manifest.lengths
        assert lengths is not None, "a Bundle without lengths has no choice of graphs"
        sizes: set[int] = set()
        for name, part in now.parts.items():
            with self._fitting(now, f"{name} examples: "):
                sizes |= {*lengths.sizes_of({**part.inputs, Y: part.y}).tolist()}
        self._next = bundle.sha256, now
        return sizes

    def examples(self, bundle: Bundle) -> MemoryStore:
        """Return the store's current examples as inputs of the Bundle's model.

        Raises:
            UnfitExamples: The examples do not fit the model.
            InvalidInput: The store cannot be read.
        """
        # A training that did not take place may have left the examples of another Bundle.
        sha256, examples = self._next or ("", None)
        self._next = None
        now = self._read() if examples is None or sha256 != bundle.sha256 else examples
        with self._fitting(now):
            return self._fitted(bundle, now)

    def _read(self) -> MemoryStore:
        """Read the store. The traceback of an error is logged once, until the store can be read again."""
        try:
            now = snapshot(self.store)
        except InvalidInput as exc:
            if exc.__cause__ is not None and str(exc) != self._logged:
                LOG.error("%s", exc, exc_info=exc.__cause__)
            self._logged = str(exc)
            raise
        self._logged = ""
        return now

    @contextmanager
    def _fitting(self, now: MemoryStore, what: str = "") -> Iterator[None]:
        """Raise UnfitExamples for a ValueError about the store's current examples."""
        try:
            yield
        except ValueError as exc:
            seen = {name: weakref.ref(part) for name, part in now.parts.items()}
            raise UnfitExamples(f"{what}{exc}", partial(self._has_changed, seen)) from exc

    def _fitted(self, bundle: Bundle, now: MemoryStore) -> MemoryStore:
        parts = now.parts
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
            validation=None if now.validation is None else self._mapped["validation"].of(now.validation),
        )

    def evaluate(
        self, model: OpenedModel, validation: Examples | None, assignment: m.Assignment, should_continue: ShouldContinue
    ) -> dict[str, int]:
        """Return the counts of a Version on the validation part, with the metrics that the Assignment declares.

        Without a validation part there are no counts. Raises the errors of ``should_continue``.
        """
        if validation is None:
            return {}
        manifest = model.bundle.manifest
        names = [each.name for each in assignment.statistics if each.name.startswith(OF_VALIDATIONS)]

        def measured(values: Float32s, prefixes: tuple[str, ...]) -> tuple[Quality, dict[str, int]]:
            batches = batches_in_order(validation, manifest.batch_size, manifest.lengths)
            in_order = interruptible(batches, should_continue)
            version = VersionValues(parameters=values, ranges=model.ranges)
            wanted = [name for name in names if name.startswith(prefixes)]
            if not wanted:
                return measure(self._graphs, model.bundle, version, in_order), {}
            # Imported late: most Runs declare none.
            from fanin.edge.metrics.declared import DeclaredMetrics

            metrics = DeclaredMetrics(wanted, self._metrics)
            quality = measure(self._graphs, model.bundle, version, in_order, metrics)
            return quality, metrics.counts(quality, manifest)

        # The model that is trained is the global one under Ditto, and the device's own with personal parameters.
        trained, other = (OF_GLOBAL, OF_PERSONAL) if manifest.local is None else (OF_PERSONAL, OF_GLOBAL)
        quality, counts = measured(model.values(), (OF_VALIDATION, trained))
        if any(name.startswith(other) for name in names):
            values = model.own_values() if other == OF_PERSONAL else replace(model, local=None).values()
            counts |= measured(values, (other,))[1]
        return counts_of(quality, manifest.num_classes) | counts

    def before_training(
        self, model: OpenedModel, examples: MemoryStore, assignment: m.Assignment, should_continue: ShouldContinue
    ) -> dict[str, int]:
        """Return the counts of a Version: those of ``evaluate``, and its loss on the training examples if declared.

        Raises the errors of ``should_continue``.
        """
        counts = self.evaluate(model, examples.validation, assignment, should_continue)
        if VERSION_LOSS in {each.name for each in assignment.statistics}:
            manifest, train = model.bundle.manifest, examples.train
            in_order = interruptible(batches_in_order(train, manifest.batch_size, manifest.lengths), should_continue)
            evaluate, values = self._graphs.open_evaluate(model.bundle), model.values()
            loss = math.fsum(evaluate(values, batch).loss_sum for batch in in_order) / len(train)
            if not math.isfinite(loss):
                raise Diverged(
                    f"training: the loss of the version is {loss} on the training examples, expected a finite one; "
                    "lower the learning rate",
                    code="FN-0842",
                )
            counts[VERSION_LOSS] = metric_count(loss, len(train))
        return counts

    def ranges(
        self, model: OpenedModel, examples: MemoryStore, assignment: m.Assignment, should_continue: ShouldContinue
    ) -> m.RangeCounts:
        """Return the ranges of a Version on some training examples; none if nobody asks, or without activations."""
        manifest, train = model.bundle.manifest, examples.train
        measured = columns(manifest.activations, self._graphs.graph_format)
        if not assignment.range_examples or not measured.size:
            return m.RangeCounts()
        seed = (assignment.training.seed, examples.partition, assignment.round, RANGES_STREAM)
        order = np.random.default_rng(np.random.SeedSequence(seed)).permutation(len(train))
        some = train.take(order[: assignment.range_examples])
        in_order = interruptible(batches_in_order(some, manifest.batch_size, manifest.lengths), should_continue)
        try:
            return range_counts_of(measure_ranges(self._graphs, model.bundle, model.values(), in_order), measured)
        except InvalidBundle as exc:
            # A runtime of another package may lack what this graph needs. The training needs no ranges.
            LOG.warning("%s; this device reports no ranges", exc)
            return m.RangeCounts()

    def own_ranges(self, model: OpenedModel, should_continue: ShouldContinue) -> Float32s | None:
        """Return the ranges of a model's activations on the training examples (2 * activations,).

        They are for a model of this device alone: all values count, where those of a Version leave out rare ones. An
        activation of another format keeps its range. Without activations of this format, the ranges are the model's.

        Raises the errors of ``should_continue``.
        """
        manifest = model.bundle.manifest
        if not columns(manifest.activations, self._graphs.graph_format).size:
            return model.ranges
        some = calibration_part(self.examples(model.bundle).train)
        in_order = interruptible(batches_in_order(some, manifest.batch_size, manifest.lengths), should_continue)
        try:
            measured = measure_data(self._graphs, model.bundle, model.values(), in_order).ravel()
        except InvalidBundle as exc:
            LOG.warning("%s; the ranges of the version are used", exc)
            return model.ranges
        before = initial_ranges(manifest.activations) if model.ranges is None else model.ranges
        return np.where(np.isnan(measured), before, measured).astype(np.float32)

    def _has_changed(self, seen: Mapping[str, weakref.ref[Examples]]) -> bool:
        """Return whether the store has other parts than these."""
        try:
            parts = snapshot(self.store).parts
        except InvalidInput:
            return True  # the next training reports it
        return parts.keys() != seen.keys() or any(seen[name]() is not part for name, part in parts.items())

    def _is_mapped(self, bundle: Bundle, name: str, source: Examples) -> bool:
        mapped = self._mapped.get(name)
        return mapped is not None and mapped.bundle_sha256 == bundle.sha256 and mapped.source() is source


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
        inputs = model_inputs(bundle, examples.inputs, preprocess)
        check_targets(bundle.manifest, examples.y)
    except ValueError as exc:
        raise ValueError(f"{part} examples: {exc}") from exc
    return _Mapped(
        bundle_sha256=bundle.sha256,
        source=weakref.ref(examples),
        examples=None if inputs is examples.inputs else Examples(inputs=inputs, y=examples.y),
    )

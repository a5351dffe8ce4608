"""The evaluation of a simulation's Versions on the test data, as a coordinator evaluates them on held-out data."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import Examples, calibration_part
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.metrics.metric import Metric, metrics_of
from fanin.edge.runtimes.base import VersionValues
from fanin.edge.runtimes.measure import measure_data
from fanin.edge.runtimes.models import model_inputs
from fanin.protos.messages import BundleRef, Version
from fanin.protos.plans import Plan
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.evaluation.metrics import VersionMetrics, evaluate_version, score_of, unknown_values
from fanin.server.rounds.targets import target_text
from fanin.server.runs.data import NoData
from fanin.server.storage.protocols.files import BlobReader
from fanin.server.storage.records import MeasuredRanges
from fanin.simulation.studies.tests import joined_values
from fanin.simulation.workers import SharedGraphs


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedVersions:
    """The evaluation of Versions on the test data, with the Plan's settings.

    Attributes:
        bundle: The Bundle.
        graphs: The open graphs.
        tests: The test sets by name, as inputs of the model. None evaluates nothing.
        plan: The Plan.
        own: Metrics of the settings by name.
    """

    bundle: Bundle
    graphs: SharedGraphs
    tests: Mapping[str, Examples]
    plan: Plan
    own: Mapping[str, Metric]

    @property
    def test(self) -> Examples | None:
        """The first test set; None without one."""
        return next(iter(self.tests.values()), None)

    def quality(self, number: int, version: VersionValues) -> VersionMetrics:
        """Return the metrics of a Version; NaN without test data, or if the Version is not due."""
        if not self.tests or number % self.plan.evaluation.every:
            return unknown_values(self.metrics)
        manifest, sets = self.bundle.manifest, {}
        for name, examples in self.tests.items():
            batches = batches_in_order(examples, manifest.batch_size, manifest.lengths)
            sets[name] = evaluate_version(self.graphs, self.bundle, version, batches, self.metrics)
        return joined_values(sets)

    def score(self, metrics: VersionMetrics) -> float:
        """Return the number that ranks Versions. Raises InvalidPlan if the Plan names no metric of the model."""
        if not metrics.num_examples:
            return math.nan
        return score_of(self.plan.evaluation.best, metrics.values, self.metrics)

    def reached(self, number: int, values: Mapping[str, float]) -> str:
        """Return the text of a Version that has reached the Plan's target; empty if it has not."""
        return target_text(self.plan, number, values, self.metrics)

    @property
    def metrics(self) -> dict[str, Metric]:
        """The further metrics of the Plan and of the settings, by name."""
        installed = metrics_of(each.name for each in self.plan.evaluation.metrics if each.name not in self.own)
        return installed | dict(self.own)


class TestedRanges(NoData):
    """The test data as the data set on which the coordinator measures ranges. See ``DataSource``."""

    def __init__(self, tested: TestedVersions, blobs: BlobReader) -> None:
        self._tested, self._blobs = tested, blobs

    @property
    def names(self) -> Collection[str]:
        """The name of the Plan, because a simulation has one data set."""
        return (self._tested.plan.evaluation.data,)

    async def measure(self, plan: Plan, bundle: BundleRef, version: Version) -> MeasuredRanges:
        """See ``DataSource.measure``."""
        tested, manifest = self._tested, self._tested.bundle.manifest
        assert tested.test is not None, "a Plan with a data set needs test data"
        some = calibration_part(tested.test)
        parameters = tested.bundle.completed(load_parameters(self._blobs, version, manifest.table))
        batches = batches_in_order(some, manifest.batch_size, manifest.lengths)
        ranges = measure_data(tested.graphs, tested.bundle, parameters, batches)
        return MeasuredRanges(
            data=plan.evaluation.data,
            num_examples=len(some),
            runtime=tested.graphs.name,
            values=ranges.astype("<f4").tobytes(),
        )


def model_examples(examples: Examples, bundle: Bundle, graphs: SharedGraphs) -> Examples:
    """Return examples as inputs of the model. ``preprocess`` converts raw ones."""
    return Examples(inputs=model_inputs(bundle, examples.inputs, graphs.preprocess(bundle)), y=examples.y)

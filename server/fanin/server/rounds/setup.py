"""The setup of a Run: the parts that never change while it is driven."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.codecs.fixed import RunCodec
from fanin.edge.codecs.stage import Stage
from fanin.edge.codecs.statistics import labels_of
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.ranges import Activation
from fanin.edge.rings import RingVector
from fanin.edge.tensors import TensorTable
from fanin.protos.messages import BundleRef, Delegation, StartRun, Statistic, Version
from fanin.protos.plans import DEVICES, Plan
from fanin.server.aggregation.auxiliary import refreshed
from fanin.server.aggregation.outer import OuterOptimizer
from fanin.server.aggregation.rules import ColumnRule, Rule, StrategyRunner
from fanin.server.aggregation.statistics import statistics_of
from fanin.server.privacy.noising import CentralNoise, SharedNoise, noise_of
from fanin.server.protocols.machine import RoundProtocol
from fanin.server.selection.coins import Coins
from fanin.server.selection.policies import SelectionPolicy
from fanin.server.storage.records import MeasuredRanges

Measure = Callable[[Version], Awaitable[MeasuredRanges]]
"""Measures the ranges of the activations of a Version. It raises no error."""


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """The constants of a Run: its start command, verified Bundle, the parts that its Plan names, and its key.

    Attributes:
        start: The command that started the Run.
        delegation: The publisher's permission for ``run_key``.
        bundle: The verified Bundle.
        manifest: The manifest of the Bundle.
        codec: The codec of the Plan.
        rule: The rule of the Plan.
        optimizer: The outer optimizer of the Plan, or the outer step of its strategy.
        strategy: Runs the Flower strategy of the Plan, which replaces the rule; None without one.
        policy: The selection policy of the Plan.
        protocol: The protocol of the Rounds.
        stages: The stages of the Plan by name, in their order.
        layout: The layout of the Updates' vectors.
        measure: Measures ranges on the data set of the Plan; None if the Plan does not ask for it.
        coins: Which devices take part in a Round; None if all that are available may.
        draw_seed: Returns a new seed of the noise of a Round, by its number.
        run_key: The key that signs the Versions.
    """

    start: StartRun
    delegation: Delegation
    bundle: BundleRef
    manifest: Manifest
    codec: RunCodec
    rule: Rule | ColumnRule
    optimizer: OuterOptimizer
    strategy: StrategyRunner | None
    policy: SelectionPolicy
    protocol: RoundProtocol
    stages: Mapping[str, Stage]
    layout: VectorLayout
    measure: Measure | None
    coins: Coins | None
    draw_seed: Callable[[int], bytes]
    run_key: SigningKey

    @property
    def plan(self) -> Plan:
        """The Run's Plan."""
        return self.start.plan

    @property
    def table(self) -> TensorTable:
        """The layout of the parameters."""
        return self.manifest.table

    @cached_property
    def num_labels(self) -> int:
        """Largest number of labels of one example: one, or one for each position of a sequence; 0 for values."""
        return labels_of(self.manifest)

    @cached_property
    def noise(self) -> CentralNoise | SharedNoise | None:
        """The noise of the first Round; None without differential privacy. ``clipping.noise_in`` is that of a Round."""
        return noise_of(self.plan, self.layout.total_table.num_values, self.protocol.num_honest)

    @cached_property
    def statistics(self) -> tuple[Statistic, ...]:
        """The statistics of the Run, with their bounds."""
        return statistics_of(self.plan, self.num_labels, self.layout.total_table.num_values)

    @cached_property
    def vector(self) -> RingVector | None:
        """The layout of an Update with a tail: masked, or with a clip bit; None for values alone."""
        if isinstance(self.noise, CentralNoise):
            return self.noise.payload
        return self.protocol.vector(self.layout.total_table.num_values, len(self.statistics))

    @cached_property
    def activations(self) -> tuple[Activation, ...]:
        """The activations whose ranges the Rounds refresh."""
        return refreshed(self.plan, self.manifest)

    @cached_property
    def counted(self) -> tuple[Activation, ...]:
        """The activations whose ranges devices count."""
        return self.activations if self.plan.int8.ranges == DEVICES else ()

    @cached_property
    def chunks(self) -> frozenset[str]:
        """The digests of all Chunks of the Bundle."""
        artifacts = (self.bundle.manifest, *self.manifest.artifacts.values())
        return frozenset(ref.sha256 for artifact in artifacts for ref in artifact.chunks)

    @cached_property
    def graph_formats(self) -> tuple[str, ...]:
        """The graph formats in which the Bundle has every graph that a device needs."""
        return self.manifest.graph_formats

    def download_bytes(self, graph_formats: Collection[str]) -> int:
        """Return the size of a device's first download: graphs in its formats, parameters and auxiliary tensors."""
        files, manifest = self._files, self.manifest
        names = {manifest.initial}.union(
            *(files[name] if name in files else manifest.files(name) for name in graph_formats)
        )
        return sum(self.manifest.artifacts[name].size_bytes for name in names) + self._auxiliary_bytes

    @cached_property
    def _files(self) -> Mapping[str, frozenset[str]]:
        """The artifacts of a device by its graph format."""
        return {name: self.manifest.files(name) for name in self.graph_formats}

    @cached_property
    def _auxiliary_bytes(self) -> int:
        table = self.layout.auxiliary
        return (len(self.layout.groups) - 1) * (len(table.header()) + 4 * table.num_values) + 8 * len(self.activations)

"""The setup of a Run: the parts that never change while it exists."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.codecs.statistics import declared, labels_of
from fanin.edge.tensors import TensorTable
from fanin.protos.control import StartRun
from fanin.protos.messages import BundleRef, Statistic
from fanin.protos.plans import Plan
from fanin.server.aggregation.outer import OuterOptimizer
from fanin.server.aggregation.rules import ColumnRule, Rule
from fanin.server.selection.policies import SelectionPolicy


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """The constants of a Run: its start command, verified Bundle, rule, optimizer and policy, and its Versions' key."""

    start: StartRun
    bundle: BundleRef
    manifest: Manifest
    rule: Rule | ColumnRule
    optimizer: OuterOptimizer
    policy: SelectionPolicy
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
    def statistics(self) -> tuple[Statistic, ...]:
        """The statistics of the Run, with their bounds."""
        return declared(
            self.plan.statistics,
            max_examples=self.plan.aggregation.max_examples,
            num_labels=self.num_labels,
            num_values=self.table.num_values,
        )

    @cached_property
    def chunks(self) -> frozenset[str]:
        """The digests of all Chunks of the Bundle."""
        artifacts = (self.bundle.manifest, *self.manifest.artifacts.values())
        return frozenset(ref.sha256 for artifact in artifacts for ref in artifact.chunks)

    @cached_property
    def graph_formats(self) -> tuple[str, ...]:
        """The graph formats in which the Bundle has every graph that a device needs."""
        formats = [set(signature.graphs) for signature in self.manifest.signatures.values()]
        return tuple(sorted(set.intersection(*formats)))

    def download_bytes(self, graph_formats: Collection[str]) -> int:
        """Return the size of a device's first download: the graphs in its formats, and the parameters of a Version."""
        signatures = self.manifest.signatures.values()
        names = {signature.graphs[one] for signature in signatures for one in graph_formats if one in signature.graphs}
        return sum(self.manifest.artifacts[name].size_bytes for name in {*names, self.manifest.initial})

"""The record of a Run, opened for verification."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

from fanin.edge.bundles.arrays import table_in
from fanin.edge.bundles.bundle import Bundle, SignedManifest
from fanin.edge.codecs.codec import codec_of
from fanin.edge.codecs.fixed import RunCodec
from fanin.edge.codecs.stage import Stage
from fanin.edge.codecs.stages import layout_of, stages_of
from fanin.edge.codecs.statistics import labels_of
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.ranges import Activation
from fanin.edge.tensors import TensorTable
from fanin.protos.errors import Corrupted, NotFound
from fanin.protos.messages import BundleRef, Statistic, Version, VersionPublished
from fanin.protos.plans import Plan
from fanin.server.aggregation.auxiliary import (
    refreshed,
)
from fanin.server.aggregation.checked import optimizer_of, rule_of
from fanin.server.aggregation.outer import OuterOptimizer
from fanin.server.aggregation.rules import (
    ColumnRule,
    Rule,
    StrategyRunner,
    StrategySource,
)
from fanin.server.aggregation.statistics import statistics_of
from fanin.server.privacy.noising import CentralNoise, SharedNoise, noise_of, recorded_clipping, with_noise
from fanin.server.protocols.known import protocol_of
from fanin.server.protocols.machine import RoundProtocol
from fanin.server.storage.origins import recorded_state
from fanin.server.storage.protocols.archive import MessageArchive, RoundArchive, RunArchive
from fanin.server.storage.protocols.files import BlobReader, Payloads
from fanin.server.storage.records import RoundRecord


class Archive(Protocol):
    """The durable state of a coordinator, as far as verification reads it."""

    @property
    def runs(self) -> RunArchive:
        """Runs, Versions and events."""
        ...

    @property
    def rounds(self) -> RoundArchive:
        """Rounds and committed Updates."""
        ...

    @property
    def messages(self) -> MessageArchive:
        """The messages of the phases of Rounds."""
        ...

    @property
    def blobs(self) -> BlobReader:
        """Chunks of Bundles and Versions."""
        ...

    @property
    def spool(self) -> Payloads:
        """Payloads of committed Updates."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """The record of a Run, with the parts that its Plan names."""

    run_id: str
    publisher: str
    bundle_ref: BundleRef
    bundle_sha256: str
    archive: Archive
    plan: Plan
    codec: RunCodec
    rule: Rule | ColumnRule
    optimizer: OuterOptimizer
    protocol: RoundProtocol
    stages: Mapping[str, Stage]
    layout: VectorLayout
    activations: Sequence[Activation]
    statistics: Sequence[Statistic]
    round: Callable[[int], RoundRecord | None]
    strategy: StrategyRunner | None
    published: Mapping[int, VersionPublished]

    @property
    def noise(self) -> CentralNoise | SharedNoise | None:
        """The noise of the first Round; None without differential privacy."""
        return noise_of(self.plan, self.layout.total_table.num_values, self.protocol.num_honest)

    def noise_on(self, base: Version) -> CentralNoise | SharedNoise | None:
        """Return the noise of a Round on a Version; None without differential privacy. Raises NotFound, Corrupted."""
        noise, archive = self.noise, self.archive
        if not isinstance(noise, CentralNoise) or not noise.bits_noise:
            return noise
        state = recorded_state(base, archive.runs, archive.rounds)
        recorded = recorded_clipping(state, archive.blobs.read_artifact)
        return noise if recorded is None else noise.at(recorded[1])

    @property
    def table(self) -> TensorTable:
        """The layout of the parameters."""
        return self.layout.table


def open_history(archive: Archive, run_id: str, strategies: StrategySource | None) -> RunHistory:
    """Return the record of a Run. Raises as ``verify_run`` does."""
    run = archive.runs.run(run_id)
    if run is None:
        raise NotFound(f"run {run_id}: not in this coordinator's folder", code="FN-0610")
    bundle_ref = archive.runs.bundle(run.start.version.bundle_sha256)
    if bundle_ref is None:
        raise Corrupted(
            f"run {run_id}: its bundle is missing in fanin.db; restore a backup of the folder", code="FN-0525"
        )
    data = archive.blobs.read_artifact("manifest", bundle_ref.manifest)
    signed = SignedManifest(data=data, public_key=bundle_ref.public_key, signature=bundle_ref.signature)
    bundle = Bundle.open(signed, trusted=(bundle_ref.public_key,), read=archive.blobs.read)
    plan = run.start.plan
    stages, flower = stages_of(plan.stages), plan.flower
    layout = layout_of(table_in(bundle.manifest, flower), stages)
    runs_strategy = bool(flower.strategy) and flower.strategy_is_pure
    return RunHistory(
        run_id=run_id,
        publisher=signed.public_key,
        bundle_ref=bundle_ref,
        bundle_sha256=bundle.sha256,
        archive=archive,
        plan=plan,
        codec=codec_of(plan.codec),
        rule=rule_of(plan),
        optimizer=optimizer_of(plan),
        protocol=with_noise(protocol_of(plan), plan, layout.total_table.num_values),
        strategy=strategies.runner(run_id, plan) if strategies is not None and runs_strategy else None,
        stages=stages,
        layout=layout,
        activations=refreshed(plan, bundle.manifest),
        statistics=statistics_of(plan, labels_of(bundle.manifest), layout.total_table.num_values),
        # Each Round is read once and on demand, so that a damaged one does not hide the others.
        round=cache(partial(archive.rounds.round, run_id)),
        published={
            entry.event.number: entry.event
            for entry in archive.runs.events(run_id)
            if isinstance(entry.event, VersionPublished)
        },
    )

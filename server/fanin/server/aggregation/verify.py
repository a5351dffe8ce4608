"""Verification of a Run: recompute every Version from its parent and its closed set of Updates.

For each published Round, the parent's parameters, the committed payloads, their headers and the grid are read from the
coordinator's folder. The fold and the outer step are repeated. The digests of parameters, auxiliary tensors and outer
state must be the recorded ones. No coordinator needs to run. A database of an older form is refused and never changed.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from typing import Protocol

from fanin.edge.bundles.arrays import table_in
from fanin.edge.bundles.bundle import Bundle, SignedManifest
from fanin.edge.bundles.versions import check_version
from fanin.edge.codecs.codec import codec_of
from fanin.edge.codecs.fixed import RunCodec
from fanin.edge.codecs.stage import Stage
from fanin.edge.codecs.stages import layout_of, stages_of
from fanin.edge.codecs.trained import TrainedPart
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.ranges import RANGES, Activation
from fanin.edge.tensors import Float32s, TensorTable, sha256_hex
from fanin.protos.errors import Corrupted, FaninError, NotFound
from fanin.protos.messages import TRAINED, UNSEEN, UpdateHeader, Version, VersionPublished
from fanin.protos.plans import Plan
from fanin.protos.texts import counted
from fanin.server.aggregation.auxiliary import (
    NOT_MEASURED,
    AuxiliaryStep,
    MeasureAgain,
    RangeRefresh,
    measured_again,
    refreshed,
)
from fanin.server.aggregation.checked import optimizer_of, rule_of
from fanin.server.aggregation.fold import Contribution
from fanin.server.aggregation.folding import OuterStep, SpooledUpdates, StateSlices, lag_of
from fanin.server.aggregation.outer import OuterOptimizer
from fanin.server.aggregation.parameters import (
    encode_parameters,
    encode_state,
    first_grid_from,
    load_parameters,
    parameter_pieces,
    state_slices,
    strategy_state,
)
from fanin.server.aggregation.rules import (
    STRATEGY_STATE,
    ColumnRule,
    Reply,
    Rule,
    StrategyResult,
    StrategyRule,
    StrategyRunner,
    StrategySource,
    StrategyTask,
)
from fanin.server.aggregation.sets import Aggregate, SetFold
from fanin.server.aggregation.weights import examples_of, scale_of
from fanin.server.selection.coverage import coverage_problem
from fanin.server.storage.origins import recorded_grid, recorded_state
from fanin.server.storage.protocols.archive import RoundArchive, RunArchive
from fanin.server.storage.protocols.files import BlobReader, Payloads
from fanin.server.storage.protocols.retention import Removed
from fanin.server.storage.records import RoundMark, RoundRecord


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
    def blobs(self) -> BlobReader:
        """Chunks of Bundles and Versions."""
        ...

    @property
    def spool(self) -> Payloads:
        """Payloads of committed Updates."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of verifying one Version.

    Attributes:
        version: The Version's number.
        round: The Round that published it, 0 for a Version from outside.
        version_sha256: The signed digest of the parameters; empty if the record of the Version is damaged.
        num_updates: Updates in the Round's set.
        problem: Why verification failed, empty if it passed.
        not_reproducible: Why the parameters cannot be recomputed; empty if they were. The Round's record, Updates,
            grid, statistics and counters are verified in any case.
        digest_only: What retention removed, so that only the record was verified: the signature of the Version, the
            set of its Round and the digests of the Updates. Empty if nothing was removed.
        ranges: How the ranges were verified that the coordinator measured on a data set; empty for others.
        has_recomputed_ranges: Whether they were measured again.
    """

    version: int
    round: int
    version_sha256: str
    num_updates: int
    problem: str
    not_reproducible: str = ""
    digest_only: str = ""
    ranges: str = ""
    has_recomputed_ranges: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _History:
    archive: Archive
    plan: Plan
    codec: RunCodec
    rule: Rule | ColumnRule
    optimizer: OuterOptimizer
    stages: Mapping[str, Stage]
    layout: VectorLayout
    activations: Sequence[Activation]
    round: Callable[[int], RoundRecord | None]
    strategy: StrategyRunner | None
    published: Mapping[int, VersionPublished]

    @property
    def table(self) -> TensorTable:
        """The layout of the parameters."""
        return self.layout.table


def verify_run(
    archive: Archive, run_id: str, strategies: StrategySource | None = None, measure: MeasureAgain | None = None
) -> Iterator[Verdict]:
    """Yield a Verdict for each Version of a Run, oldest first.

    Args:
        archive: The record.
        run_id: The Run.
        strategies: Runs a Flower strategy that the Plan declares pure. None runs none.
        measure: Measures ranges on a data set a second time. None measures none.

    Raises:
        NotFound: There is no such Run.
        Corrupted: The Run's Bundle is missing or damaged.
        InvalidPlan: The Run's rule, optimizer, codec or a stage is not installed here, or its strategy may not run
            here.
    """
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
    runs_strategy = bool(flower.strategy) and flower.strategy_is_pure
    history = _History(
        archive=archive,
        plan=plan,
        codec=codec_of(plan.codec),
        rule=rule_of(plan),
        optimizer=optimizer_of(plan),
        strategy=strategies.runner(run_id, plan) if strategies is not None and runs_strategy else None,
        stages=stages,
        layout=layout_of(table_in(bundle.manifest, flower), stages),
        activations=refreshed(plan, bundle.manifest),
        # Each Round is read once and on demand, so that a damaged one does not hide the others.
        round=cache(partial(archive.rounds.round, run_id)),
        published={
            entry.event.number: entry.event
            for entry in archive.runs.events(run_id)
            if isinstance(entry.event, VersionPublished)
        },
    )
    lineage_start, seen, removed = 0, UNSEEN, archive.runs.removed(run_id)
    for number, round_number in sorted(archive.runs.round_by_version(run_id).items()):
        lineage_start = lineage_start if round_number else number
        version_sha256, record, ranges = "", None, NOT_MEASURED
        digest_only = _removed_text(removed, number, round_number)
        try:
            # A damaged record is the problem of its Version alone.
            record = history.round(round_number)
            version = archive.runs.version(run_id, number)
            assert version is not None, "it is in the same table"
            version_sha256 = version.sha256
            # Numbers are in order here, so an earlier epoch after a later one is a Version of a revoked key.
            check_version(version, run_id=run_id, bundle_sha256=bundle.sha256, publisher=signed.public_key, seen=seen)
            seen = version.order
            if round_number in removed.rounds:
                problem = _record_problem(history, version, record)
            elif digest_only and not round_number:
                problem = ""
            elif round_number:
                problem = _check_round(history, version, record, lineage_start)
                if not problem and record is not None and record.measured is not None:
                    ranges = measured_again(record.measured, measure, bundle_ref, version)
                    problem = ranges.problem
            else:
                problem = _check_outside(history, version)
        except FaninError as exc:
            problem = str(exc)
        yield Verdict(
            version=number,
            round=round_number,
            version_sha256=version_sha256,
            num_updates=0 if record is None else len(record.accepted),
            problem=problem,
            not_reproducible=_reason(history) if round_number and not digest_only else "",
            digest_only=digest_only,
            ranges=ranges.text,
            has_recomputed_ranges=ranges.is_recomputed,
        )


def _reason(history: _History) -> str:
    """Return why the parameters of a Round cannot be recomputed, or an empty string."""
    flower = history.plan.flower
    if not flower.strategy or history.strategy is not None:
        return ""
    if flower.strategy_is_pure:
        return f"the strategy {flower.strategy} is not run here"
    return f"the strategy {flower.strategy} made the parameters, and the plan does not declare it pure"


def _removed_text(removed: Removed, number: int, round_number: int) -> str:
    """Return what retention removed of a Version and when, so that it is not recomputed; empty if it is."""
    removed_at_s = removed.rounds.get(round_number) if round_number else removed.versions.get(number)
    if removed_at_s is None:
        return ""
    what = "the updates of its round" if round_number else "its parameters"
    return f"retention removed {what} on {datetime.fromtimestamp(removed_at_s, UTC):%Y-%m-%d}"


def _check_outside(history: _History, version: Version) -> str:
    """Check a Version from outside. Only an adopted one can be compared: it has the parameters of its source.

    The coordinator also adopts the ranges. A publisher that reclaims a Run signs the parameters alone.
    """
    runs = history.archive.runs
    history.table.check_values(load_parameters(history.archive.blobs, version, history.table))
    adopted = runs.adopted(version.run_id, version.number)
    source = None if adopted is None else runs.version(*adopted)
    ranges = {} if source is None else {name: each for name, each in source.auxiliary.items() if name == RANGES}
    if strange := [name for name, each in version.auxiliary.items() if ranges.get(name) != each]:
        return f"has the auxiliary tensors {strange}, which it adopted from no version"
    if adopted is not None and (source is None or source.sha256 != version.sha256):
        return f"adopted from version {adopted[1]} of run {adopted[0]}, which has other parameters"
    return ""


def _record_problem(history: _History, version: Version, record: RoundRecord | None) -> str:
    """Return what is wrong with the record of a Round, apart from its bytes, or an empty string."""
    cohort = history.plan.cohort
    if record is None or record.mark is not RoundMark.PUBLISHED or record.base_version != version.parent:
        return "the record of the round that made it is missing, or is another's"
    if not cohort.quorum <= len(record.accepted) <= cohort.buffer:
        updates = counted(len(record.accepted), "update")
        return f"round {record.round}: {updates}, expected {cohort.quorum} to {cohort.buffer}"
    known = {update.device_id for update in history.archive.rounds.updates(record.run_id, record.round)}
    if missing := sorted(set(record.accepted) - known):
        return f"round {record.round}: no record of {missing}"
    return ""


def _check_round(history: _History, version: Version, record: RoundRecord | None, lineage_start: int) -> str:
    if problem := _record_problem(history, version, record):
        return problem
    assert record is not None, "its record has no problem"
    aggregate, base = _aggregate(history, record, version, lineage_start)
    step = OuterStep(aggregate, history.layout, record.grid, history.codec, history.optimizer)
    if record.grid != _grid(history, base):
        return f"round {record.round}: its grid is not the grid of version {base.number}"
    archive, table = history.archive, history.table
    recorded = recorded_state(base, archive.runs, archive.rounds)
    state = {name: artifact for name, artifact in recorded.items() if name != STRATEGY_STATE}

    def inputs() -> tuple[Iterator[Float32s], StateSlices]:
        return parameter_pieces(archive.blobs, base, table), state_slices(archive.blobs, state)

    earlier = {}
    for staleness in aggregate.stale_shares:
        number = base.number - staleness
        origin = archive.runs.version(record.run_id, number)
        assert origin is not None, "an update of the set was trained from it"
        earlier[staleness] = parameter_pieces(archive.blobs, origin, table)
    digest = _digest(encode_parameters(table, step.parameters(*inputs(), earlier)))
    if digest != version.sha256:
        return f"round {record.round}: recomputed {digest}, signed {version.sha256}"
    if step.result().next_grid != record.next_grid:
        return f"round {record.round}: recomputed another grid for the next round"
    problem = _auxiliary_problem(history, aggregate, version, base, record) or coverage_problem(
        history.plan.participants,
        record.accepted,
        history.published.get(version.number),
        step.result().counts.get(TRAINED, 0),
    )
    if problem:
        return f"round {record.round}: {problem}"
    after = archive.rounds.outer_state(record.run_id, record.round)
    tensors = [*history.optimizer.tensors, *([STRATEGY_STATE] if history.plan.flower.strategy else [])]
    if sorted(after) != sorted(tensors):
        return f"round {record.round}: recorded the outer state {sorted(after)}, not {sorted(tensors)}"
    result = None if history.strategy is None else aggregate.strategy
    if result is not None and sha256_hex(result.state) != after[STRATEGY_STATE].sha256:
        return f"round {record.round}: recomputed another state of the strategy"
    for name in history.optimizer.tensors:
        if _digest(encode_state(step.state(name, *inputs()))) != after[name].sha256:
            return f"round {record.round}: recomputed another {name} of the outer optimizer"
    return ""


def _auxiliary_problem(
    history: _History, aggregate: Aggregate, version: Version, base: Version, record: RoundRecord
) -> str:
    """Return which auxiliary tensor of a Version is not the recomputed one, or an empty string."""
    blobs = history.archive.blobs
    refresh = RangeRefresh(activations=history.activations, measured=record.measured)
    step = AuxiliaryStep(aggregate, history.layout, history.stages, len(record.accepted), refresh)
    if list(version.auxiliary) != list(step.tensors):
        return f"signed the auxiliary tensors {list(version.auxiliary)}, not {list(step.tensors)}"
    for name, artifact in version.auxiliary.items():
        if _digest(step.encoded(name, blobs, base)) != artifact.sha256:
            return f"recomputed another auxiliary tensor {name}"
    return ""


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for data in pieces:
        digest.update(data)
    return digest.hexdigest()


def _grid(history: _History, base: Version) -> tuple[int, ...]:
    """Return the grid of a Round on this Version."""
    archive = history.archive
    grid = recorded_grid(base, archive.runs, archive.rounds)
    return first_grid_from(base, history.layout, history.codec, archive.blobs) if grid is None else grid


def _aggregate(
    history: _History, record: RoundRecord, version: Version, lineage_start: int
) -> tuple[Aggregate, Version]:
    """Fold the recorded set of a Round again. Raises Corrupted if a part of the record is missing."""
    archive, layout = history.archive, history.layout
    updates = SpooledUpdates(plan=history.plan, codec=history.codec.codec, layout=layout, spool=archive.spool)
    headers = {update.device_id: update.header for update in archive.rounds.updates(record.run_id, record.round)}
    base = archive.runs.version(record.run_id, record.base_version)
    if base is None:
        raise Corrupted(f"round {record.round}: no record of version {record.base_version}", code="FN-0530")

    def contribution(device: str, scale: int) -> Contribution:
        header = headers[device]
        lag = lag_of(_round_of(history, record, header, lineage_start), record, scale)
        return updates.contribution(header, device, lag)

    set_fold = SetFold(_rule(history, record, version, base), layout.total_table, record.grid, contribution)
    set_fold.weigh(
        scale_of(
            [examples_of(headers[device], history.plan) for device in record.accepted], history.plan.max_total_examples
        )
    )
    return set_fold.complete(record.accepted), base


class _Published:
    """A StrategyRunner that returns the published parameters: those of a strategy that cannot be repeated."""

    def __init__(self, history: _History, version: Version) -> None:
        self._history, self._version = history, version

    def run(self, task: StrategyTask, replies: Iterable[Reply]) -> StrategyResult:
        """See ``StrategyRunner.run``."""
        history = self._history
        values = load_parameters(history.archive.blobs, self._version, history.table)
        return StrategyResult(parameters=TrainedPart(history.table).split(values, 0)[0], state=b"")


def _rule(history: _History, record: RoundRecord, version: Version, base: Version) -> Rule | ColumnRule | StrategyRule:
    """Return the rule that recomputes a Round."""
    if not history.plan.flower.strategy:
        return history.rule
    archive = history.archive
    return StrategyRule(
        runner=history.strategy or _Published(history, version),
        plan=history.plan,
        round=record.round,
        table=history.layout.total_table,
        base=lambda: parameter_pieces(archive.blobs, base, history.table),
        is_first=base.number == 0,
        state=lambda: strategy_state(archive.blobs, recorded_state(base, archive.runs, archive.rounds)),
    )


def _round_of(history: _History, record: RoundRecord, header: UpdateHeader, lineage_start: int) -> RoundRecord:
    """Return the Round of an Update's Assignment. Raises Corrupted unless the Update may count in ``record``."""
    origin = history.round(header.round)
    oldest = max(record.base_version - history.plan.aggregation.max_staleness, lineage_start)
    base = None if origin is None else history.archive.runs.version(record.run_id, origin.base_version)
    if origin is None or base is None or base.sha256 != header.version_sha256:
        raise Corrupted(
            f"round {record.round}: an update names round {header.round}, which is unknown or has another base version",
            code="FN-0530",
        )
    if origin.round > record.round or origin.base_version < oldest:
        raise Corrupted(
            f"round {record.round}: an update of round {header.round} is too old to count in it", code="FN-0530"
        )
    return origin

"""The verification of one Version: its record, and its parameters recomputed."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from fanin.edge.basis import basis_of
from fanin.edge.codecs.trained import TrainedPart
from fanin.edge.ranges import RANGES
from fanin.edge.tensors import Float32s, Float64s, sha256_hex
from fanin.protos.errors import Corrupted
from fanin.protos.messages import CLIP_BITS, TRAINED, UpdateHeader, Version
from fanin.protos.texts import counted
from fanin.server.aggregation import fold
from fanin.server.aggregation.auxiliary import (
    AuxiliaryStep,
    RangeRefresh,
)
from fanin.server.aggregation.fold import Contribution
from fanin.server.aggregation.folding import OuterStep, SpooledUpdates, StateSlices, lag_of
from fanin.server.aggregation.methods.feddyn import state_before
from fanin.server.aggregation.outer import RoundStep
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
    StrategyTask,
)
from fanin.server.aggregation.sets import Aggregate, SetFold
from fanin.server.aggregation.verify.history import Archive, RunHistory
from fanin.server.aggregation.weights import claim_of, scale_of
from fanin.server.privacy.noising import CLIPPING, NOISED_SUM, CentralNoise, recorded_clipping
from fanin.server.protocols.facts import adjustment_of, common_work, facts_of
from fanin.server.selection.coverage import coverage_problem
from fanin.server.storage.origins import recorded_grid, recorded_state, recorded_steps
from fanin.server.storage.records import OuterState, RoundMark, RoundRecord


def check_outside(history: RunHistory, version: Version) -> str:
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


def record_problem(history: RunHistory, version: Version, record: RoundRecord | None) -> str:
    """Return what is wrong with the record of a Round, apart from its bytes, or an empty string."""
    cohort = history.plan.cohort
    if record is None or record.mark is not RoundMark.PUBLISHED or record.base_version != version.parent:
        return "the record of the round that made it is missing, or is another's"
    if not cohort.quorum <= record.num_accepted <= cohort.buffer:
        updates = counted(record.num_accepted, "update")
        return f"round {record.round}: {updates}, expected {cohort.quorum} to {cohort.buffer}"
    if record.forgotten is not None:
        return ""
    known = {update.device_id for update in history.archive.rounds.updates(record.run_id, record.round)}
    if missing := sorted(set(record.accepted) - known):
        return f"round {record.round}: no record of {missing}"
    return ""


def check_round(
    history: RunHistory, version: Version, record: RoundRecord | None, lineage_start: int, *, from_sum: bool = False
) -> str:
    """Return the problem of a Version that a Round published, or an empty string.

    Args:
        history: The record of the Run.
        version: The Version.
        record: The Round.
        lineage_start: The Version with which its lineage starts.
        from_sum: Whether the Updates of a private Run were erased: its recorded noised sum is not recomputed.
    """
    if problem := record_problem(history, version, record):
        return problem
    assert record is not None, "its record has no problem"
    after = history.archive.rounds.outer_state(record.run_id, record.round)
    base = _base(history, record)
    if from_sum:
        aggregate = _noised(history, record, base, after)
    else:
        aggregate = _aggregate(history, record, version, (base, lineage_start))
    num_steps = recorded_steps(base, history.archive.runs)
    round_step = RoundStep.of(history.plan, history.optimizer, record.round, num_steps)
    step = OuterStep(aggregate, history.layout, record.grid, history.codec, round_step)
    if record.grid != _grid(history, base):
        return f"round {record.round}: its grid is not the grid of version {base.number}"
    archive, table = history.archive, history.table
    recorded = recorded_state(base, archive.runs, archive.rounds)
    is_first = base.number == lineage_start
    state = state_before(history.optimizer, history.optimizer.tensors, recorded, is_first=is_first)

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
    problem = _auxiliary_problem(history, aggregate, version, base, record)
    if not problem and record.forgotten is None:
        num_examples = step.result().counts.get(TRAINED, 0)
        event = history.published.get(version.number)
        problem = coverage_problem(history.plan.participants, record.accepted, event, num_examples)
    if problem:
        return f"round {record.round}: {problem}"
    tensors = [*history.optimizer.tensors, *([STRATEGY_STATE] if history.plan.flower.strategy else [])]
    noise, sums = history.noise_on(base), aggregate.sums
    if isinstance(noise, CentralNoise):
        tensors += [NOISED_SUM, CLIPPING] if noise.bits_noise else [NOISED_SUM]
    if sorted(after) != sorted(tensors):
        return f"round {record.round}: recorded the outer state {sorted(after)}, not {sorted(tensors)}"
    result = None if history.strategy is None else aggregate.strategy
    if result is not None and sha256_hex(result.state) != after[STRATEGY_STATE].sha256:
        return f"round {record.round}: recomputed another state of the strategy"
    if isinstance(noise, CentralNoise):
        if sums is not None and _digest(noise.encoded(sums)) != after[NOISED_SUM].sha256:
            return f"round {record.round}: recomputed another noised sum"
        if noise.bits_noise and sha256_hex(noise.encoded_clipping(aggregate.counts)) != after[CLIPPING].sha256:
            return f"round {record.round}: recomputed another clip norm for the next round"
    for name in history.optimizer.tensors:
        if _digest(encode_state(step.state(name, *inputs()))) != after[name].sha256:
            return f"round {record.round}: recomputed another {name} of the outer optimizer"
    return ""


def _auxiliary_problem(
    history: RunHistory, aggregate: Aggregate, version: Version, base: Version, record: RoundRecord
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


def _grid(history: RunHistory, base: Version) -> tuple[int, ...]:
    """Return the grid of a Round on this Version."""
    archive, noise = history.archive, history.noise_on(base)
    if noise is not None:
        return noise.grid_of(len(history.layout.total_table.specs))
    grid = recorded_grid(base, archive.runs, archive.rounds)
    return first_grid_from(base, history.layout, history.codec, archive.blobs) if grid is None else grid


def _base(history: RunHistory, record: RoundRecord) -> Version:
    base = history.archive.runs.version(record.run_id, record.base_version)
    if base is None:
        raise Corrupted(f"round {record.round}: no record of version {record.base_version}", code="FN-0530")
    return base


def _noised(history: RunHistory, record: RoundRecord, base: Version, after: OuterState) -> Aggregate:
    """Return the aggregate of a recorded noised sum. Raises Corrupted if the sum is missing or damaged."""
    noise, table = history.noise_on(base), history.layout.total_table
    if not isinstance(noise, CentralNoise) or NOISED_SUM not in after:
        raise Corrupted(f"round {record.round}: no record of its noised sum", code="FN-0530")
    state, first = fold.begin(table), 0
    state.num_updates = 1
    state.total_weights[:] = noise.denominator
    pieces = history.archive.blobs.pieces(f"the noised sum of round {record.round}", after[NOISED_SUM])
    for values in noise.vector.decode(pieces, np.empty(0, np.int64)):
        state.values[first : first + values.size] = values
        first += values.size

    def part(start: int, stop: int) -> Float64s:
        return fold.finish(state, table, record.grid, (start, stop))

    # The weight of each Update is 1, and the only other count of a Round is that of the clip bits.
    counts = {TRAINED: record.num_accepted}
    recorded = recorded_clipping(after, history.archive.blobs.read_artifact)
    if recorded is not None:
        counts[CLIP_BITS] = recorded[0]
    return Aggregate(part=part, reaches=state.reaches, counts=counts, shifts=(0,) * len(table.specs))


def _aggregate(history: RunHistory, record: RoundRecord, version: Version, origin: tuple[Version, int]) -> Aggregate:
    """Fold the recorded set of a Round again. Raises Corrupted if a part of the record is missing.

    Args:
        history: The record of the Run.
        record: The Round.
        version: The Version that it published.
        origin: The base Version, and the Version with which the lineage starts.
    """
    archive, layout, (base, lineage_start) = history.archive, history.layout, origin
    noise = history.noise_on(base)
    masked = history.protocol.vector(layout.total_table.num_values, len(history.statistics))
    updates = SpooledUpdates(
        plan=history.plan,
        codec=history.codec.codec,
        layout=layout,
        spool=archive.spool,
        vector=noise.payload if isinstance(noise, CentralNoise) else masked,
    )
    headers = {update.device_id: update.header for update in archive.rounds.updates(record.run_id, record.round)}

    def contribution(device: str, scale: int) -> Contribution:
        header = headers[device]
        lag = lag_of(_round_of(history, record, header, lineage_start), record, scale)
        return updates.contribution(header, device, lag)

    set_fold = SetFold(_rule(history, record, version, base), layout.total_table, record.grid, contribution)
    set_fold.weigh(
        scale_of(
            [claim_of(headers[device], history.plan, device) for device in record.accepted],
            history.plan.max_total_examples,
        )
    )
    if isinstance(noise, CentralNoise):
        return set_fold.complete(record.accepted, noise.adjustment(_seed(archive, record)))
    rosters = archive.messages.rosters(record.run_id, record.round)
    messages = archive.messages.messages(record.run_id, record.round) if rosters else ()
    work = replace(
        common_work(history.plan, record, base, history.bundle_ref, lineage_start),
        statistics=tuple(history.statistics),
        privacy=None if noise is None else noise.terms,
    )
    basis = basis_of(work, layout.total_table.num_values)
    facts = facts_of(history.protocol, basis, record, rosters, messages)
    denominator = None if noise is None else noise.denominator
    return set_fold.complete(record.accepted, adjustment_of(history.protocol, facts, denominator))


class _Published:
    """A StrategyRunner that returns the published parameters: those of a strategy that cannot be repeated."""

    def __init__(self, history: RunHistory, version: Version) -> None:
        self._history, self._version = history, version

    def run(self, task: StrategyTask, replies: Iterable[Reply]) -> StrategyResult:
        """See ``StrategyRunner.run``."""
        history = self._history
        values = load_parameters(history.archive.blobs, self._version, history.table)
        return StrategyResult(parameters=TrainedPart(history.table).split(values, 0)[0], state=b"")


def _seed(archive: Archive, record: RoundRecord) -> bytes:
    """Return the recorded seed of the noise of a Round. Raises Corrupted if it is missing."""
    seed = archive.rounds.noise_seed(record.run_id, record.round)
    if seed is None:
        raise Corrupted(f"round {record.round}: no record of the seed of its noise", code="FN-0530")
    return seed


def _rule(
    history: RunHistory, record: RoundRecord, version: Version, base: Version
) -> Rule | ColumnRule | StrategyRule:
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


def _round_of(history: RunHistory, record: RoundRecord, header: UpdateHeader, lineage_start: int) -> RoundRecord:
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

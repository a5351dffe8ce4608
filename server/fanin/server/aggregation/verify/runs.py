"""The verification of a Run: a Verdict for each Version."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from fanin.edge.bundles.versions import check_version
from fanin.protos.errors import FaninError
from fanin.protos.messages import UNSEEN
from fanin.server.aggregation.auxiliary import (
    NOT_MEASURED,
    MeasureAgain,
    measured_again,
)
from fanin.server.aggregation.rules import (
    StrategySource,
)
from fanin.server.aggregation.verify.history import Archive, RunHistory, open_history
from fanin.server.aggregation.verify.rounds import check_outside, check_round, record_problem
from fanin.server.privacy.noising import CentralNoise
from fanin.server.storage.protocols.retention import Removed


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
        from_sum: What was erased of a Round with privacy, so that its parameters were recomputed from the recorded
            noised sum; empty if they were recomputed from the Updates and the seed of the noise.
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
    from_sum: str = ""
    ranges: str = ""
    has_recomputed_ranges: bool = False


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
    history = open_history(archive, run_id, strategies)
    lineage_start, seen, removed = 0, UNSEEN, archive.runs.removed(run_id)
    for number, round_number in sorted(archive.runs.round_by_version(run_id).items()):
        lineage_start = lineage_start if round_number else number
        version_sha256, record, ranges, from_sum = "", None, NOT_MEASURED, ""
        by = "privacy erased" if isinstance(history.noise, CentralNoise) and round_number else "retention removed"
        digest_only = _removed_text(removed, number, round_number, by)
        try:
            # A damaged record is the problem of its Version alone.
            record = history.round(round_number)
            if digest_only and record is not None and record.forgotten is not None:
                digest_only = f"{digest_only}; the digest of the set is {record.forgotten.sha256}"
            version = archive.runs.version(run_id, number)
            assert version is not None, "it is in the same table"
            version_sha256 = version.sha256
            # Numbers are in order here, so an earlier epoch after a later one is a Version of a revoked key.
            check_version(
                version, run_id=run_id, bundle_sha256=history.bundle_sha256, publisher=history.publisher, seen=seen
            )
            seen = version.order
            if round_number in removed.rounds:
                base = number if record is None else record.base_version
                if isinstance(history.noise, CentralNoise) and not {number, base} & removed.versions.keys():
                    problem = check_round(history, version, record, lineage_start, from_sum=True)
                    digest_only, from_sum = "", digest_only
                else:
                    problem = record_problem(history, version, record)
            elif digest_only and not round_number:
                problem = ""
            elif round_number:
                problem = check_round(history, version, record, lineage_start)
                if not problem and record is not None and record.measured is not None:
                    ranges = measured_again(record.measured, measure, history.bundle_ref, version)
                    problem = ranges.problem
            else:
                problem = check_outside(history, version)
        except FaninError as exc:
            problem = str(exc)
        yield Verdict(
            version=number,
            round=round_number,
            version_sha256=version_sha256,
            num_updates=0 if record is None else record.num_accepted,
            problem=problem,
            not_reproducible=_reason(history) if round_number and not digest_only else "",
            digest_only=digest_only,
            from_sum=from_sum,
            ranges=ranges.text,
            has_recomputed_ranges=ranges.is_recomputed,
        )


def _reason(history: RunHistory) -> str:
    """Return why the parameters of a Round cannot be recomputed, or an empty string."""
    flower = history.plan.flower
    if not flower.strategy or history.strategy is not None:
        return ""
    if flower.strategy_is_pure:
        return f"the strategy {flower.strategy} is not run here"
    return f"the strategy {flower.strategy} made the parameters, and the plan does not declare it pure"


def _removed_text(removed: Removed, number: int, round_number: int, by: str) -> str:
    """Return what was removed of a Version and when, so that it is not recomputed; empty if it is."""
    removed_at_s = removed.rounds.get(round_number) if round_number else removed.versions.get(number)
    if removed_at_s is None:
        return ""
    what = "the updates of its round" if round_number else "its parameters"
    return f"{by} {what} on {datetime.fromtimestamp(removed_at_s, UTC):%Y-%m-%d}"

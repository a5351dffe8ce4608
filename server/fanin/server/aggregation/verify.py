"""Computing Versions again from the record: does every Version follow from its parent and its closed set?

For each published Round: the parent's parameters, the committed payloads, their headers and the grid are read
from the coordinator's folder; the fold and the outer step are repeated; the digest must be the signed one.
It needs no running coordinator; a database of an older form is refused, never changed.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fanin.edge.bundles.bundle import Bundle, SignedManifest
from fanin.edge.bundles.versions import check_version
from fanin.edge.tensors import TensorTable
from fanin.protos.control import VersionPublished
from fanin.protos.errors import Corrupted, FaninError, NotFound
from fanin.protos.messages import UpdateHeader, Version
from fanin.protos.plans import Plan
from fanin.server.aggregation import fold as aggregation
from fanin.server.aggregation.folding import OuterStep, contribution_of, lag_of
from fanin.server.rounds.effects import Tools, encoded, load_parameters, parameter_pieces
from fanin.server.rounds.grids import first_grid_from, recorded_grid
from fanin.server.storage.blobs import Blobs
from fanin.server.storage.spool import Spool
from fanin.server.storage.sqlite.rounds import RoundMark, RoundRecord, RoundStore
from fanin.server.storage.sqlite.runs import RunStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What verification found of one Version; ``problem`` is empty if it holds. ``round`` 0: made outside."""

    version: int
    round: int
    version_sha256: str
    num_updates: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Where a coordinator keeps what it knows of its Runs."""

    runs: RunStore
    rounds: RoundStore
    blobs: Blobs
    spool: Spool


def verify_run(kept: Record | Tools, run_id: str) -> Iterator[Verdict]:
    """A Verdict for each Version of a Run, oldest first. Raises NotFound for an unknown Run."""
    run = kept.runs.run(run_id)
    if run is None:
        raise NotFound(f"run {run_id}: not in this coordinator's folder")
    bundle_ref = kept.runs.bundle(run.start.version.bundle_sha256)
    if bundle_ref is None:
        raise Corrupted(f"run {run_id}: its bundle is missing")
    data = kept.blobs.read_artifact("manifest", bundle_ref.manifest)
    signed = SignedManifest(data=data, public_key=bundle_ref.public_key, signature=bundle_ref.signature)
    bundle = Bundle.open(signed, trusted=(bundle_ref.public_key,), read=kept.blobs.read)
    recorded = _Recorded(
        kept=kept,
        plan=run.start.plan,
        table=bundle.manifest.table,
        rounds={record.round: record for record in kept.rounds.rounds(run_id)},
        adopted={
            recorded.event.number: (recorded.event.adopted_run_id, recorded.event.adopted_number)
            for recorded in kept.runs.events(run_id)
            if isinstance(recorded.event, VersionPublished) and recorded.event.adopted_run_id
        },
    )
    beginning = 0
    for number, made_by in sorted(kept.runs.made_by(run_id).items()):
        version = kept.runs.version(run_id, number)
        assert version is not None, "it is in the same table"
        record = recorded.rounds.get(made_by)
        beginning = beginning if made_by else number
        try:
            check_version(version, run_id=run_id, bundle_sha256=bundle.sha256, publisher=signed.public_key, seen=-1)
            problem = _check_round(recorded, version, record, beginning) if made_by else _check_given(recorded, version)
        except FaninError as exc:
            problem = str(exc)
        yield Verdict(
            version=number,
            round=made_by,
            version_sha256=version.sha256,
            num_updates=0 if record is None else len(record.accepted),
            problem=problem,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    kept: Record | Tools
    plan: Plan
    table: TensorTable
    rounds: Mapping[int, RoundRecord]
    adopted: Mapping[int, tuple[str, int]]


def _check_given(recorded: _Recorded, version: Version) -> str:
    """Of a Version from outside there is nothing to compute; one that was adopted is its source's parameters."""
    load_parameters(recorded.kept.blobs, version, recorded.table)
    if version.number not in recorded.adopted:
        return ""
    from_run, number = recorded.adopted[version.number]
    source = recorded.kept.runs.version(from_run, number)
    if source is None or source.sha256 != version.sha256:
        return f"adopted from version {number} of run {from_run}, which has other parameters"
    return ""


def _check_round(recorded: _Recorded, version: Version, record: RoundRecord | None, beginning: int) -> str:
    cohort = recorded.plan.cohort
    if record is None or record.mark is not RoundMark.PUBLISHED or record.base_version != version.parent:
        return "the record of the round that made it is missing, or is another's"
    if not cohort.quorum <= len(record.accepted) <= cohort.buffer:
        return f"round {record.round}: {len(record.accepted)} updates, expected {cohort.quorum} to {cohort.buffer}"
    step, base = _outer_step(recorded, record, beginning)
    if record.grid != _grid(recorded, base):
        return f"round {record.round}: its grid is not the grid of version {base.number}"
    digest = hashlib.sha256()
    for piece in encoded(recorded.table, step.pieces(parameter_pieces(recorded.kept.blobs, base, recorded.table))):
        digest.update(piece)
    got = digest.hexdigest()
    if got != version.sha256:
        return f"round {record.round}: recomputed {got}, signed {version.sha256}"
    if step.outcome().next_grid != record.next_grid:
        return f"round {record.round}: recomputed another grid for the next round"
    return ""


def _grid(recorded: _Recorded, base: Version) -> tuple[int, ...]:
    """The grid that a Round from this Version starts on."""
    kept, plan = recorded.kept, recorded.plan
    grid = recorded_grid(base, kept.runs, kept.rounds)
    return first_grid_from(base, recorded.table, plan.codec, kept.blobs) if grid is None else grid


def _outer_step(recorded: _Recorded, record: RoundRecord, beginning: int) -> tuple[OuterStep, Version]:
    kept, plan, table = recorded.kept, recorded.plan, recorded.table
    headers = {update.device_id: update.header for update in kept.rounds.updates(record.run_id, record.round)}
    missing = sorted(set(record.accepted) - set(headers))
    base = kept.runs.version(record.run_id, record.base_version)
    if missing or base is None:
        raise Corrupted(f"round {record.round}: no record of {missing or f'version {record.base_version}'}")
    total = aggregation.begin(table)
    for device in record.accepted:
        header = headers[device]
        lag = lag_of(_made_for(recorded, record, header, beginning), record)
        payload = kept.spool.read(header, device)
        total = aggregation.accept(total, table, contribution_of(header, payload, plan, lag))
    return OuterStep(total, table, record.grid, plan), base


def _made_for(recorded: _Recorded, record: RoundRecord, header: UpdateHeader, beginning: int) -> RoundRecord:
    """The Round that an Update was made for. Raises Corrupted unless it could count in this one."""
    made_for = recorded.rounds.get(header.round)
    oldest = max(record.base_version - recorded.plan.aggregation.max_staleness, beginning)
    base = None if made_for is None else recorded.kept.runs.version(record.run_id, made_for.base_version)
    if made_for is None or base is None or base.sha256 != header.version_sha256:
        raise Corrupted(
            f"round {record.round}: an update says that it was made for round {header.round}, which differs"
        )
    if made_for.round > record.round or made_for.base_version < oldest:
        raise Corrupted(f"round {record.round}: an update of round {header.round} is too old to count in it")
    return made_for

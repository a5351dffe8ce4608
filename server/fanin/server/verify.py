"""Computing Versions again from the record: does every Version follow from its parent and its closed set?

For each published Round: the parent's parameters, the committed payloads, their headers and the grid are read
from the coordinator's folder; the fold and the outer step are repeated; the digest must be the signed one.
Reads only, and needs no running coordinator.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fanin.edge.bundle import Bundle, SignedManifest
from fanin.edge.tensors import TensorTable, encode_parameters, sha256_hex
from fanin.edge.versions import check_version
from fanin.protos.errors import Corrupted, FaninError, NotFound
from fanin.protos.messages import Version
from fanin.protos.plans import Plan
from fanin.server import aggregation
from fanin.server.folding import Outcome, contribution_of, outcome_of
from fanin.server.store.rounds import RoundMark, RoundRecord
from fanin.server.work import Tools, load_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What verification found of one Version; ``problem`` is empty if it holds. ``round`` 0: made outside."""

    version: int
    round: int
    version_sha256: str
    num_updates: int
    problem: str


def verify_run(tools: Tools, run_id: str) -> Iterator[Verdict]:
    """A Verdict for each Version of a Run, oldest first. Raises NotFound for an unknown Run."""
    run = tools.runs.run(run_id)
    if run is None:
        raise NotFound(f"run {run_id}: not in this coordinator's folder")
    bundle_ref = tools.runs.bundle(run.start.version.bundle_sha256)
    if bundle_ref is None:
        raise Corrupted(f"run {run_id}: its bundle is missing")
    data = tools.blobs.read_artifact("manifest", bundle_ref.manifest)
    signed = SignedManifest(data=data, public_key=bundle_ref.public_key, signature=bundle_ref.signature)
    bundle = Bundle.open(signed, trusted=(bundle_ref.public_key,), read=tools.blobs.read)
    made_by = {record.base_version + 1: record for record in tools.rounds.rounds(run_id) if _published(record)}
    previous: RoundRecord | None = None
    number = 0
    while (version := tools.runs.version(run_id, number)) is not None:
        record = made_by.get(number)
        try:
            check_version(version, run_id=run_id, bundle_sha256=bundle.sha256, publisher=signed.public_key, seen=-1)
            problem = (
                "" if record is None else _recompute(tools, run.start.plan, version, record, bundle.manifest.table)
            )
            if record is not None and previous is not None and record.grid != previous.next_grid:
                problem = (
                    problem or f"round {record.round}: its grid is not the one that round {previous.round} ended in"
                )
            if record is None:
                load_parameters(tools.blobs, version, bundle.manifest.table)
        except FaninError as exc:
            problem = str(exc)
        previous = record or previous
        yield Verdict(
            version=number,
            round=0 if record is None else record.round,
            version_sha256=version.sha256,
            num_updates=0 if record is None else len(record.accepted),
            problem=problem,
        )
        number += 1


def _published(record: RoundRecord) -> bool:
    return record.mark is RoundMark.PUBLISHED


def _recompute(tools: Tools, plan: Plan, version: Version, record: RoundRecord, table: TensorTable) -> str:
    outcome = _outcome(tools, plan, record, table)
    got = sha256_hex(encode_parameters(table, outcome.parameters))
    if got != version.sha256:
        return f"round {record.round}: recomputed {got}, signed {version.sha256}"
    if outcome.next_grid != record.next_grid:
        return f"round {record.round}: recomputed another grid for the next round"
    return ""


def _outcome(tools: Tools, plan: Plan, record: RoundRecord, table: TensorTable) -> Outcome:
    headers = {update.device_id: update.header for update in tools.rounds.updates(record.run_id, record.round)}
    missing = sorted(set(record.accepted) - set(headers))
    base = tools.runs.version(record.run_id, record.base_version)
    if missing or base is None:
        raise Corrupted(f"round {record.round}: no record of {missing or f'version {record.base_version}'}")
    total = aggregation.begin(table)
    for device in record.accepted:
        header = headers[device]
        payload = tools.spool.read(header, device)
        total = aggregation.accept(total, table, contribution_of(header, payload, plan))
    return outcome_of(total, table, record.grid, load_parameters(tools.blobs, base, table), plan)

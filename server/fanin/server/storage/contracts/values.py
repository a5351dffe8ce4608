"""Small records to store. They are well-formed; their signatures are never verified."""

from collections.abc import Awaitable
from dataclasses import replace
from typing import Final

import numpy as np

from fanin.edge.bundles.keys import BUNDLE_CONTEXT, SigningKey
from fanin.edge.bundles.versions import sign_delegation, sign_version
from fanin.edge.tensors import TensorTable, encode_parameters
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import FaninError
from fanin.protos.messages import Principal, PrincipalKind, Reclaim, StartRun, VersionPublished
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan
from fanin.server.storage.records import CommittedUpdate, RoundMark, RoundRecord, recorded_header

RUN: Final = "run"
COHORT: Final = CohortPlan(concurrency=3, buffer=3, quorum=1, deadline_s=60.0)
NEVER: Final = replace(COHORT, concurrency=9, buffer=9, quorum=9)
"""A cohort whose quorum the Updates of a check never reach."""
OPERATOR: Final = Principal(kind=PrincipalKind.OPERATOR, id="3fa9c01b2d4e")
_PUBLISHER: Final = SigningKey(bytes(range(32)))
_RUN_KEY: Final = SigningKey(bytes(range(32, 64)))
_MANIFEST: Final = b'{"format": 1}\n'
_TABLE: Final = TensorTable.of({"weight": (2, 3)})
BUNDLE: Final = m.BundleRef(
    manifest=artifact_of(_MANIFEST), public_key=_PUBLISHER.public, signature=_PUBLISHER.sign(BUNDLE_CONTEXT, _MANIFEST)
)


def version(parent: m.Version | None = None, run_id: str = RUN) -> m.Version:
    """Return the Version after ``parent``, or Version 0."""
    sha256 = BUNDLE.manifest.sha256
    values = np.full(_TABLE.num_values, 0.0 if parent is None else parent.number + 1.0, np.float32)
    parameters = artifact_of(encode_parameters(_TABLE, values))
    signed = sign_version(_RUN_KEY, parent=parent, run_id=run_id, bundle_sha256=sha256, parameters=parameters)
    return replace(signed, delegation=_delegation(run_id))


def start(run_id: str = RUN) -> StartRun:
    """Return the command that starts a Run."""
    plan = Plan(
        name="contract",
        cohort=COHORT,
        training=m.Training(epochs=1, learning_rate=0.5, seed=7),
        codec=m.CodecSpec(name="fixed32", max_shift=0),
        aggregation=AggregationPlan(),
        stop=StopPlan(max_rounds=5),
    )
    return StartRun(run_id=run_id, plan=plan, version=version(run_id=run_id), delegation=_delegation(run_id))


def reclaim_of(version: m.Version) -> Reclaim:
    """Return the request that begins the epoch of a Version."""
    delegation = replace(_delegation(version.run_id), epoch=version.epoch)
    return Reclaim(delegation=delegation, version=replace(version, delegation=None), adopted_number=0)


def opened(number: int = 1, base_version: int = 0, run_id: str = RUN) -> RoundRecord:
    """Return an open Round."""
    return RoundRecord(
        run_id=run_id, round=number, base_version=base_version, grid=(-3, 4), mark=RoundMark.OPEN, opened_at_s=10.0
    )


def published(of: m.Version, round_number: int, rounds: int = 0) -> VersionPublished:
    """Return the event that publishes a Version; ``round_number`` is 0 for one from outside."""
    return VersionPublished(
        number=of.number, version_sha256=of.sha256, parent=of.parent, round=round_number, rounds=rounds
    )


def committed(device: str, *, made_for: int = 1, round_number: int = 1, num_examples: int = 10) -> CommittedUpdate:
    """Return an Update of a device."""
    header = header_of(b"payload of " + device.encode(), device, made_for, num_examples)
    return CommittedUpdate(device_id=device, round=round_number, header=header, header_proto=recorded_header(header))


def header_of(payload: bytes, device: str, made_for: int = 1, num_examples: int = 10) -> m.UpdateHeader:
    """Return the header of an Update with this payload."""
    return m.UpdateHeader(
        format=m.UPDATE_FORMAT,
        assignment_id=f"{RUN}.{made_for}.{device}",
        run_id=RUN,
        round=made_for,
        version_sha256=version().sha256,
        codec="fixed32",
        shifts=(0,),
        payload=artifact_of(payload),
        statistics=m.Statistics(counts={m.EXAMPLES: num_examples}),
        telemetry=m.Telemetry(runtime="contract 1", train_s=1.0, num_steps=1, bytes_downloaded=1),
    )


def _delegation(run_id: str) -> m.Delegation:
    sha256 = BUNDLE.manifest.sha256
    return sign_delegation(_PUBLISHER, run_id=run_id, bundle_sha256=sha256, run_public_key=_RUN_KEY.public)


async def refusal(kind: type[FaninError], call: Awaitable[object], what: str, code: str = "") -> None:
    """Check that a call raises an error of a class, with this code if one is named."""
    try:
        result = await call
    except kind as exc:
        assert code in ("", exc.code), f"{what}: got {exc.code}, expected {code}"
        return
    raise AssertionError(f"{what}: got {result!r}, expected {kind.__name__}")

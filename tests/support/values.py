"""Small fixed values of every kind, for suites that need any value of that kind."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.bundles.keys import BUNDLE_CONTEXT, SigningKey
from fanin.edge.bundles.versions import add_auxiliary, sign_delegation, sign_version
from fanin.edge.codecs.fixed import CODECS
from fanin.edge.codecs.statistics import declared
from fanin.edge.tensors import Float32s, TensorTable, encode_parameters
from fanin.protos import messages as m
from fanin.protos import plans as p
from fanin.protos.chunks import Artifact, artifact_of

PUBLISHER: Final = SigningKey(bytes(range(32)))
RUN_KEY: Final = SigningKey(bytes(range(32, 64)))
DEVICE_KEY: Final = SigningKey(bytes(range(64, 96)))
STRANGER: Final = SigningKey(bytes(range(96, 128)))
RUN: Final = "run"
TABLE: Final = TensorTable.of({"a": (2, 3), "b": (4,), "c": ()})
GRID: Final = (-30, -28, -26)
MANIFEST: Final = b'{"format": 1}\n'
BUNDLE: Final = m.BundleRef(
    manifest=artifact_of(MANIFEST), public_key=PUBLISHER.public, signature=PUBLISHER.sign(BUNDLE_CONTEXT, MANIFEST)
)
DELEGATION: Final = sign_delegation(
    PUBLISHER, run_id=RUN, bundle_sha256=BUNDLE.manifest.sha256, run_public_key=RUN_KEY.public
)


def parameters(scale: float = 0.125) -> Float32s:
    """Return parameters (num_values,) of ``TABLE``."""
    return (np.arange(TABLE.num_values) * scale).astype(np.float32)


def parameters_artifact() -> Artifact:
    """Return the Artifact of the canonical bytes of ``parameters``."""
    return artifact_of(encode_parameters(TABLE, parameters()))


def version(
    key: SigningKey = RUN_KEY, parent: m.Version | None = None, auxiliary: Mapping[str, Artifact] | None = None
) -> m.Version:
    """Return a Version of ``RUN``, signed with the run key, with its delegation."""
    signed = sign_version(
        key,
        parent=parent,
        run_id=RUN,
        bundle_sha256=BUNDLE.manifest.sha256,
        parameters=parameters_artifact(),
    )
    signed = add_auxiliary(key, signed, auxiliary) if auxiliary else signed
    return replace(signed, delegation=DELEGATION)


def assignment(round_number: int = 1, device: str = "device") -> m.Assignment:
    """Return an Assignment from Version 0."""
    return m.Assignment(
        assignment_id=f"{RUN}.{round_number}.{device}",
        run_id=RUN,
        round=round_number,
        bundle=BUNDLE,
        version=version(),
        grid=GRID,
        codec=m.CodecSpec(name="fixed32", max_shift=2),
        training=m.Training(epochs=1, learning_rate=0.5, seed=7),
        deadline_s=60.0,
        statistics=declared([], max_examples=4096, num_labels=2, num_values=TABLE.num_values),
    )


def update(work: m.Assignment, scale: float = 0.01, examples: int = 10, **counts: int) -> tuple[m.UpdateHeader, bytes]:
    """Return the header and the payload of an Update for an Assignment."""
    encoded = CODECS["fixed32"].encode(
        TABLE, parameters(scale), work.grid, work.codec.max_shift, np.random.default_rng(0)
    )
    header = m.UpdateHeader(
        format=m.UPDATE_FORMAT,
        assignment_id=work.assignment_id,
        run_id=work.run_id,
        round=work.round,
        version_sha256=work.version.sha256,
        codec=work.codec.name,
        shifts=encoded.shifts,
        payload=artifact_of(encoded.payload),
        statistics=m.Statistics(counts=MappingProxyType({m.EXAMPLES: examples} | counts)),
        telemetry=m.Telemetry(runtime="synthetic 1", train_s=1.5, num_steps=3, bytes_downloaded=100),
    )
    return header, encoded.payload


def plan(*, buffer: int = 4, max_examples: int = 4096, max_shift: int = 0, max_rounds: int = 3) -> p.Plan:
    """Return a synchronous Plan."""
    return p.Plan(
        name="plan",
        cohort=p.CohortPlan(concurrency=buffer, buffer=buffer, quorum=buffer, deadline_s=60.0),
        training=m.Training(epochs=1, learning_rate=0.5, seed=7),
        codec=m.CodecSpec(name="fixed32", max_shift=max_shift),
        aggregation=p.AggregationPlan(max_examples=max_examples),
        stop=p.StopPlan(max_rounds=max_rounds),
    )

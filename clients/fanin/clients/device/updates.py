"""The seam for training, and from what it changed to an Update: on the grid, described, cut into Chunks."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np

from fanin.clients.device.models import OpenedModel
from fanin.edge.codecs.fixed import codec_named
from fanin.edge.tensors import Float32s, TensorTable, sha256_hex
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of

ROUNDING_STREAM: Final = 0x726E6464
"""Keeps the generator that rounds an update apart from those that training draws from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutcome:
    """What a device found: the change of the parameters (num_values,), statistics, telemetry."""

    change: Float32s
    counts: Mapping[str, int]
    telemetry: m.Telemetry


class Trainer(Protocol):
    """Turns an Assignment into what an Update is made of."""

    @property
    def runtime(self) -> str:
        """The library and its version."""
        ...

    @property
    def graph_format(self) -> str:
        """The format of the graphs that it needs."""
        ...

    def train(self, model: OpenedModel, assignment: m.Assignment, bytes_downloaded: int) -> TrainingOutcome:
        """Train. Raises ValueError when it diverged, InvalidInput for a graph or data that do not fit."""
        ...


def make_update(assignment: m.Assignment, table: TensorTable, outcome: TrainingOutcome) -> tuple[m.UpdateHeader, bytes]:
    """The Update for an Assignment: its header and its payload.

    Raises InvalidUpdate for an unknown codec, ValueError for a change that is not finite.
    """
    codec = codec_named(assignment.codec.name)
    rng = _rounding(assignment, outcome.change) if codec.is_stochastic else np.random.default_rng(0)
    encoded = codec.encode(table, outcome.change, assignment.grid, assignment.codec.max_shift, rng)
    counts = dict(outcome.counts) | {m.ROUNDED: encoded.num_rounded, m.SATURATED: encoded.num_saturated}
    header = m.UpdateHeader(
        format=m.UPDATE_FORMAT,
        assignment_id=assignment.assignment_id,
        run_id=assignment.run_id,
        round=assignment.round,
        version_sha256=assignment.version.sha256,
        codec=assignment.codec.name,
        shifts=encoded.shifts,
        payload=artifact_of(encoded.payload),
        statistics=m.Statistics(counts=MappingProxyType(counts)),
        telemetry=outcome.telemetry,
    )
    return header, encoded.payload


def _rounding(assignment: m.Assignment, change: Float32s) -> np.random.Generator:
    """What rounds this change: the same if it is made again.

    The change itself is part of the seed, where other choices take the partition: devices that round alike would
    add up their errors, and many a device has no partition but the default.
    """
    digest = int(sha256_hex(change.astype("<f4", copy=False).tobytes()), 16)
    seeds = np.random.SeedSequence((ROUNDING_STREAM, assignment.training.seed, assignment.round, digest))
    return np.random.default_rng(seeds)

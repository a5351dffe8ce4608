"""The Protocol ``Trainer``, and the encoding of its outcome as an Update on the Round's grid."""

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
"""Separates the generator that rounds an Update from those of the training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutcome:
    """The result of training.

    Attributes:
        change: Change of the parameters (num_values,).
        counts: Statistics: integer sums over examples.
        telemetry: Runtime, times and traffic.
    """

    change: Float32s
    counts: Mapping[str, int]
    telemetry: m.Telemetry


class Trainer(Protocol):
    """Trains a model on a device's examples."""

    @property
    def runtime(self) -> str:
        """The library and its version."""
        ...

    @property
    def graph_format(self) -> str:
        """The format of the graphs that the trainer runs."""
        ...

    def train(self, model: OpenedModel, assignment: m.Assignment, bytes_downloaded: int) -> TrainingOutcome:
        """Train for one Round.

        Args:
            model: The Bundle and the parameters to start from.
            assignment: Epochs, learning rate and seed.
            bytes_downloaded: Traffic of this Assignment, for the telemetry.

        Raises:
            ValueError: Training diverged.
            InvalidInput: The graph or the examples do not fit the model.
        """
        ...


def make_update(assignment: m.Assignment, table: TensorTable, outcome: TrainingOutcome) -> tuple[m.UpdateHeader, bytes]:
    """Encode the outcome of a training as an Update.

    Args:
        assignment: Names the codec and the grid.
        table: Names and shapes of the parameters.
        outcome: The result of training.

    Returns:
        The Update's header and payload.

    Raises:
        InvalidUpdate: The codec is unknown.
        ValueError: The change is not finite.
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
    """Return the generator that rounds this change; it is the same for a repeated training.

    Its seed contains the change instead of the partition. Devices with equal seeds would add up their rounding errors,
    and many devices use the default partition.
    """
    digest = int(sha256_hex(change.astype("<f4", copy=False).tobytes()), 16)
    seeds = np.random.SeedSequence((ROUNDING_STREAM, assignment.training.seed, assignment.round, digest))
    return np.random.default_rng(seeds)

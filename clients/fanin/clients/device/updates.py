"""The Protocol ``Trainer``, and the encoding of its Change as an Update on the Round's grid."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.edge.codecs.fixed import codec_named
from fanin.edge.codecs.statistics import fitted
from fanin.edge.tensors import Float32s, TensorTable, sha256_hex
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of

ROUNDING_STREAM: Final = 0x726E6464
"""Separates the generator that rounds an Update from those of the training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The result of training. The session adds the encoding, the duration and the traffic.

    Attributes:
        values: New parameters minus the parameters of the Version (num_values,), float32, finite.
        counts: Statistics: integer sums over examples. ``examples`` is the weight of the Update. Those that the Run
            does not declare are left out, and those beyond their bound are cut.
        num_steps: Optimizer steps, for the telemetry.
    """

    values: Float32s
    counts: Mapping[str, int]
    num_steps: int = 0


class Trainer(Protocol):
    """Trains a model on a device's examples.

    ``fanin.clients.testing.check_trainer`` checks an implementation.
    """

    @property
    def runtime(self) -> str:
        """The library and its version."""
        ...

    @property
    def graph_format(self) -> str:
        """The format of the graphs that the trainer runs."""
        ...

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Train for one Round.

        A training may be repeated, after an interruption or a crash. It must then return bit-identical values, so
        derive random numbers from ``assignment.training.seed``, the data's partition and ``assignment.round``.

        Args:
            model: The Bundle and the parameters to start from. Do not change them.
            assignment: Epochs, learning rate and seed.
            should_continue: Call it before each batch, also before each batch of an evaluation. It returns True, or
                raises Interrupted if the device must stop. Let the exception pass.

        Raises:
            Interrupted: ``should_continue`` raised it.
            ValueError: Training diverged.
            InvalidInput: The graph or the examples do not fit the model.
        """
        ...


def make_update(
    assignment: m.Assignment, table: TensorTable, change: Change, telemetry: m.Telemetry
) -> tuple[m.UpdateHeader, bytes]:
    """Encode a Change as an Update.

    Args:
        assignment: Names the codec and the grid.
        table: Names and shapes of the parameters.
        change: The result of training.
        telemetry: Runtime, times and traffic.

    Returns:
        The Update's header and payload.

    Raises:
        InvalidUpdate: The codec is unknown.
        ValueError: The change has another shape, or is not finite.
    """
    codec = codec_named(assignment.codec.name)
    rng = _rounding(assignment, change.values) if codec.is_stochastic else np.random.default_rng(0)
    encoded = codec.encode(table, change.values, assignment.grid, assignment.codec.max_shift, rng)
    counts = dict(change.counts) | {m.ROUNDED: encoded.num_rounded, m.SATURATED: encoded.num_saturated}
    sent = fitted(counts, assignment.statistics)
    header = m.UpdateHeader(
        format=m.UPDATE_FORMAT,
        assignment_id=assignment.assignment_id,
        run_id=assignment.run_id,
        round=assignment.round,
        version_sha256=assignment.version.sha256,
        codec=assignment.codec.name,
        shifts=encoded.shifts,
        payload=artifact_of(encoded.payload),
        statistics=m.Statistics(counts=MappingProxyType(sent)),
        telemetry=telemetry,
    )
    return header, encoded.payload


def _rounding(assignment: m.Assignment, values: Float32s) -> np.random.Generator:
    """Return the generator that rounds this change; it is the same for a repeated training.

    Its seed contains the change instead of the partition. Devices with equal seeds would add up their rounding errors,
    and many devices use the default partition.
    """
    digest = int(sha256_hex(values.astype("<f4", copy=False).tobytes()), 16)
    seeds = np.random.SeedSequence((ROUNDING_STREAM, assignment.training.seed, assignment.round, digest))
    return np.random.default_rng(seeds)

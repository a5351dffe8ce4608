"""The step from the auxiliary tensors of a Version to those of the next one.

A stage that adds a group to the vector has an auxiliary tensor of the same name in each Version
(``edge.codecs.stage``). The stage computes it from the aggregate of its group, elementwise and in float64. A stage sees
the values of trained parameters alone; those of statistics and counters stay zero.

A Plan may refresh the ranges of the activations (``edge.ranges``): its Versions have the tensor ``ranges``. With
``int8.ranges = "devices"`` it is computed from the counts of the Round's Updates. One device must not decide a range
(``limited``). With ``"data"`` it has the ranges that the coordinator measured, which the Round's record keeps. An
activation that was not measured keeps its range.

The result is rounded to float32, stored as a blob and signed with the Version. The first Version of a lineage stores no
auxiliary tensors of stages: they are zero. It has the ranges of the Version that it adopts, and without any those of
the manifest.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import numpy as np

from fanin.edge.bundles.manifest import Manifest
from fanin.edge.codecs.stage import GroupStage, Stage
from fanin.edge.codecs.stages import STAGES
from fanin.edge.codecs.trained import TrainedPart
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.ranges import (
    BINS_PER_OCTAVE,
    NUM_BINS,
    RANGES,
    Activation,
    grids_of,
    initial_ranges,
    ranges_of,
    ranges_table,
)
from fanin.edge.tensors import Float32s, Int64s
from fanin.protos.errors import Corrupted
from fanin.protos.messages import RANGE_WEIGHT, BundleRef, Version
from fanin.protos.plans import EXPORT, Plan
from fanin.server.aggregation.checked import Part
from fanin.server.aggregation.parameters import auxiliary_pieces, encode_parameters
from fanin.server.aggregation.sets import Aggregate
from fanin.server.storage.protocols.files import BlobReader
from fanin.server.storage.records import MeasuredRanges

LIARS: Final = 10
"""One device of so many may lie about ranges."""
MIN_DEVICES: Final = 3
"""Of two devices that differ, nobody knows which one lies."""
TOLERANCE: Final = 2.0**-8
"""Largest difference of a range that is measured again, relative to its width: one step of the int8 grid. Libraries and
processors round float sums differently."""


def refreshed(plan: Plan, manifest: Manifest) -> tuple[Activation, ...]:
    """Return the activations whose ranges the Rounds of a Run refresh: all of the manifest, or none."""
    return () if plan.int8.ranges == EXPORT else manifest.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRefresh:
    """The refresh of the ranges in a Round.

    Attributes:
        activations: The activations whose ranges it refreshes: all of the manifest, or none.
        measured: The ranges that the coordinator measured. None if devices count.
    """

    activations: Sequence[Activation]
    measured: MeasuredRanges | None

    def ranges(self, before: Float32s) -> Float32s | None:
        """Return the next ranges (2 * activations,) from those before, or None if devices count.

        Raises:
            Corrupted: The measured ranges are those of other activations, or are no ranges.
        """
        if self.measured is None:
            return None
        values = np.frombuffer(self.measured.values, np.dtype("<f4")).astype(np.float32)
        if values.size not in (0, before.size):
            raise Corrupted(
                f"the record has measured ranges of {values.size // 2} activations, the bundle {before.size // 2}; "
                "restore a backup of the folder",
                code="FN-0530",
            )
        ranges = np.where(np.isnan(values), before, values) if values.size else before
        grids_of(self.activations, ranges)
        return ranges


MeasureAgain = Callable[[MeasuredRanges, BundleRef, Version], MeasuredRanges]
"""Measures recorded ranges a second time, for their Version. If it cannot, the result has the ``problem``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangesVerdict:
    """The result of verifying measured ranges.

    Attributes:
        text: How they were verified.
        is_recomputed: Whether they were measured again.
        problem: Why they are wrong; empty if they are not.
    """

    text: str
    is_recomputed: bool = False
    problem: str = ""


NOT_MEASURED: Final = RangesVerdict(text="")


def measured_again(
    recorded: MeasuredRanges, measure: MeasureAgain | None, bundle: BundleRef, version: Version
) -> RangesVerdict:
    """Verify the recorded ranges of a Version on their data set, if it is at hand."""
    if recorded.problem:
        return RangesVerdict(text=f"those of the version before, because none were measured: {recorded.problem}")
    need = f"not recomputed, needs data set {recorded.data} with digest {recorded.data_sha256}"
    if measure is None:
        return RangesVerdict(text=need)
    again = measure(recorded, bundle, version)
    if again.problem or again.data_sha256 != recorded.data_sha256:
        return RangesVerdict(text=f"{need}; {again.problem or f'--data has a file with digest {again.data_sha256}'}")
    difference = _difference(recorded, again)
    text = f"recomputed on {recorded.data} with {again.runtime}"
    if difference > TOLERANCE:
        problem = f"ranges: {text}, recorded with {recorded.runtime}: they differ by {difference:.2g} of their width"
        return RangesVerdict(text="", is_recomputed=True, problem=problem)
    equality = "equal bits" if again.values == recorded.values else f"within {difference:.1g} of their width"
    return RangesVerdict(text=f"{text}, {equality}", is_recomputed=True)


def _difference(recorded: MeasuredRanges, again: MeasuredRanges) -> float:
    """Return the largest difference between ranges, relative to the width; infinity if one lacks an activation."""
    first, second = (np.frombuffer(each.values, np.dtype("<f4")).astype(np.float64) for each in (recorded, again))
    if first.size != second.size or (np.isnan(first) != np.isnan(second)).any():
        return math.inf
    differences = np.abs(second - first)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = differences / np.repeat(np.diff(first.reshape(-1, 2), axis=1), 2)
    return float(relative.max(initial=0.0, where=differences > 0.0))


def limited(counts: Int64s) -> Int64s:
    """Return the sums of counts of ranges without those that a few devices move too far outwards.

    Each device counts ``RANGE_WEIGHT`` for a side. Without the largest counts of a tenth of the devices, and of at
    least one, a side ends in some bin. Counts of more than an octave beyond it are moved to the end of that octave. So
    a liar costs at most one bit of precision. With one or two devices nobody can tell who lies, and the counts stay.

    Args:
        counts: The sums (num_activations, 2, NUM_BINS).
    """
    nums = counts.sum(axis=2)
    devices = nums // RANGE_WEIGHT
    ignored = RANGE_WEIGHT * np.where(devices < MIN_DEVICES, 0, np.maximum(devices // LIARS, 1))
    ends = (np.cumsum(counts, axis=2) < (nums - ignored)[:, :, None]).sum(axis=2)
    ends = np.where(devices < MIN_DEVICES, NUM_BINS - 1, np.minimum(ends + BINS_PER_OCTAVE, NUM_BINS - 1))[:, :, None]
    is_beyond = np.arange(NUM_BINS) > ends
    kept = np.where(is_beyond, 0, counts)
    moved = np.where(is_beyond, counts, 0).sum(axis=2, keepdims=True)
    np.put_along_axis(kept, ends, np.take_along_axis(kept, ends, axis=2) + moved, axis=2)
    return kept


class AuxiliaryStep:
    """The step of all auxiliary tensors of a Round.

    Args:
        aggregate: The aggregate of the Round.
        layout: The layout of the vector.
        stages: The stages of the Run, by name.
        num_updates: Number of Updates in the Round.
        refresh: The refresh of the ranges.
    """

    def __init__(
        self,
        aggregate: Aggregate,
        layout: VectorLayout,
        stages: Mapping[str, Stage],
        num_updates: int,
        refresh: RangeRefresh,
    ) -> None:
        self._aggregate = aggregate
        self._layout = layout
        self._num_updates = num_updates
        self._refresh = refresh
        self._owners = {
            group.name: (name, stage)
            for name, stage in stages.items()
            if isinstance(stage, GroupStage)
            for group in stage.groups
        }

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors, in the order in which a Version has them."""
        return tuple(sorted([*self._owners, *([RANGES] if self._refresh.activations else [])]))

    def encoded(self, name: str, blobs: BlobReader, base: Version) -> Iterator[bytes]:
        """Yield the canonical bytes of a next tensor.

        Args:
            name: The tensor.
            blobs: The blobs of the Versions.
            base: The base Version of the Round.

        Raises:
            InvalidPlan: The stage raised an error, or its result is not the expected number of finite values.
            NotFound: A Chunk of the base Version is missing.
            Corrupted: A Chunk of the base Version is damaged.
        """
        is_first = name == RANGES and name not in base.auxiliary
        activations = self._refresh.activations
        table = ranges_table(activations) if name == RANGES else self._layout.auxiliary
        before = [initial_ranges(activations)] if is_first else auxiliary_pieces(blobs, base, name, table)
        return encode_parameters(table, self.tensor(name, before))

    def tensor(self, name: str, before: Iterable[Float32s]) -> Iterator[Float32s]:
        """Yield a next tensor in slices. That of a stage has the slices of the tensor before. Raises InvalidPlan."""
        return self._next_ranges(before) if name == RANGES else self._advanced(name, before)

    def _next_ranges(self, before: Iterable[Float32s]) -> Iterator[Float32s]:
        ranges = np.concatenate(list(before))
        measured = self._refresh.ranges(ranges)
        if measured is not None:
            yield measured
            return
        counts = self._aggregate.ranges.counts(ranges.size * NUM_BINS).reshape(-1, 2, NUM_BINS)
        yield ranges_of(limited(counts), ranges.reshape(-1, 2)).reshape(-1)

    def _advanced(self, name: str, before: Iterable[Float32s]) -> Iterator[Float32s]:
        owner, stage = self._owners[name]
        part = Part(
            name=f"stage {owner}",
            advice="correct the stage",
            beyond="lower training.learning_rate, or correct the stage",
        )
        begin, _ = self._layout.span(name)
        first, places = 0, TrainedPart(self._layout.table)
        for piece in before:
            last = first + piece.size
            aggregate, _ = places.split(self._aggregate.part(begin + first, begin + last), first)
            trained, averaged = places.split(piece, first)
            with nullcontext() if type(stage) in STAGES.values() else part.blamed("advance"):
                after = stage.advance(trained.astype(np.float64), aggregate, self._num_updates)
            rounded = part.rounded("advance", f" for the tensor {name!r}", after, trained.size)
            yield places.join(rounded, np.zeros_like(averaged), first)
            first = last

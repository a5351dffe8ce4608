"""Ranges of activations: the numbers on which the grids of an int8 graph depend, apart from the parameters.

A Bundle lists its *activations*: the tensors of its ``infer`` graphs whose int8 grid a Version may change. Each has a
*range*, the lowest and the highest value that the grid represents. The ranges of all activations are one float32
vector, low and high of each activation in the order of the manifest. The manifest has the ranges of the export. A
Version may carry others, as its auxiliary tensor ``ranges``. So a grid is a pure function of signed numbers::

    scale = (high - low) / 255        zero point = rint(-128 - low / scale)        value = scale * (code - zero point)

The ranges of a Version come from data, in two ways. ``ranges_of_data`` uses the lowest and the highest value of a
calibration set. ``ranges_of`` uses histograms that devices report: for each activation and side, the number of
examples whose extreme value is in a bin. Bins are fixed, so the counts of devices add up. Only integers enter, so the
result is the same on every machine. A maximum would be moved by a single device; a quantile is not.

A device with a share of more than ``OUTLIERS`` of the counts can still move a side, but only outwards: a side moves
inwards if almost all counts say so. A range that is too wide costs precision, which the measured gap between float and
int8 shows. So a coordinator limits the examples that each device counts.

Reference:
    Jacob et al. 2018, arXiv 1712.05877, sections 2.1 and 3.1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fanin.edge.tensors import Float32s, Int64s, TensorTable
from fanin.protos.errors import InvalidBundle, InvalidVersion

RANGES: Final = "ranges"
"""Name of the auxiliary tensor of a Version, and of the Signature of a TFLite file that measures ranges."""
LEVELS: Final = 255
LARGEST: Final = float(np.finfo(np.float32).max)
LOWEST_CODE: Final = -128
HIGHEST_CODE: Final = 127
MIN_INPUT_SCALE: Final = 2.0**-60
"""Activation scales are between this and its inverse, so that their product with any weight scale is a normal float32
number."""
FINEST: Final = 2.0**-18
"""Smallest scale relative to the largest one of the format. TFLite's kernel of a sum ends the process if its scale is
2^-19 of that of a term."""
BINS_PER_OCTAVE: Final = 4
"""A range is at most 2^(1/4), 19 percent, wider than the values: that costs a quarter of a bit."""
NUM_BINS: Final = 128
"""32 octaves, from 2^-16 to 2^15.75."""
OUTLIERS: Final = 1000
"""One example of so many may be outside of a range."""
MANY: Final = 100
"""With fewer counts no example is outside of the range."""
# The fourth roots of 2, rounded to float32. Powers of two times these are exact, so all machines have the same edges.
_ROOTS: Final = np.array([1.0, 1.1892070770263672, 1.4142135381698608, 1.6817928552627563], np.float32)
EDGES: Final[Float32s] = np.ldexp(np.tile(_ROOTS, NUM_BINS // BINS_PER_OCTAVE), np.arange(NUM_BINS) // 4 - 16)
"""Upper edges of the bins (NUM_BINS,): bin k has the magnitudes from the edge of bin k - 1, exclusive, to its own. The
first bin also has 0, the last one also what is larger."""
EDGES.flags.writeable = False

Grid = tuple[np.float32, np.int8]
"""Scale and zero point."""
Grids = Mapping[str, Grid]
"""The grid of each activation, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """A tensor of an ``infer`` graph whose int8 grid a Version may change.

    Attributes:
        name: Its name, ``FORMAT:TENSOR``. Tensors of the graphs of all lengths that have this name share the range.
        graph_format: The format of the graph.
        low: Lowest value at the export, a float32 number of at most 0: zero is exact on every grid.
        high: Highest value at the export, a float32 number of at least 0.
    """

    name: str
    graph_format: str
    low: float
    high: float

    def __post_init__(self) -> None:
        is_range = -LARGEST <= self.low <= 0.0 <= self.high <= LARGEST
        if not is_range or (float(np.float32(self.low)), float(np.float32(self.high))) != (self.low, self.high):
            raise InvalidBundle(
                f"manifest: activation {self.name!r}: got the range {self.low} to {self.high}, expected finite float32 "
                "numbers of at most and at least 0",
                code="FN-0319",
            )


def initial_ranges(activations: Sequence[Activation]) -> Float32s:
    """Return the ranges of the export (2 * activations,)."""
    return np.array([bound for row in activations for bound in (row.low, row.high)], np.float32)


def ranges_table(activations: Sequence[Activation]) -> TensorTable:
    """Return the layout of the auxiliary tensor of a Version."""
    return TensorTable.of({RANGES: (2 * len(activations),)})


def columns(activations: Sequence[Activation], graph_format: str) -> Int64s:
    """Return the positions of the activations of a format, whose graphs measure them."""
    return np.array([at for at, row in enumerate(activations) if row.graph_format == graph_format], np.int64)


def grids_of(activations: Sequence[Activation], ranges: Float32s | None = None) -> dict[str, Grid]:
    """Return the grid of each activation by name.

    Args:
        activations: Those of a manifest.
        ranges: The ranges of a Version (2 * activations,); None for those of the export.

    Raises:
        InvalidVersion: ``ranges`` are not the ranges of these activations.
    """
    vector = initial_ranges(activations) if ranges is None else ranges
    if vector.shape != (2 * len(activations),) or vector.dtype != np.float32 or not _are_ranges(vector):
        raise InvalidVersion(
            f"ranges: got {vector.dtype} {vector.shape}, expected float32 ({2 * len(activations)},): for each "
            "activation of the bundle a finite low of at most 0 and a finite high of at least 0",
            code="FN-0361",
        )
    spans = vector.reshape(-1, 2)
    largest: dict[str, float] = {}
    for row, span in zip(activations, spans, strict=True):
        largest[row.graph_format] = max(largest.get(row.graph_format, 0.0), _scale(span[0], span[1]))
    return {
        row.name: grid_of(span[0], span[1], FINEST * largest[row.graph_format])
        for row, span in zip(activations, spans, strict=True)
    }


def grid_of(low: np.float32, high: np.float32, least: float = 0.0) -> Grid:
    """Return the scale and the zero point of the int8 grid for the values from ``low`` to ``high``.

    This arithmetic is normative. All of it is float64 on float32 values, rounded to float32 once. A range whose scale
    would be below ``MIN_INPUT_SCALE`` carries no signal: its grid has the scale 1 and the zero point 0.

    Args:
        low: At most 0.
        high: At least 0.
        least: Smallest scale.
    """
    scale = _scale(low, high)
    if scale < MIN_INPUT_SCALE:
        return np.float32(max(1.0, least)), np.int8(0)
    scale = max(scale, least)
    zero_point = np.clip(np.rint(LOWEST_CODE - float(low) / scale), LOWEST_CODE, HIGHEST_CODE)
    return np.float32(scale), np.int8(zero_point)


def _scale(low: np.float32, high: np.float32) -> float:
    return min((float(high) - float(low)) / LEVELS, 1.0 / MIN_INPUT_SCALE)


def bin_of(magnitudes: Float32s) -> Int64s:
    """Return the bin of each magnitude, in the shape of ``magnitudes``."""
    bins: Int64s = np.minimum(np.searchsorted(EDGES, magnitudes), NUM_BINS - 1).astype(np.int64)
    return bins


def counts(lows: Float32s, highs: Float32s) -> Int64s:
    """Return the histograms of the extreme values of examples.

    Args:
        lows: Lowest value of each activation in each example (examples, activations).
        highs: Highest value of each activation in each example (examples, activations).

    Returns:
        Number of examples (activations, 2, NUM_BINS), for the magnitudes of the lows and of the highs. An example with
        a value that is not finite does not count for its activation.
    """
    num = lows.shape[1]
    is_finite = np.isfinite(lows) & np.isfinite(highs)
    _, places = np.nonzero(is_finite)
    sides = []
    for values in (-lows, highs):
        bins = places * NUM_BINS + bin_of(np.maximum(values[is_finite], np.float32(0.0)))
        sides.append(np.bincount(bins, minlength=num * NUM_BINS).reshape(num, NUM_BINS))
    return np.stack(sides, axis=1).astype(np.int64)


def ranges_of(histograms: Int64s, before: Float32s) -> Float32s:
    """Return the ranges that histograms describe.

    A side is the upper edge of the smallest bin that covers all examples but the outliers: one of a thousand, and one
    more if there are at least a hundred examples. So with a hundred examples or more, a single one moves no side. The
    first bin means 0. A side of the last bin stays at least as far out as it was.

    Args:
        histograms: Sums of ``counts`` (activations, 2, NUM_BINS).
        before: The ranges so far (activations, 2).

    Returns:
        Ranges (activations, 2). An activation without counts, or with all of both sides in the first bin, keeps its
        range.
    """
    nums = histograms.sum(axis=2)
    needed = nums - nums // OUTLIERS - (nums >= MANY)
    bins = (np.cumsum(histograms, axis=2) < needed[:, :, None]).sum(axis=2)
    magnitudes = np.where(bins == 0, np.float32(0.0), EDGES[np.minimum(bins, NUM_BINS - 1)])
    magnitudes = np.where(bins >= NUM_BINS - 1, np.maximum(magnitudes, np.abs(before)), magnitudes)
    is_known = (nums > 0).all(axis=1, keepdims=True) & (bins > 0).any(axis=1, keepdims=True)
    return np.where(is_known, magnitudes * np.array([-1.0, 1.0], np.float32) + np.float32(0.0), before).astype(
        np.float32
    )


def ranges_of_data(lows: Float32s, highs: Float32s, before: Float32s) -> Float32s:
    """Return the ranges that hold all values of a calibration set.

    Args:
        lows: Lowest value of each activation in each example (examples, activations).
        highs: Highest value of each activation in each example (examples, activations).
        before: The ranges so far (activations, 2).

    Returns:
        Ranges (activations, 2), with zero. An activation without an example whose values are finite keeps its range.
    """
    is_finite = np.isfinite(lows) & np.isfinite(highs)
    low = np.where(is_finite, lows, np.float32(0.0)).min(axis=0, initial=0.0)
    high = np.where(is_finite, highs, np.float32(0.0)).max(axis=0, initial=0.0)
    is_known = np.expand_dims(is_finite.any(axis=0), 1)
    return np.where(is_known, np.stack([low, high], axis=1) + np.float32(0.0), before).astype(np.float32)


def _are_ranges(ranges: Float32s) -> bool:
    """Return whether each pair of numbers is a finite range with zero."""
    return bool(np.isfinite(ranges).all() and (ranges[0::2] <= 0.0).all() and (ranges[1::2] >= 0.0).all())

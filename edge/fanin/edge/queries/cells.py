"""The integers of one device: its examples on the lattices of a query, counted for the next Version.

Each tensor is of one Version. A device fills those of the next one and sends 0 for all others. Which one is next
follows from the parameters: the first one without a value. So a repeated Round, a rollback or a restart needs no state.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from fanin.edge.queries.brackets import Bracket, brackets_of, narrow_tensor, next_version
from fanin.edge.queries.digits import split
from fanin.edge.queries.query import (
    ALL,
    CHANNEL,
    COLUMN,
    INSIDE,
    OUTSIDE,
    FeatureGroup,
    StatisticsQuery,
    tensor,
)
from fanin.edge.tensors import Array, Float32s, Float64s, Int64s

Views = Mapping[str, Float32s]
SMALLEST_BATCH: Final = 2
"""Dimensions of a batch of examples with one axis."""


def cells_of(query: StatisticsQuery, parameters: Float32s, examples: Mapping[str, Array]) -> Float32s:
    """Return the change of a device (num_values,): whole numbers, which sum up exactly.

    Args:
        query: The query.
        parameters: The parameters of the Version (num_values,).
        examples: The examples of the device by input, and the targets as ``y`` (n, ...).

    Raises:
        ValueError: An input is missing or has another number of features, or a feature has too many values.
    """
    views = query.table.views(parameters)
    number = next_version(query, views)
    sums: dict[str, Float32s] = {}
    for index, group in enumerate(query.groups):
        columns = columns_of(group, examples)
        if len(columns) > query.max_values:
            raise ValueError(
                f"statistics: {group.input}: got {len(columns)} values of a feature, expected at most max_values "
                f"{query.max_values}; ask this device with a larger max_values"
            )
        if number == 0:
            sums |= _first(query, index, group, columns)
        elif number < group.num_versions:
            brackets = brackets_of(query, index, views)
            sums[narrow_tensor(index, number)] = _narrower(query, group, columns, brackets)
    zeros = {spec.name: np.zeros(spec.shape, np.float32) for spec in query.table.specs if spec.name not in sums}
    return query.table.flatten(sums | zeros)


def columns_of(group: FeatureGroup, examples: Mapping[str, Array]) -> Float64s:
    """Return the values of the features (n, num_features). Raises ValueError if the examples have other features."""
    if group.input not in examples:
        raise ValueError(f"statistics: got the inputs {sorted(examples)}, expected also {group.input!r}")
    array = examples[group.input]
    if array.dtype.kind not in "biuf":
        raise ValueError(f"statistics: {group.input}: got {array.dtype}, expected numbers")
    values = array.astype(np.float64)
    rows = values.reshape(len(values), -1)
    if group.by == ALL:
        rows = values.reshape(-1, 1)
    elif group.by == COLUMN and values.ndim > SMALLEST_BATCH:
        rows = values.reshape(-1, values.shape[-1])
    elif group.by == CHANNEL and values.ndim > SMALLEST_BATCH:
        rows = np.moveaxis(values, 1, -1).reshape(-1, values.shape[1])
    if rows.shape[1] != len(group.names):
        raise ValueError(
            f"statistics: {group.input}: got {rows.shape[1]} features by {group.by} of examples {array.shape[1:]}, "
            f"expected {len(group.names)}"
        )
    return rows


def points_of(group: FeatureGroup, values: Float64s) -> tuple[Int64s, Int64s]:
    """Return the points of values on the lattice, and their places: 0 inside, 1 below, 2 above, 3 no number."""
    places = np.zeros(values.shape, np.int64)
    places[values < group.low] = 1
    places[values > group.high] = 2
    places[np.isnan(values)] = 3
    inside = np.where(places == 0, values, group.low)
    points = np.rint((inside - group.low) / group.step).astype(np.int64)
    return np.clip(points, 0, group.num_points - 1), places


def _first(query: StatisticsQuery, index: int, group: FeatureGroup, columns: Float64s) -> dict[str, Float32s]:
    widths, bits = query.widths(group), query.bits
    rows = len(group.names)
    inside = np.zeros((rows, 3), np.int64)
    outside, bins = np.zeros((rows, 3), np.int64), np.zeros((rows, group.bins), np.int64)
    for row in range(rows):
        points, places = points_of(group, columns[:, row])
        ours = points[places == 0]
        inside[row] = len(ours), ours.sum(), (ours * ours).sum()
        outside[row] = np.bincount(places, minlength=4)[1:]
        bins[row] = np.bincount(ours // group.bin_width, minlength=group.bins)
    digits = [split(inside[:, part], width, bits) for part, width in enumerate(widths)]
    present = (inside[:, :1] > 0).astype(np.int64)
    return {
        tensor(index, INSIDE): np.concatenate([present, *digits], axis=1).astype(np.float32),
        tensor(index, OUTSIDE): _counted(outside, widths[0], bits),
        tensor(index, group.histogram): _counted(bins, widths[0], bits),
    }


def _narrower(
    query: StatisticsQuery, group: FeatureGroup, columns: Float64s, brackets: list[list[Bracket]]
) -> Float32s:
    counts = np.zeros((len(group.names) * len(group.quantiles), group.bins), np.int64)
    for row, ours in enumerate(brackets):
        points, places = points_of(group, columns[:, row])
        points = points[places == 0]
        for quantile, bracket in enumerate(ours):
            if bracket.is_open:
                within = points[(points >= bracket.first) & (points < bracket.last)] - bracket.first
                parts = within // bracket.part_width(group.bins)
                counts[row * len(ours) + quantile] = np.bincount(parts, minlength=group.bins)
    return _counted(counts, query.widths(group)[0], query.bits)


def _counted(counts: Int64s, width: int, bits: int) -> Float32s:
    """Return the cells of counts (..., 1 + width): whether the device has values in it, and their number."""
    present = (counts > 0).astype(np.int64)[..., np.newaxis]
    return np.concatenate([present, split(counts, width, bits)], axis=-1).astype(np.float32)

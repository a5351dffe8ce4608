"""Statistics of a fleet in one process: the integers of devices through the rule by Versions, and a plain twin."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from fanin.edge.queries import FeatureGroup, StatisticsQuery, cells_of
from fanin.edge.tensors import Array, Float32s, Float64s
from fanin.server.aggregation.exact_sums import ExactSums
from fanin.server.aggregation.fold import Contribution

Fleet = Sequence[Mapping[str, Array]]
SLICE = 1000


def contribution(values: Float32s, num_blocks: int) -> Contribution:
    """Return the Update of a device with the weight 1, on the grid whose steps are 1."""
    integers = values.astype(np.int32)
    ones, zeros = (1,) * num_blocks, (0,) * num_blocks
    pieces = [integers[first : first + SLICE] for first in range(0, integers.size, SLICE)]
    return Contribution(weights=ones, fresh_weights=ones, shifts=zeros, bits=32, max_shift=0, counts={}, pieces=pieces)


def versions_of(query: StatisticsQuery, fleet: Fleet) -> list[Float32s]:
    """Return the parameters of all Versions of a query over a fleet."""
    table, rule = query.table, ExactSums(query.min_devices, query.num_devices)
    versions = [np.zeros(table.num_values, np.float32)]
    for _ in range(query.num_versions):
        state = rule.begin(table)
        for examples in fleet:
            state = rule.accept(state, table, contribution(cells_of(query, versions[-1], examples), len(table.specs)))
        cuts = [*range(0, table.num_values, SLICE), table.num_values]
        parts = [rule.finish(state, table, (), (first, last)) for first, last in pairwise(cuts)]
        versions.append((versions[-1] + np.concatenate(parts)).astype(np.float32))
    return versions


def plain(group: FeatureGroup, columns: Sequence[Float64s], k: int) -> dict[str, object]:
    """Return the statistics of one feature from the devices' values, by dictionaries of Python integers."""
    places, points = Counter[tuple[int, str]](), Counter[tuple[int, int]]()
    for device, column in enumerate(columns):
        for value in column.tolist():
            if math.isnan(value) or not group.low <= value <= group.high:
                places[device, "missing" if math.isnan(value) else "below" if value < group.low else "above"] += 1
            else:
                places[device, "count"] += 1
                points[device, round((value - group.low) / group.step)] += 1
    feature = _release(["count", "below", "above", "missing"], places, k)
    in_bin = Counter({(d, p // group.bin_width): 0 for d, p in points})
    for (device, point), count in points.items():
        in_bin[device, point // group.bin_width] += count
    bins = _release(list(range(group.num_parts)), in_bin, k)
    if feature["count"] is None:
        return {**feature, "mean": None, "variance": None, "histogram": tuple(None for _ in bins)}
    n = feature["count"]
    total = sum(point * count for (_, point), count in points.items())
    squares = sum(point**2 * count for (_, point), count in points.items())
    step = Fraction(group.step)
    if group.bin_width == 1 and None in bins.values():
        return {**feature, "mean": None, "variance": None, "histogram": tuple(bins.values())}
    return {
        **feature,
        "mean": float(Fraction(group.low) + step * total / n) if n else None,
        "variance": float(step**2 * (Fraction(squares, n) - Fraction(total, n) ** 2)) if n else None,
        "histogram": tuple(bins.values()),
    }


def _release(cells: list, counts: Counter, k: int) -> dict:  # type: ignore[type-arg]  # Keys of two kinds.
    devices = {cell: sum(1 for (_, of), count in counts.items() if of == cell and count) for cell in cells}
    hidden = {cell for cell in cells if 0 < devices[cell] < k}
    others = [cell for cell in cells if devices[cell] >= k]
    if hidden and others:
        hidden.add(min(others, key=lambda cell: devices[cell]))
    sums = {cell: sum(count for (_, of), count in counts.items() if of == cell) for cell in cells}
    return {cell: None if cell in hidden else sums[cell] for cell in cells}

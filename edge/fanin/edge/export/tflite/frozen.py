"""Frozen weights as int8 in a TFLite train graph: codes in the file, a DEQUANTIZE in front of what reads them.

The converter has folded the frozen weights to float constants, in the layouts that its operators want, some of them
transposed or flipped for the backward pass. All are values of one int8 grid a channel still (``prepare`` rounded them),
and are known by that: the codes are found, and give the very same numbers when the scale is multiplied back.
"""

from typing import Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from fanin.edge.bundles.quantize import Codes, weight_codes, weight_scales
from fanin.edge.export.prepare import MIN_FROZEN_VALUES
from fanin.edge.export.tflite.flatgraph import FlatGraph, Scales, pack, tidy
from fanin.edge.tensors import Float32s

LARGEST: Final = 1e30
"""A larger value is a floor for what a mask leaves out, and no weight."""
PER_CHANNEL: Final = 5
"""The version of DEQUANTIZE that has one scale a channel; tflite-runtime 2.14 has it."""


def store_as_int8(data: bytes) -> bytes:
    """The file with the frozen weights of ``train`` and ``evaluate`` as int8."""
    model = schema.ModelT.InitFromPackedBuf(data)
    for signature in ("train", "evaluate"):
        graph = FlatGraph(model, signature)
        rows = []
        for tensor in _constants(graph):
            value = graph.constant(tensor)
            found = None if value is None or value.dtype != np.float32 else on_grid(value.astype(np.float32))
            if found is None:
                continue
            codes, scales = found
            source = graph.add_constant(codes, scales)
            graph.compute(tensor)
            rows.append(graph.make("DEQUANTIZE", PER_CHANNEL, [source], [tensor]))
        graph.operators = [*rows, *graph.operators]
    tidy(model)
    return pack(model)


def on_grid(weight: Float32s) -> tuple[Codes, Scales] | None:
    """Codes and scales that give exactly this weight, along the first dimension that has them; None without."""
    if weight.ndim < 2 or weight.size < MIN_FROZEN_VALUES or np.abs(weight).max() > LARGEST:
        return None
    for dim in range(weight.ndim):
        found = _on_grid_along(weight, dim)
        if found is not None:
            return found
    return None


def _on_grid_along(weight: Float32s, dim: int) -> tuple[Codes, Scales] | None:
    others = tuple(axis for axis in range(weight.ndim) if axis != dim)
    column = tuple(-1 if axis == dim else 1 for axis in range(weight.ndim))
    nearest = weight_scales(weight, dim)
    best = nearest.copy()
    known = np.zeros(nearest.shape, bool)
    # The largest value is 127 times the scale, rounded: divided again it may miss the scale by one unit.
    for scales in (nearest, np.nextafter(nearest, np.float32(0)), np.nextafter(nearest, np.float32(np.inf))):
        codes = weight_codes(weight, dim, scales)
        same = (codes.astype(np.float32) * scales.reshape(column) == weight).all(axis=others)
        best = np.where(same & ~known, scales, best).astype(np.float32)
        known |= same
    if not known.all():
        return None
    return weight_codes(weight, dim, best), Scales(values=best, dim=dim)


def _constants(graph: FlatGraph) -> list[int]:
    """The constants that operators read, each once."""
    read = {int(index) for row in graph.operators for index in row.inputs if int(index) >= 0}
    return sorted(index for index in read if graph.is_float(index) and graph.constant(index) is not None)

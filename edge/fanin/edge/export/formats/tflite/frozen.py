"""Frozen weights as int8 in a TFLite train graph: codes in the file, and a DEQUANTIZE before their users.

The converter folds frozen weights to float constants in the layouts of its operators, some of them transposed or
flipped for the backward pass. All their values are still on one int8 grid for each channel, because ``prepare`` rounded
them. A constant is recognized by that: its codes times its scale are exactly the same float values.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from fanin.edge.bundles.quantize import Codes, weight_codes, weight_scales
from fanin.edge.export.formats.tflite.bound import PRODUCTS
from fanin.edge.export.formats.tflite.file import pack, tidy
from fanin.edge.export.formats.tflite.flatgraph import FlatGraph, Scales
from fanin.edge.export.module.prepare import MIN_FROZEN_VALUES
from fanin.edge.tensors import Float32s

LARGEST: Final = 1e30
"""A constant with a larger value is the floor of a mask and not a weight."""
CodesOf = Callable[[FlatGraph, int, Float32s], tuple[Codes, Scales] | None]
PER_CHANNEL: Final = 5
"""The first version of DEQUANTIZE with one scale for each channel; tflite-runtime 2.14 has it."""


def store_as_int8(data: bytes) -> bytes:
    """Return the file with the frozen weights of ``train`` and ``evaluate`` as int8."""
    model = schema.ModelT.InitFromPackedBuf(data)
    for signature in ("train", "evaluate"):
        store_constants(FlatGraph(model, signature), lambda graph, tensor, value: on_grid(value))
    tidy(model)
    return pack(model)


def store_constants(graph: FlatGraph, codes_of: CodesOf) -> None:
    """Store float constants of a graph as int8, with a DEQUANTIZE before their users.

    Args:
        graph: The graph, changed in place.
        codes_of: (graph, tensor, value) -> the codes and scales of a constant; None to keep it float.
    """
    rows = []
    for tensor in _constants(graph):
        value = graph.constant(tensor)
        is_float = value is not None and value.dtype == np.float32
        quantized = codes_of(graph, tensor, value.astype(np.float32)) if value is not None and is_float else None
        if quantized is None:
            continue
        codes, scales = quantized
        source = graph.add_constant(codes, scales)
        graph.compute(tensor)
        rows.append(graph.make("DEQUANTIZE", PER_CHANNEL, [source], [tensor]))
    graph.operators = [*rows, *graph.operators]


def of_product(graph: FlatGraph, tensor: int, weight: Float32s) -> tuple[Codes, Scales] | None:
    """Return the codes and scales of the weight of a product, which are those of the int8 graph; None for others."""
    kinds = {graph.kind(row) for row in graph.operators if graph.kind(row) in PRODUCTS and int(row.inputs[1]) == tensor}
    if len(kinds) != 1 or weight.size < MIN_FROZEN_VALUES:
        return on_grid(weight)
    dim = weight.ndim - 1 if kinds == {"DEPTHWISE_CONV_2D"} else 0
    scales = weight_scales(weight, dim)
    return weight_codes(weight, dim, scales), Scales(values=scales, dim=dim)


def on_grid(weight: Float32s) -> tuple[Codes, Scales] | None:
    """Return the codes and scales that reproduce a weight exactly, along the first dimension where they exist.

    Returns None if there are none.
    """
    if weight.ndim < 2 or weight.size < MIN_FROZEN_VALUES or np.abs(weight).max() > LARGEST:
        return None
    for dim in range(weight.ndim):
        quantized = _on_grid_along(weight, dim)
        if quantized is not None:
            return quantized
    return None


def _on_grid_along(weight: Float32s, dim: int) -> tuple[Codes, Scales] | None:
    others = tuple(axis for axis in range(weight.ndim) if axis != dim)
    column = tuple(-1 if axis == dim else 1 for axis in range(weight.ndim))
    nearest = weight_scales(weight, dim)
    best = nearest.copy()
    known = np.zeros(nearest.shape, bool)
    # The largest value is 127 times the scale, rounded. Divided by 127 it may differ from the scale by one unit.
    for scales in (nearest, np.nextafter(nearest, np.float32(0)), np.nextafter(nearest, np.float32(np.inf))):
        codes = weight_codes(weight, dim, scales)
        is_exact = (codes.astype(np.float32) * scales.reshape(column) == weight).all(axis=others)
        best = np.where(is_exact & ~known, scales, best).astype(np.float32)
        known |= is_exact
    if not known.all():
        return None
    return weight_codes(weight, dim, best), Scales(values=best, dim=dim)


def _constants(graph: FlatGraph) -> list[int]:
    """Return the float constants that operators read, each once."""
    read = {int(index) for row in graph.operators for index in row.inputs if int(index) >= 0}
    return sorted(index for index in read if graph.is_float(index) and graph.constant(index) is not None)

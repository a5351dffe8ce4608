"""Quantization of the ``infer`` graph of a TFLite file to int8, with empty slots.

Weights are quantized symmetrically with one scale for each output channel, activations asymmetrically with one scale
for each tensor. The ranges of activations are measured by a float run over the calibration data. Products with a weight
become int8, and so do the operators between them that only move or add numbers. A plain CNN is therefore int8 from its
first product to its last. A norm or an attention keeps its precision between a DEQUANTIZE and a QUANTIZE::

    x -> QUANTIZE -> CONV_2D(codes, bias codes) -> ... -> DEQUANTIZE -> logits

A linear layer becomes a 1 x 1 convolution. tflite-runtime 2.14 supports only one scale for a matrix, but one for each
channel of a kernel. An addition after a product becomes its bias, together with the activation function that follows.

``bundles.quantize`` alone computes the content of a slot. The file holds zeros there.

Reference:
    Jacob et al. 2018, arXiv 1712.05877, section 2.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from fanin.edge.bundles.quantize import with_derived
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.export.formats.int8.folding import Infer
from fanin.edge.export.formats.int8.grids import Grids, check_grids
from fanin.edge.export.formats.tflite.bound import ParameterView, bind_parameters, join_biases
from fanin.edge.export.formats.tflite.constants import SCALE, Constants
from fanin.edge.export.formats.tflite.file import copied, offsets, only, pack, tidy
from fanin.edge.export.formats.tflite.flatgraph import FlatGraph
from fanin.edge.export.formats.tflite.quantizer import Quantizer
from fanin.edge.export.formats.tflite.ranges import Range, measured_ranges
from fanin.edge.runtimes.base import NamedInputs
from fanin.edge.tensors import Float32s
from fanin.protos.errors import UnsupportedModel

INFER: Final = "infer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8File:
    """A file with an int8 ``infer`` graph, and its slots."""

    data: bytes
    slots: tuple[Slot, ...]
    grids: Grids = field(default_factory=dict, compare=False)


def quantize_infer(
    data: bytes, infer: Infer, calibration: NamedInputs, kept_float: Collection[str], grids: Grids | None = None
) -> Int8File:
    """Quantize the ``infer`` Signature of a TFLite file.

    The graph is quantized twice, for the parameters of Version 0 and for changed ones. Outside their slots, both files
    must be identical: no device would update any other place that depends on a parameter.

    Args:
        data: The file with a float ``infer``, in which moving tensors are inputs.
        infer: The graph and the sources of its slots.
        calibration: Real inputs (n, ...) by name.
        kept_float: Parameters whose products stay float.
        grids: The grids of activations; None for those of the calibration data.

    Returns:
        The quantized file with zeros in its slots.

    Raises:
        UnsupportedModel: The file depends on the value of a parameter outside a slot.
    """
    model = schema.ModelT.InitFromPackedBuf(data)
    ranges, names = infer_ranges(model, infer, calibration)
    if grids is not None:
        check_grids(dict.fromkeys(names.values(), (0.0, 0.0)), dict.fromkeys(grids, (0.0, 0.0)))
        ranges |= {tensor: Range(*grids[name]) for tensor, name in names.items()}
    changed = {name: np.float32(0.5) + np.float32(2.0) * value for name, value in infer.values.items()}
    later = with_derived(changed, infer.derived)
    file, other = (emptied(build_infer(model, infer, values, ranges, kept_float)) for values in (infer.values, later))
    if file != other:
        raise UnsupportedModel(
            "infer graph: the quantized file depends on the values of parameters, expected them in slots only; "
            "please report the module",
            code="FN-0787",
        )
    return replace(file, grids={name: (ranges[tensor].low, ranges[tensor].high) for tensor, name in names.items()})


def infer_ranges(
    model: "schema.ModelT", infer: Infer, calibration: NamedInputs
) -> tuple[dict[int, Range], dict[int, str]]:
    """Return the ranges of the tensors of ``infer``, and the names of the computed ones in the graphs of all lengths.

    A name has the number and the kind of the operator: the converter numbers tensors otherwise in another graph.
    """
    model, graph, _ = _bound(model, infer.values, infer.scales)
    tensors = graph.floats()
    names = {port.tensorIndex: f"input {port.name.decode()}" for port in graph.ports.inputs}
    for number, row in enumerate(graph.operators):
        names |= {int(tensor): f"{graph.kind(row)} {number}.{at}" for at, tensor in enumerate(row.outputs)}
    ranges = measured_ranges(only(model, INFER), tensors, calibration)
    return ranges, {tensor: name for tensor, name in names.items() if tensor in ranges}


def build_infer(
    model: "schema.ModelT",
    infer: Infer,
    values: Mapping[str, Float32s],
    ranges: Mapping[int, Range],
    kept_float: Collection[str],
) -> Int8File:
    """Return the file quantized with these ranges.

    Args:
        model: The file with a float ``infer``. It is not changed.
        infer: The graph and the sources of its slots.
        values: Content of the slots: a Version's parameters and the tensors derived from them.
        ranges: Ranges of the activations by tensor index.
        kept_float: Parameters whose products stay float.
    """
    model, graph, bound = _bound(model, values, infer.scales)
    constants = Constants(graph, bound, values, infer.scales)
    kept = {tensor for tensor, view in bound.items() if view.parameter in kept_float}
    Quantizer(graph, constants, ranges, kept).run()
    for tensor in bound:
        if any(tensor in row.inputs for row in graph.operators):
            constants.floats(tensor)
    constants.fill()
    tidy(model)
    packed = pack(model)
    where = offsets(packed, INFER)
    return Int8File(data=packed, slots=tuple(_placed(slot, where) for slot in constants.slots))


def emptied(file: Int8File) -> Int8File:
    """Return the file with zeros in its slots."""
    data = bytearray(file.data)
    for slot in file.slots:
        size = int(np.prod(slot.shape)) * (1 if slot.kind is SlotKind.WEIGHT else 4)
        data[slot.offset : slot.offset + size] = bytes(size)
    return replace(file, data=bytes(data))


def _placed(slot: Slot, where: Mapping[str, tuple[int, int]]) -> Slot:
    constant, scales = where[slot.initializer.removesuffix(SCALE)]
    return replace(slot, offset=scales if slot.initializer.endswith(SCALE) else constant)


def _bound(
    model: "schema.ModelT", values: Mapping[str, Float32s], scales: Mapping[str, str]
) -> tuple["schema.ModelT", FlatGraph, dict[int, ParameterView]]:
    """Copy the file, convert moving tensors to constants, and join biases with their products."""
    model = copied(model)
    graph = FlatGraph(model, INFER)
    bound = bind_parameters(graph, values)
    join_biases(graph, bound, scales)
    return model, graph, bound

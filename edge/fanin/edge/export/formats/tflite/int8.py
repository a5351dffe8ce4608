"""Quantization of the ``infer`` graph of a TFLite file to int8, with empty slots.

Weights are quantized symmetrically with one scale for each output channel, activations asymmetrically with one scale
for each tensor. The ranges of activations are measured by a float run over the calibration data. Products with a weight
become int8, and so do the operators between them that only move or add numbers. A plain CNN is therefore int8 from its
first product to its last. A norm or an attention keeps its precision between a DEQUANTIZE and a QUANTIZE::

    x -> QUANTIZE -> CONV_2D(codes, bias codes) -> ... -> DEQUANTIZE -> logits

A linear layer becomes a 1 x 1 convolution. tflite-runtime 2.14 supports only one scale for a matrix, but one for each
channel of a kernel. An addition after a product becomes its bias, together with the activation function that follows.

``bundles.quantize`` alone computes the content of a slot. The file holds zeros or ones there. The grids of activations
are slots, too: the scale and the zero point of each int8 tensor, of which several may have the range of one activation.

The float ``infer`` stays in the file as the Signature ``ranges``. Its outputs are the activations, so that a device or
a coordinator can measure their ranges for the parameters of a Version.

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
from fanin.edge.export.formats.int8.activations import Ranges, check_names
from fanin.edge.export.formats.int8.folding import Infer
from fanin.edge.export.formats.tflite.bound import ParameterView, bind_parameters, join_biases
from fanin.edge.export.formats.tflite.constants import SCALE, ZERO, Constants
from fanin.edge.export.formats.tflite.file import Offsets, copied, offsets, only, pack, tidy
from fanin.edge.export.formats.tflite.flatgraph import FlatGraph
from fanin.edge.export.formats.tflite.frozen import of_product, store_constants
from fanin.edge.export.formats.tflite.quantizer import Quantizer
from fanin.edge.export.formats.tflite.ranges import Range, Spans, measured_ranges
from fanin.edge.ranges import RANGES
from fanin.edge.runtimes.base import NamedInputs
from fanin.edge.tensors import Float32s
from fanin.protos.errors import UnsupportedModel

INFER: Final = "infer"
ONE: Final = np.array([1.0], "<f4").tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8File:
    """A file with an int8 ``infer`` graph, and its slots."""

    data: bytes
    slots: tuple[Slot, ...]
    ranges: Ranges = field(default_factory=dict, compare=False)


def quantize_infer(
    data: bytes, infer: Infer, calibration: NamedInputs, kept_float: Collection[str], ranges: Ranges | None = None
) -> Int8File:
    """Quantize the ``infer`` Signature of a TFLite file.

    The graph is quantized twice, for the parameters of Version 0 and for changed ones, and with changed ranges of its
    activations. Outside their slots, both files must be identical: no device would update any other place that depends
    on a parameter or a range.

    Args:
        data: The file with a float ``infer``, in which moving tensors are inputs.
        infer: The graph and the sources of its slots.
        calibration: Real inputs (n, ...) by name.
        kept_float: Parameters whose products stay float.
        ranges: The ranges of activations, for a graph of a shorter length; None for those of the calibration data.

    Returns:
        The quantized file with zeros in its slots. It has the graph that measures ranges, unless they are given.

    Raises:
        UnsupportedModel: The file depends on the value of a parameter or a range outside a slot.
    """
    model = schema.ModelT.InitFromPackedBuf(data)
    spans = infer_spans(model, infer, calibration)
    if ranges is not None:
        check_names(spans.names.values(), ranges)
        given = {tensor: Range(*ranges[name]) for tensor, name in spans.names.items()}
        spans = replace(spans, ranges=given, grids=given, has_graph=False)
    file = emptied(build_infer(model, infer, infer.values, spans, kept_float))
    changed = {name: np.float32(0.5) + np.float32(2.0) * value for name, value in infer.values.items()}
    moving = {slot.activation for slot in file.slots}
    grids = {
        tensor: Range(2.0 * span.low - 0.5, 3.0 * span.high + 0.25) if spans.activation(tensor) in moving else span
        for tensor, span in spans.ranges.items()
    }
    later = build_infer(model, infer, with_derived(changed, infer.derived), replace(spans, grids=grids), kept_float)
    if file != emptied(later):
        raise UnsupportedModel(
            "infer graph: the quantized file depends on the values of parameters or on ranges, expected them in slots "
            "only; please report the module",
            code="FN-0787",
        )
    measured = {name: (spans.ranges[tensor].low, spans.ranges[tensor].high) for tensor, name in spans.names.items()}
    return replace(file, ranges=measured)


def infer_spans(model: "schema.ModelT", infer: Infer, calibration: NamedInputs) -> Spans:
    """Return the ranges of the float tensors of ``infer`` over the calibration data."""
    model, graph, _ = _bound(model, infer.values, infer.scales)
    tensors = graph.floats()
    names = {port.tensorIndex: f"input {port.name.decode()}" for port in graph.ports.inputs}
    for number, row in enumerate(graph.operators):
        names |= {int(tensor): f"{graph.kind(row)} {number}.{at}" for at, tensor in enumerate(row.outputs)}
    ranges = measured_ranges(only(model, INFER), tensors, calibration)
    return Spans(ranges=ranges, grids=ranges, names={tensor: names[tensor] for tensor in ranges})


def build_infer(
    model: "schema.ModelT",
    infer: Infer,
    values: Mapping[str, Float32s],
    spans: Spans,
    kept_float: Collection[str],
) -> Int8File:
    """Return the file with a quantized ``infer``, and with the graph that measures its ranges.

    Args:
        model: The file with a float ``infer``. It is not changed.
        infer: The graph and the sources of its slots.
        values: Content of the slots: a Version's parameters and the tensors derived from them.
        spans: The ranges of the activations.
        kept_float: Parameters whose products stay float.
    """
    source = model
    model, graph, bound = _bound(model, values, infer.scales)
    constants = Constants(graph, bound, values, infer.scales)
    kept = {tensor for tensor, view in bound.items() if view.parameter in kept_float}
    Quantizer(graph, constants, spans, kept).run()
    for tensor in bound:
        if any(tensor in row.inputs for row in graph.operators):
            constants.floats(tensor)
    constants.fill()
    slots = constants.slots
    if spans.has_graph:
        named = {slot.activation for slot in slots if slot.kind is SlotKind.ACTIVATION_SCALE}
        tensors = {spans.activation(tensor): tensor for tensor in spans.names}
        add_measuring(model, source, {name: tensor for name, tensor in tensors.items() if name in named})
    tidy(model)
    packed = pack(model)
    where = offsets(packed, INFER)
    return Int8File(data=packed, slots=tuple(_placed(slot, where) for slot in slots))


def add_measuring(model: "schema.ModelT", source: "schema.ModelT", outputs: Mapping[str, int]) -> None:
    """Add the float graph of ``infer`` as the Signature ``RANGES``, whose outputs are activations.

    Its frozen weights are the codes of the int8 graph, which the file has once.

    Args:
        model: The file with a quantized ``infer``, changed in place.
        source: The file from which it was copied, with a float ``infer``.
        outputs: The tensor of each activation, by name.
    """
    if not outputs:
        return
    twin = copied(source)
    ports = next(row for row in twin.signatureDefs if row.signatureKey.decode() == INFER)
    graph = twin.subgraphs[ports.subgraphIndex]
    ports.signatureKey, ports.subgraphIndex = RANGES.encode(), len(model.subgraphs)
    ports.outputs = []
    for name, tensor in outputs.items():
        port = schema.TensorMapT()
        port.name, port.tensorIndex = name.encode(), tensor
        ports.outputs.append(port)
    graph.outputs = np.array(list(outputs.values()), np.int32)
    model.subgraphs.append(graph)
    model.signatureDefs.append(ports)
    store_constants(FlatGraph(model, RANGES), of_product)


def emptied(file: Int8File) -> Int8File:
    """Return the file with zeros in its slots, and with the scale 1.0 for activations.

    A delegate of LiteRT reads the grids of all Signatures when it opens the file for any of them. It crashes at the
    scale 0.0 of an activation.
    """
    data = bytearray(file.data)
    for slot in file.slots:
        is_scale = slot.kind is SlotKind.ACTIVATION_SCALE
        data[slot.offset : slot.offset + slot.size_bytes] = ONE if is_scale else bytes(slot.size_bytes)
    return replace(file, data=bytes(data))


def _placed(slot: Slot, where: Mapping[str, Offsets]) -> Slot:
    parts = where[slot.initializer.removesuffix(SCALE).removesuffix(ZERO)]
    if slot.initializer.endswith(SCALE):
        return replace(slot, offset=parts.scales)
    return replace(slot, offset=parts.zero_points if slot.initializer.endswith(ZERO) else parts.constant)


def _bound(
    model: "schema.ModelT", values: Mapping[str, Float32s], scales: Mapping[str, str]
) -> tuple["schema.ModelT", FlatGraph, dict[int, ParameterView]]:
    """Copy the file, convert moving tensors to constants, and join biases with their products."""
    model = copied(model)
    graph = FlatGraph(model, INFER)
    bound = bind_parameters(graph, values)
    join_biases(graph, bound, scales)
    return model, graph, bound

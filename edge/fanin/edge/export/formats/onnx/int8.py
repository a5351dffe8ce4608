"""Quantization of the float ``infer`` model to int8, with empty slots.

Quantization is static, per channel and in QDQ form, int8 for weights and activations. Only products with a weight are
quantized: they take most of the time and bytes. Constants of norms and additions keep their precision. So does
attention between activations: its quantized softmax overflows in onnxruntime where no probability is large.

The ranges of activations are measured on the App's data (``ranges``), and ``edge.ranges`` alone computes their grids.
onnxruntime's quantizer receives the grids and writes the graph. ``slots`` finds the slots in it, and the quantizer's
values are discarded.
"""

import logging
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

from fanin.edge.bundles.slots import Slot
from fanin.edge.export.formats.int8.activations import Ranges, check_names
from fanin.edge.export.formats.int8.folding import Infer
from fanin.edge.export.formats.onnx.ranges import Calibration, measured_ranges
from fanin.edge.export.formats.onnx.slots import COPY, TRANSPOSED, SlotFinder
from fanin.edge.export.refusals import Unconverted, first_line
from fanin.edge.ranges import grid_of
from fanin.edge.runtimes.graphs import parameter_port
from fanin.protos.errors import UnsupportedModel

QUANTIZED: Final = ("Conv", "Gemm", "MatMul")
MATRIX: Final = 2
OUTSIDE: Final = "slot"
"""Location of a slot's external data. No such file exists: the runtime supplies the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Model:
    """The quantized model with empty slots, its slots, and the ranges of its activations."""

    model: onnx.ModelProto
    slots: tuple[Slot, ...]
    ranges: Ranges


def to_int8(
    model: onnx.ModelProto,
    infer: Infer,
    calibration: Calibration,
    kept_float: Collection[str],
    ranges: Ranges | None = None,
) -> Int8Model:
    """Quantize a float model.

    Args:
        model: The model. Moving tensors are initializers, and the inputs are the App's. It is changed.
        infer: The graph behind the model and the sources of its slots.
        calibration: The calibration data.
        kept_float: Parameters whose products stay float.
        ranges: The ranges of activations; None for those of the calibration data.

    Raises:
        UnsupportedModel: A moving tensor becomes neither a float constant nor a known slot.
    """
    parameters = {parameter_port(name): name for name in infer.values}
    kept_float = {port + form for port in map(parameter_port, kept_float) for form in ("", TRANSPOSED)}
    _fold_transposes(model, set(parameters))
    _part_constants(model, kept_float)
    used = {name for node in model.graph.node for name in node.input}
    # The quantizer empties the model that it receives.
    floats = {row.name: numpy_helper.to_array(row) for row in model.graph.initializer}
    products = _quantized_products(model, kept_float)
    if ranges is None:
        ranges = measured_ranges(model, _activations(products), calibration)
        # A tensor without a finite range, as after a mask, has no grid.
        products = [node for node in products if np.isfinite([ranges[name] for name in _activations([node])]).all()]
        ranges = {name: ranges[name] for name in _activations(products)}
    check_names(_activations(products), ranges)
    quantized = _quantize(model, calibration, [node.name for node in products], ranges)
    SlotFinder(quantized, infer).settle_biases(floats)
    slots = SlotFinder(quantized, infer).slots()
    covered = {slot.parameter for slot in slots}
    lost = sorted(name for port, name in parameters.items() if name not in covered and {port, port + TRANSPOSED} & used)
    if lost:
        raise UnsupportedModel(
            f"infer graph: parameters {lost} have no slots after quantization, expected one for each; "
            "please report the module",
            code="FN-0787",
        )
    _empty_slots(quantized, slots)
    return Int8Model(model=quantized, slots=slots, ranges=ranges)


def _quantized_products(model: onnx.ModelProto, kept_float: Collection[str]) -> list[onnx.NodeProto]:
    """Return the products that become int8: their second factor is a constant with a scale for each channel.

    A matrix or a kernel has one. onnxruntime would also quantize a constant of several matrices, one for each head or
    expert, and then refuse to run it.

    Args:
        model: The float model.
        kept_float: Constants whose products stay float.
    """
    num_dims = {value.name: len(value.dims) for value in model.graph.initializer if value.name not in kept_float}
    products = [node for node in model.graph.node if node.op_type in QUANTIZED]
    return [node for node in products if _has_int8(node.op_type, num_dims.get(node.input[1], 0))]


def _activations(products: Sequence[onnx.NodeProto]) -> list[str]:
    """Return the names of the tensors that get a grid: the inputs and outputs of quantized products."""
    return list(dict.fromkeys(name for node in products for name in (node.input[0], node.output[0])))


def _overrides(ranges: Ranges) -> dict[str, list[dict[str, object]]]:
    """Return the grids of these ranges in the form of onnxruntime's quantizer."""
    grids = {name: grid_of(np.float32(low), np.float32(high)) for name, (low, high) in ranges.items()}
    return {
        name: [{"quant_type": QuantType.QInt8, "scale": np.array(scale), "zero_point": np.array(zero_point)}]
        for name, (scale, zero_point) in grids.items()
    }


def _fold_transposes(model: onnx.ModelProto, parameters: set[str]) -> None:
    """Replace a matrix that is transposed before its use by a separate initializer, so that it is quantized."""
    graph = model.graph
    values = {row.name: row for row in graph.initializer if row.name in parameters}
    folded: dict[str, str] = {}
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in values]:
        source = node.input[0]
        if len(values[source].dims) != 2:
            continue
        if source + TRANSPOSED not in folded.values():
            transposed = numpy_helper.to_array(values[source]).T.copy()
            graph.initializer.append(numpy_helper.from_array(transposed, source + TRANSPOSED))
        folded[node.output[0]] = source + TRANSPOSED
        graph.node.remove(node)
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = folded.get(name, name)
    used = {name for node in graph.node for name in node.input}
    for row in [row for row in graph.initializer if row.name not in used]:
        graph.initializer.remove(row)


def _part_constants(model: onnx.ModelProto, kept_float: Collection[str]) -> None:
    """Give each product its own weight and bias.

    The codes of a bias depend on the scale of its product's input. A weight has the same codes in all products. But
    onnxruntime cannot open a graph with exact kernels (``session.x64quantprecision``) if two products share a weight.
    It replaces the weight of each product, and refuses to replace it a second time.

    Args:
        model: The model before quantization. It is changed.
        kept_float: Matrices whose products stay float.
    """
    graph = model.graph
    values = {row.name: row for row in graph.initializer if row.name not in kept_float}
    num_uses: Counter[str] = Counter()
    for node in [node for node in graph.node if node.op_type in QUANTIZED]:
        # The second input is the weight, the third one the bias.
        for index, name in list(enumerate(node.input))[1:3]:
            if name not in values:
                continue
            num_uses[name] += 1
            if num_uses[name] > 1:
                node.input[index] = f"{name}{COPY}{num_uses[name]}"
                graph.initializer.append(
                    numpy_helper.from_array(numpy_helper.to_array(values[name]), node.input[index])
                )


def _quantize(
    model: onnx.ModelProto, calibration: Calibration, products: Sequence[str], ranges: Ranges
) -> onnx.ModelProto:
    excluded = [node.name for node in model.graph.node if node.op_type in QUANTIZED and node.name not in products]
    with tempfile.TemporaryDirectory(prefix="fanin-int8-") as folder, _quiet_quantizer():
        path = Path(folder) / "infer.onnx"
        try:
            quantize_static(
                model,
                path,
                calibration,
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                op_types_to_quantize=list(QUANTIZED),
                nodes_to_exclude=excluded,
                activation_type=QuantType.QInt8,
                weight_type=QuantType.QInt8,
                extra_options={"WeightSymmetric": True, "TensorQuantOverrides": _overrides(ranges)},
            )
        except Exception as exc:  # it runs the graph and raises errors of the runtime's own classes
            raise Unconverted(
                f"infer graph: onnxruntime cannot run it on the calibration data ({first_line(exc)})", code="FN-0784"
            ) from exc
        quantized = onnx.load(path)
    del quantized.graph.value_info[:]
    del quantized.metadata_props[:]
    return quantized


def _has_int8(operator: str, num_dims: int) -> bool:
    return num_dims > 1 if operator == "Conv" else num_dims == MATRIX


@contextmanager
def _quiet_quantizer() -> Iterator[None]:
    """Hide the advice to run another tool first: that tool would fold parameters into each other."""

    def is_ours(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Please consider")

    logger = logging.getLogger()
    logger.addFilter(is_ours)
    try:
        yield
    finally:
        logger.removeFilter(is_ours)


def _empty_slots(model: onnx.ModelProto, slots: Sequence[Slot]) -> None:
    """Take the slots' values out of the file and mark their data as lying outside."""
    names = {slot.initializer for slot in slots}
    for value in [value for value in model.graph.initializer if value.name in names]:
        size = numpy_helper.to_array(value).nbytes
        empty = TensorProto(name=value.name, data_type=value.data_type, dims=value.dims)
        empty.data_location = TensorProto.EXTERNAL
        for key, text in (("location", OUTSIDE), ("offset", "0"), ("length", str(size))):
            empty.external_data.add(key=key, value=text)
        value.CopyFrom(empty)

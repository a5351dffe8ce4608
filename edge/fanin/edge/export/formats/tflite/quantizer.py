"""The walk over the operators of a float ``infer`` graph that writes each again, in int8 where possible."""

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from fanin.edge.export.formats.tflite.bound import PRODUCTS, activation_of, bias_of
from fanin.edge.export.formats.tflite.constants import Constants
from fanin.edge.export.formats.tflite.flatgraph import FlatGraph, Scales
from fanin.edge.export.formats.tflite.ranges import Range, Spans
from fanin.edge.ranges import grid_of
from fanin.edge.tensors import Float32s

MOVES: Final = {"RESHAPE": 1, "TRANSPOSE": 2, "PAD": 2, "MAX_POOL_2D": 2, "AVERAGE_POOL_2D": 2}
"""Operators whose output has the grid of their input, and their versions for int8."""
COMPUTES: Final = {"MEAN": 2, "RELU": 2, "RELU6": 2, "ADD": 2}
"""Operators whose output has its own grid, and their versions for int8."""
NARROWEST: Final = 1e-4
"""A tensor with a narrower range carries no signal yet, but may in a later Version: it stays float."""
FINEST: Final = 2.0**-10
"""Finest grid of a sum relative to those of its terms: runtimes limit the ratio, and a finer grid wastes bits."""


class Quantizer:
    """The quantization of one graph.

    The choice of int8 operators depends on shapes, on the ranges of the export and on the set of slots, but on no
    parameter's value and on no grid: a Version may change both.
    """

    def __init__(self, graph: FlatGraph, constants: Constants, spans: Spans, kept_float: Collection[int]) -> None:
        self._graph, self._constants = graph, constants
        self._widths = {spans.activation(tensor): _width(span) for tensor, span in spans.ranges.items()}
        # An infinite range, as after a mask, has no grid.
        self._grids_of = {
            tensor: _grid(spans.grids[tensor], spans.activation(tensor))
            for tensor, span in spans.ranges.items()
            if NARROWEST <= _width(span) < np.inf
        }
        self._kept_float = kept_float
        self._rows: list[schema.OperatorT] = []
        self._int8: dict[int, int] = {}  # the int8 form of a float tensor
        self._native: set[int] = set()  # float tensors whose int8 form is computed by an operator
        self._grids: dict[int, Scales] = {}  # grids of int8 tensors
        self._floats: set[int] = set()  # tensors that exist in float

    def run(self) -> None:
        """Write all operators again."""
        graph = self._graph
        self._floats |= {port.tensorIndex for port in graph.ports.inputs}
        for row in graph.operators:
            if not self._product(row) and not self._move(row) and not self._compute(row):
                self._keep(row)
        for port in graph.ports.outputs:
            self._float(port.tensorIndex)
        graph.operators = self._rows
        self._constants.grids(self._grids)

    def _weight(self, row: "schema.OperatorT") -> Float32s | None:
        """Return the weight of a product that becomes int8; None if it stays float."""
        if (
            self._graph.kind(row) not in PRODUCTS
            or not {int(row.inputs[0]), int(row.outputs[0])} <= self._grids_of.keys()
        ):
            return None
        tensor, bias = int(row.inputs[1]), bias_of(row)
        value = self._graph.constant(tensor)
        if value is None or value.dtype != np.float32 or tensor in self._kept_float:
            return None
        if not self._constants.fit(tensor, bias):
            return None
        return value.astype(np.float32)

    def _product(self, row: "schema.OperatorT") -> bool:
        graph, weight, output = self._graph, self._weight(row), int(row.outputs[0])
        if weight is None:
            return False
        is_linear, dim = graph.kind(row) == "FULLY_CONNECTED", 0
        if is_linear:
            weight = weight.reshape(weight.shape[0], 1, 1, weight.shape[1])
        elif graph.kind(row) == "DEPTHWISE_CONV_2D":
            dim = weight.ndim - 1
        kernel = self._constants.kernel(int(row.inputs[1]), weight, dim, bias_of(row))
        if kernel is None:
            return False
        x = self._as_int8(int(row.inputs[0]))
        bias = self._constants.bias(bias_of(row), kernel, self._grids[x])
        if not is_linear:
            target = self._computed(output, self._grids_of[output])
            self._again(row, graph.kind(row), 3, [x, kernel.tensor, bias], target)
            return True
        num = int(np.prod(graph.shape(int(row.inputs[0])))) // weight.shape[3]
        x = self._reshaped(x, (num, 1, 1, weight.shape[3]))
        inner = self._tensor((num, 1, 1, weight.shape[0]), self._grids_of[output])
        operator = graph.make("CONV_2D", 3, [x, kernel.tensor, bias], [inner])
        operator.builtinOptionsType, operator.builtinOptions = schema.BuiltinOptions.Conv2DOptions, _pointwise(row)
        self._rows.append(operator)
        target = self._computed(output, self._grids_of[output])
        self._rows.append(self._reshape(inner, target, graph.shape(output)))
        return True

    def _move(self, row: "schema.OperatorT") -> bool:
        kind = self._graph.kind(row)
        if kind not in MOVES or int(row.inputs[0]) not in self._native:
            return False
        source = self._int8[int(row.inputs[0])]
        target = self._computed(int(row.outputs[0]), self._grids[source])
        self._again(row, kind, MOVES[kind], [source, *(int(index) for index in row.inputs[1:])], target)
        return True

    def _compute(self, row: "schema.OperatorT") -> bool:
        kind, output = self._graph.kind(row), int(row.outputs[0])
        if kind not in COMPUTES or output not in self._grids_of:
            return False
        sources = [int(index) for index in row.inputs if self._graph.is_float(int(index))]
        if not self._native.issuperset(sources):
            return False
        grid = self._grids_of[output]
        terms = [self._grids[self._int8[source]].activation for source in sources]
        if self._widths[grid.activation] < FINEST * max(self._widths[term] for term in terms):
            return False
        inputs = [self._int8.get(int(index), int(index)) for index in row.inputs]
        self._again(row, kind, COMPUTES[kind], inputs, self._computed(output, grid))
        return True

    def _again(self, row: "schema.OperatorT", kind: str, version: int, inputs: Sequence[int], output: int) -> None:
        operator = self._graph.make(kind, version, inputs, [output])
        operator.builtinOptionsType, operator.builtinOptions = row.builtinOptionsType, row.builtinOptions
        self._rows.append(operator)

    def _keep(self, row: "schema.OperatorT") -> None:
        for index in row.inputs:
            self._float(int(index))
        self._rows.append(row)
        self._floats |= {int(index) for index in row.outputs}

    def _float(self, tensor: int) -> None:
        """Dequantize a tensor unless it exists in float."""
        if tensor in self._native and tensor not in self._floats:
            self._rows.append(self._graph.make("DEQUANTIZE", 2, [self._int8[tensor]], [tensor]))
            self._floats.add(tensor)

    def _as_int8(self, tensor: int) -> int:
        """Return the int8 form of a tensor, quantized from float if no operator computes it."""
        if tensor not in self._int8:
            quantized = self._tensor(self._graph.shape(tensor), self._grids_of[tensor])
            self._rows.append(self._graph.make("QUANTIZE", 1, [tensor], [quantized]))
            self._int8[tensor] = quantized
        return self._int8[tensor]

    def _computed(self, tensor: int, grid: Scales) -> int:
        """Add the int8 tensor that an operator computes instead of a float tensor."""
        quantized = self._tensor(self._graph.shape(tensor), grid)
        self._int8[tensor] = quantized
        self._native.add(tensor)
        return quantized

    def _reshaped(self, source: int, shape: tuple[int, ...]) -> int:
        quantized = self._tensor(shape, self._grids[source])
        self._rows.append(self._reshape(source, quantized, shape))
        return quantized

    def _reshape(self, source: int, target: int, shape: Sequence[int]) -> "schema.OperatorT":
        size = self._graph.add_constant(np.array(shape, np.int32))
        operator = self._graph.make("RESHAPE", 1, [source, size], [target])
        options = schema.ReshapeOptionsT()
        options.newShape = np.array(shape, np.int32)
        operator.builtinOptionsType, operator.builtinOptions = schema.BuiltinOptions.ReshapeOptions, options
        return operator

    def _tensor(self, shape: Sequence[int], grid: Scales) -> int:
        """Add an int8 tensor with a grid."""
        quantized = self._graph.add_tensor(shape, np.int8, grid)
        self._grids[quantized] = grid
        return quantized


def _width(span: Range) -> float:
    return span.high - span.low


def _grid(span: Range, activation: str) -> Scales:
    """Return the grid of an activation."""
    scale, zero_point = grid_of(np.float32(span.low), np.float32(span.high))
    return Scales(values=np.array([scale], np.float32), zero_point=int(zero_point), activation=activation)


def _pointwise(row: "schema.OperatorT") -> "schema.Conv2DOptionsT":
    """Return the options of a linear layer as those of a 1 x 1 convolution."""
    options = schema.Conv2DOptionsT()
    options.padding = schema.Padding.VALID
    options.strideH = options.strideW = options.dilationHFactor = options.dilationWFactor = 1
    options.fusedActivationFunction = activation_of(row)
    return options

"""The ``infer`` graph of a TFLite file made int8, and its slots found.

Quantization is static and symmetric per output channel for weights, asymmetric per tensor for activations, whose ranges
a float run over the calibration data shows (Jacob et al. 2018, arXiv 1712.05877, section 2). Products with a weight are
quantized, and what stands between them and only moves or adds numbers: so a plain CNN is int8 from its first product to
its last. A norm or an attention keeps its precision, between a DEQUANTIZE and a QUANTIZE::

    x -> QUANTIZE -> CONV_2D(codes, bias codes) -> ... -> DEQUANTIZE -> logits

A linear layer becomes a 1 x 1 convolution: tflite-runtime 2.14 has one scale for a whole matrix only, but one for each
channel of a kernel. The bias that is added after a product becomes its own, with the activation function that follows.

``edge.quantize`` alone says what a slot holds: the file has zeros there.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from fanin.edge.bundles.quantize import with_derived
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.export.int8.folding import Infer
from fanin.edge.export.tflite.bound import Layout, bind_parameters
from fanin.edge.export.tflite.constants import SCALE, Constants, has_scales
from fanin.edge.export.tflite.flatgraph import FlatGraph, Scales, only, pack, places, tidy
from fanin.edge.export.tflite.ranges import Range, measured_ranges
from fanin.edge.runtimes.base import Inputs
from fanin.edge.tensors import Float32s
from fanin.protos.errors import UnsupportedModel

INFER: Final = "infer"
PRODUCTS: Final = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
MOVES: Final = {"RESHAPE": 1, "TRANSPOSE": 2, "PAD": 2, "MAX_POOL_2D": 2, "AVERAGE_POOL_2D": 2}
"""Operators that give what they are given, on the same grid; and their versions for int8."""
COMPUTES: Final = {"MEAN": 2, "RELU": 2, "RELU6": 2, "ADD": 2}
"""Operators that give values on a grid of their own."""
LEVELS: Final = 255
LOWEST: Final = -128
NARROWEST: Final = 1e-4
"""Range of what says nothing over the calibration data, and may say something in a later Version: it stays float."""
FINEST: Final = 2.0**-10
"""Of the grid of what is added: a sum on a finer one would not be worth its bits, and runtimes have limits there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8File:
    """The file with an int8 ``infer`` graph, and its slots."""

    data: bytes
    slots: tuple[Slot, ...]


def quantize_infer(data: bytes, infer: Infer, calibration: Inputs, kept_float: Collection[str]) -> Int8File:
    """Quantize the ``infer`` Signature of a file that has it in float, with what moves as its inputs.

    ``calibration`` is (n, ...); products with the parameters in ``kept_float`` stay float. The slots are zeros. Raises
    UnsupportedModel if the file would be another for another Version, or its slots: nobody would fill that.
    """
    ranges = infer_ranges(data, infer, calibration)
    moved = {name: np.float32(0.5) + np.float32(2.0) * value for name, value in infer.values.items()}
    later = with_derived(moved, infer.derived)
    found, other = (emptied(build_infer(data, infer, values, ranges, kept_float)) for values in (infer.values, later))
    if found != other:
        raise UnsupportedModel("infer graph: parameters are no slots after quantization, please report the module")
    return found


def infer_ranges(data: bytes, infer: Infer, calibration: Inputs) -> Mapping[int, Range]:
    """The ranges of the tensors of ``infer`` in Version 0."""
    model, graph, _ = _bound(data, infer.values, infer.scales)
    return measured_ranges(only(model, INFER), graph.floats(), calibration)


def build_infer(
    data: bytes,
    infer: Infer,
    values: Mapping[str, Float32s],
    ranges: Mapping[int, Range],
    kept_float: Collection[str],
) -> Int8File:
    """The file quantized with these ranges; its slots hold these values, a Version's parameters and what is derived."""
    model, graph, bound = _bound(data, values, infer.scales)
    constants = Constants(graph, bound, values, infer.scales)
    kept = {tensor for tensor, layout in bound.items() if layout.parameter in kept_float}
    _Quantizer(graph, constants, ranges, kept).run()
    for tensor in bound:
        if any(tensor in row.inputs for row in graph.operators):
            constants.floats(tensor)
    constants.fill()
    tidy(model)
    packed = pack(model)
    where = places(packed, INFER)
    return Int8File(data=packed, slots=tuple(_placed(slot, where) for slot in constants.slots))


def emptied(found: Int8File) -> Int8File:
    """The file with zeros in its slots."""
    data = bytearray(found.data)
    for slot in found.slots:
        size = int(np.prod(slot.shape)) * (1 if slot.kind is SlotKind.WEIGHT else 4)
        data[slot.offset : slot.offset + size] = bytes(size)
    return replace(found, data=bytes(data))


def _placed(slot: Slot, where: Mapping[str, tuple[int, int]]) -> Slot:
    constant, scales = where[slot.initializer.removesuffix(SCALE)]
    return replace(slot, offset=scales if slot.initializer.endswith(SCALE) else constant)


def _bound(
    data: bytes, values: Mapping[str, Float32s], scales: Mapping[str, str]
) -> tuple["schema.ModelT", FlatGraph, dict[int, Layout]]:
    """The file opened, what moves as constants, and its biases where they belong."""
    model = schema.ModelT.InitFromPackedBuf(data)
    graph = FlatGraph(model, INFER)
    bound = bind_parameters(graph, values)
    _join_biases(graph, bound, scales)
    return model, graph, bound


def _join_biases(graph: FlatGraph, bound: Mapping[int, Layout], scales: Mapping[str, str]) -> None:
    """Let a product add its bias itself, and apply the activation function that came with the addition.

    Only where the bias has scales to stand on: both move with a Version, or neither, or the frozen weight's are told.
    """
    users = _users(graph)
    rows = graph.operators
    joined = set()
    for row in rows:
        if graph.kind(row) not in PRODUCTS or _activation(row) or not _is_zero(graph, _bias_of(row), bound):
            continue
        output = int(row.outputs[0])
        found = users.get(output, [])
        if len(found) != 1 or graph.kind(found[0]) != "ADD" or graph.ports_hold(output):
            continue
        (addition,) = found
        bias = next((int(index) for index in addition.inputs if int(index) != output), -1)
        value = graph.constant(bias) if bias >= 0 else None
        channels = graph.shape(output)[-1]
        if value is None or value.shape[-1:] != (channels,) or value.size != channels:
            continue
        if not has_scales(bound, scales, int(row.inputs[1]), bias):
            continue
        if graph.shape(int(addition.outputs[0])) != graph.shape(output):
            continue
        row.inputs = np.array([row.inputs[0], row.inputs[1], bias], np.int32)
        row.outputs = addition.outputs
        row.builtinOptions.fusedActivationFunction = addition.builtinOptions.fusedActivationFunction
        joined.add(id(addition))
    graph.operators = [row for row in rows if id(row) not in joined]


def _bias_of(row: "schema.OperatorT") -> int:
    return int(row.inputs[2]) if len(row.inputs) > 2 else -1


def _is_zero(graph: FlatGraph, tensor: int, bound: Mapping[int, Layout]) -> bool:
    """Whether a bias is none, or zero in every Version."""
    if tensor < 0:
        return True
    value = graph.constant(tensor)
    return value is not None and tensor not in bound and not value.any()


def _activation(row: "schema.OperatorT") -> int:
    return int(getattr(row.builtinOptions, "fusedActivationFunction", 0))


def _users(graph: FlatGraph) -> "dict[int, list[schema.OperatorT]]":
    users: dict[int, list[schema.OperatorT]] = {}
    for row in graph.operators:
        for index in row.inputs:
            users.setdefault(int(index), []).append(row)
    return users


class _Quantizer:
    """The walk over the operators: each is written again, in int8 where it can be.

    Which it is depends on shapes, on ranges and on which constants are slots, and on no parameter's value.
    """

    def __init__(
        self, graph: FlatGraph, constants: Constants, ranges: Mapping[int, Range], kept_float: Collection[int]
    ) -> None:
        self._graph, self._constants = graph, constants
        # What is without end, as behind a mask, has no grid either.
        self._grids_of = {
            tensor: _grid(found) for tensor, found in ranges.items() if NARROWEST <= _width(found) < np.inf
        }
        self._kept_float = kept_float
        self._rows: list[schema.OperatorT] = []
        self._int8: dict[int, int] = {}  # from a float tensor to its int8 form
        self._native: set[int] = set()  # float tensors whose int8 form an operator has computed
        self._grids: dict[int, Scales] = {}  # of each int8 tensor
        self._floats: set[int] = set()  # float tensors that are computed

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

    def _weight(self, row: "schema.OperatorT") -> Float32s | None:
        """The weight of a product that becomes int8; None for what stays float."""
        if (
            self._graph.kind(row) not in PRODUCTS
            or not {int(row.inputs[0]), int(row.outputs[0])} <= self._grids_of.keys()
        ):
            return None
        tensor, bias = int(row.inputs[1]), _bias_of(row)
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
        kernel = self._constants.kernel(int(row.inputs[1]), weight, dim, _bias_of(row))
        if kernel is None:
            return False
        x = self._as_int8(int(row.inputs[0]))
        bias = self._constants.bias(_bias_of(row), kernel, float(self._grids[x].values[0]))
        if not is_linear:
            target = self._computed(output, self._grids_of[output])
            self._again(row, graph.kind(row), 3, [x, kernel.tensor, bias], target)
            return True
        num = int(np.prod(graph.shape(int(row.inputs[0])))) // weight.shape[3]
        x = self._reshaped(x, (num, 1, 1, weight.shape[3]))
        inner = graph.add_tensor((num, 1, 1, weight.shape[0]), np.int8, self._grids_of[output])
        made = graph.make("CONV_2D", 3, [x, kernel.tensor, bias], [inner])
        made.builtinOptionsType, made.builtinOptions = schema.BuiltinOptions.Conv2DOptions, _pointwise(row)
        self._rows.append(made)
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
        if grid.values[0] < FINEST * max(self._grids[self._int8[source]].values[0] for source in sources):
            return False
        inputs = [self._int8.get(int(index), int(index)) for index in row.inputs]
        self._again(row, kind, COMPUTES[kind], inputs, self._computed(output, grid))
        return True

    def _again(self, row: "schema.OperatorT", kind: str, version: int, inputs: Sequence[int], output: int) -> None:
        made = self._graph.make(kind, version, inputs, [output])
        made.builtinOptionsType, made.builtinOptions = row.builtinOptionsType, row.builtinOptions
        self._rows.append(made)

    def _keep(self, row: "schema.OperatorT") -> None:
        for index in row.inputs:
            self._float(int(index))
        self._rows.append(row)
        self._floats |= {int(index) for index in row.outputs}

    def _float(self, tensor: int) -> None:
        """Have a tensor in float: it may have been computed in int8 alone."""
        if tensor in self._native and tensor not in self._floats:
            self._rows.append(self._graph.make("DEQUANTIZE", 2, [self._int8[tensor]], [tensor]))
            self._floats.add(tensor)

    def _as_int8(self, tensor: int) -> int:
        """A tensor's int8 form, made from its float form if no operator has computed it."""
        if tensor not in self._int8:
            grid = self._grids_of[tensor]
            made = self._graph.add_tensor(self._graph.shape(tensor), np.int8, grid)
            self._grids[made] = grid
            self._rows.append(self._graph.make("QUANTIZE", 1, [tensor], [made]))
            self._int8[tensor] = made
        return self._int8[tensor]

    def _computed(self, tensor: int, grid: Scales) -> int:
        """The int8 tensor that an operator computes in a float one's place."""
        made = self._graph.add_tensor(self._graph.shape(tensor), np.int8, grid)
        self._grids[made] = grid
        self._int8[tensor] = made
        self._native.add(tensor)
        return made

    def _reshaped(self, source: int, shape: tuple[int, ...]) -> int:
        made = self._graph.add_tensor(shape, np.int8, self._grids[source])
        self._grids[made] = self._grids[source]
        self._rows.append(self._reshape(source, made, shape))
        return made

    def _reshape(self, source: int, target: int, shape: Sequence[int]) -> "schema.OperatorT":
        made = self._graph.make("RESHAPE", 1, [source, self._graph.add_constant(np.array(shape, np.int32))], [target])
        options = schema.ReshapeOptionsT()
        options.newShape = np.array(shape, np.int32)
        made.builtinOptionsType, made.builtinOptions = schema.BuiltinOptions.ReshapeOptions, options
        return made


def _width(found: Range) -> float:
    return found.high - found.low


def _grid(found: Range) -> Scales:
    """255 steps over a range, zero exactly on one."""
    scale = np.float32(_width(found) / LEVELS)
    zero_point = int(np.clip(round(LOWEST - found.low / float(scale)), LOWEST, -LOWEST - 1))
    return Scales(values=np.array([scale], np.float32), zero_point=zero_point)


def _pointwise(row: "schema.OperatorT") -> "schema.Conv2DOptionsT":
    """A linear layer's options as those of a 1 x 1 convolution."""
    options = schema.Conv2DOptionsT()
    options.padding = schema.Padding.VALID
    options.strideH = options.strideW = options.dilationHFactor = options.dilationWFactor = 1
    options.fusedActivationFunction = _activation(row)
    return options

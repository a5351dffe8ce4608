"""A TFLite graph that can be edited: its tensors, constants and operators as objects of the schema.

A tensor that is added here has a name only if it, or its grid, is a slot. ``file.tidy`` stores equal constants once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

from fanin.edge.tensors import Array

TYPES: Final[dict[np.dtype[np.generic], int]] = {np.dtype(np.float32): 0, np.dtype(np.int32): 2, np.dtype(np.int8): 9}
"""Codes of element types (schema.TensorType)."""
DTYPES: Final = {number: dtype for dtype, number in TYPES.items()}
CODES: Final = {
    name: code
    for name, code in vars(schema.BuiltinOperator).items()
    if not name.startswith("_") and isinstance(code, int)
}
NAMES: Final = {code: name for name, code in CODES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The grid of a tensor: one scale and zero point, or one scale for each channel along ``dim``.

    ``activation`` is the name of the range behind the grid; "" for a weight, a bias and a fixed grid.
    """

    values: npt.NDArray[np.float32]
    zero_point: int = 0
    dim: int = 0
    activation: str = ""


class FlatGraph:
    """The graph of one Signature in a model."""

    def __init__(self, model: "schema.ModelT", signature: str) -> None:
        self.model = model
        self.ports = next(row for row in model.signatureDefs if row.signatureKey.decode() == signature)
        self._graph = model.subgraphs[self.ports.subgraphIndex]

    @property
    def operators(self) -> "list[schema.OperatorT]":
        """The operators in execution order."""
        return list(self._graph.operators)

    @operators.setter
    def operators(self, rows: "Iterable[schema.OperatorT]") -> None:
        self._graph.operators = list(rows)

    def ports_hold(self, tensor: int) -> bool:
        """Return whether a tensor is an input or output of the Signature."""
        return any(port.tensorIndex == tensor for port in (*self.ports.inputs, *self.ports.outputs))

    def kind(self, operator: "schema.OperatorT") -> str:
        """Return the name of an operator in the schema."""
        row = self.model.operatorCodes[operator.opcodeIndex]
        return str(NAMES[max(row.builtinCode, row.deprecatedBuiltinCode)])

    def shape(self, tensor: int) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        shape = self._graph.tensors[tensor].shape
        return () if shape is None else tuple(int(size) for size in shape)

    def floats(self) -> list[int]:
        """Return the float tensors that are inputs or computed."""
        tensors = {port.tensorIndex for port in self.ports.inputs}
        tensors |= {int(index) for row in self._graph.operators for index in row.outputs}
        return sorted(index for index in tensors if self.is_float(index))

    def is_float(self, tensor: int) -> bool:
        """Return whether a tensor is float32."""
        return bool(self._graph.tensors[tensor].type == TYPES[np.dtype(np.float32)])

    def constant(self, tensor: int) -> Array | None:
        """Return the value of a constant; None for a computed tensor, or a type other than float32, int32 and int8."""
        row = self._graph.tensors[tensor]
        data = self.model.buffers[row.buffer].data
        if data is None or row.type not in DTYPES:
            return None
        value: Array = np.asarray(data, np.uint8).view(DTYPES[row.type]).reshape(self.shape(tensor))
        return value

    def set_constant(self, tensor: int, value: Array) -> None:
        """Turn a tensor into a constant; it is no longer an input."""
        self._graph.tensors[tensor].buffer = self._buffer(value)
        self._graph.tensors[tensor].shape = np.array(value.shape, np.int32)
        self._graph.inputs = [index for index in self._graph.inputs if index != tensor]
        self.ports.inputs = [port for port in self.ports.inputs if port.tensorIndex != tensor]

    def compute(self, tensor: int) -> None:
        """Turn a constant into a tensor that an operator computes."""
        self._graph.tensors[tensor].buffer = 0

    def set_scales(self, tensor: int, scales: Scales) -> None:
        """Set the grid of a tensor."""
        grid = schema.QuantizationParametersT()
        grid.scale = scales.values.astype(np.float32)
        grid.zeroPoint = np.full(scales.values.shape, scales.zero_point, np.int64)
        grid.quantizedDimension = scales.dim
        self._graph.tensors[tensor].quantization = grid

    def add_tensor(self, shape: Sequence[int], dtype: npt.DTypeLike, scales: Scales | None = None) -> int:
        """Add a tensor that an operator computes. Returns its index."""
        row = schema.TensorT()
        row.shape, row.type, row.buffer = np.array(shape, np.int32), TYPES[np.dtype(dtype)], 0
        row.name, row.hasRank = "", True
        self._graph.tensors.append(row)
        index = len(self._graph.tensors) - 1
        if scales is not None:
            self.set_scales(index, scales)
        return index

    def add_constant(self, value: Array, scales: Scales | None = None, name: str = "") -> int:
        """Add a constant. Returns its index.

        A constant with a name is a slot. The name locates it in the finished file, and no other constant shares its
        bytes.
        """
        tensor = self.add_tensor(value.shape, value.dtype, scales)
        self._graph.tensors[tensor].buffer = self._buffer(value)
        self._graph.tensors[tensor].name = name
        return tensor

    def name(self, tensor: int, name: str) -> None:
        """Give a tensor a name, which makes a constant or the grid of a computed tensor a slot."""
        self._graph.tensors[tensor].name = name

    def make(self, kind: str, version: int, inputs: Sequence[int], outputs: Sequence[int]) -> "schema.OperatorT":
        """Create an operator without options. It is not in the graph yet."""
        operator = schema.OperatorT()
        operator.opcodeIndex = self._code(kind, version)
        operator.inputs, operator.outputs = np.array(inputs, np.int32), np.array(outputs, np.int32)
        return operator

    def _code(self, kind: str, version: int) -> int:
        for index, row in enumerate(self.model.operatorCodes):
            if max(row.builtinCode, row.deprecatedBuiltinCode) == CODES[kind] and row.version == version:
                return index
        code = schema.OperatorCodeT()
        code.builtinCode, code.deprecatedBuiltinCode, code.version = CODES[kind], min(CODES[kind], 127), version
        self.model.operatorCodes.append(code)
        return len(self.model.operatorCodes) - 1

    def _buffer(self, value: Array) -> int:
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
        self.model.buffers.append(buffer)
        return len(self.model.buffers) - 1

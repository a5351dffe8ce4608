"""A TFLite file open for edits: its tensors, constants and operators as the converter's own objects.

What is added here has a name only where one is asked for, and a constant's bytes stand in the file once, however many
tensors hold them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import flatbuffers
import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

from fanin.edge.tensors import Array

IDENTIFIER: Final = b"TFL3"
TYPES: Final[dict[np.dtype[np.generic], int]] = {np.dtype(np.float32): 0, np.dtype(np.int32): 2, np.dtype(np.int8): 9}
"""Numbers of element types (schema.TensorType)."""
DTYPES: Final = {number: dtype for dtype, number in TYPES.items()}
CODES: Final = {
    name: code
    for name, code in vars(schema.BuiltinOperator).items()
    if not name.startswith("_") and isinstance(code, int)
}
NAMES: Final = {code: name for name, code in CODES.items()}
SCALE_FIELD: Final = 8
DATA_FIELD: Final = 4
"""Places of ``scale`` and ``data`` in the tables QuantizationParameters and Buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """A tensor's grid: one scale and zero point, or one scale for each channel along ``dim``."""

    values: npt.NDArray[np.float32]
    zero_point: int = 0
    dim: int = 0


class FlatGraph:
    """One subgraph of a file, for a Signature."""

    def __init__(self, model: "schema.ModelT", signature: str) -> None:
        self.model = model
        self.ports = next(found for found in model.signatureDefs if found.signatureKey.decode() == signature)
        self._graph = model.subgraphs[self.ports.subgraphIndex]

    @property
    def operators(self) -> "list[schema.OperatorT]":
        """The operators, in the order in which they run."""
        return list(self._graph.operators)

    @operators.setter
    def operators(self, found: "Iterable[schema.OperatorT]") -> None:
        self._graph.operators = list(found)

    def ports_hold(self, tensor: int) -> bool:
        """Whether a tensor is an input or output of the Signature."""
        return any(port.tensorIndex == tensor for port in (*self.ports.inputs, *self.ports.outputs))

    def kind(self, operator: "schema.OperatorT") -> str:
        """An operator's name, as in the schema."""
        row = self.model.operatorCodes[operator.opcodeIndex]
        return str(NAMES[max(row.builtinCode, row.deprecatedBuiltinCode)])

    def shape(self, tensor: int) -> tuple[int, ...]:
        """A tensor's shape."""
        found = self._graph.tensors[tensor].shape
        return () if found is None else tuple(int(size) for size in found)

    def floats(self) -> list[int]:
        """The float tensors that are given or computed."""
        found = {port.tensorIndex for port in self.ports.inputs}
        found |= {int(index) for row in self._graph.operators for index in row.outputs}
        return sorted(index for index in found if self.is_float(index))

    def is_float(self, tensor: int) -> bool:
        """Whether a tensor is of float32."""
        return bool(self._graph.tensors[tensor].type == TYPES[np.dtype(np.float32)])

    def constant(self, tensor: int) -> Array | None:
        """A constant's value; None for what is computed, or of a type that is of no interest here."""
        row = self._graph.tensors[tensor]
        data = self.model.buffers[row.buffer].data
        if data is None or row.type not in DTYPES:
            return None
        found: Array = np.asarray(data, np.uint8).view(DTYPES[row.type]).reshape(self.shape(tensor))
        return found

    def set_constant(self, tensor: int, value: Array) -> None:
        """Make a tensor a constant; it is no input any more."""
        self._graph.tensors[tensor].buffer = self._buffer(value)
        self._graph.tensors[tensor].shape = np.array(value.shape, np.int32)
        self._graph.inputs = [index for index in self._graph.inputs if index != tensor]
        self.ports.inputs = [port for port in self.ports.inputs if port.tensorIndex != tensor]

    def compute(self, tensor: int) -> None:
        """Let a constant be a tensor that an operator computes."""
        self._graph.tensors[tensor].buffer = 0

    def set_scales(self, tensor: int, scales: Scales) -> None:
        """Give a tensor another grid."""
        grid = schema.QuantizationParametersT()
        grid.scale = scales.values.astype(np.float32)
        grid.zeroPoint = np.full(scales.values.shape, scales.zero_point, np.int64)
        grid.quantizedDimension = scales.dim
        self._graph.tensors[tensor].quantization = grid

    def add_tensor(self, shape: Sequence[int], dtype: npt.DTypeLike, scales: Scales | None = None) -> int:
        """A tensor that some operator computes."""
        made = schema.TensorT()
        made.shape, made.type, made.buffer = np.array(shape, np.int32), TYPES[np.dtype(dtype)], 0
        made.name, made.hasRank = "", True
        self._graph.tensors.append(made)
        index = len(self._graph.tensors) - 1
        if scales is not None:
            self.set_scales(index, scales)
        return index

    def add_constant(self, value: Array, scales: Scales | None = None, name: str = "") -> int:
        """A tensor that is a constant; with a name it is found again in the finished file, and shares its bytes with
        no other."""
        tensor = self.add_tensor(value.shape, value.dtype, scales)
        self._graph.tensors[tensor].buffer = self._buffer(value)
        self._graph.tensors[tensor].name = name
        return tensor

    def name(self, tensor: int, name: str) -> None:
        """Give a constant a name."""
        self._graph.tensors[tensor].name = name

    def make(self, kind: str, version: int, inputs: Sequence[int], outputs: Sequence[int]) -> "schema.OperatorT":
        """An operator without options."""
        made = schema.OperatorT()
        made.opcodeIndex = self._code(kind, version)
        made.inputs, made.outputs = np.array(inputs, np.int32), np.array(outputs, np.int32)
        return made

    def _code(self, kind: str, version: int) -> int:
        for index, row in enumerate(self.model.operatorCodes):
            if max(row.builtinCode, row.deprecatedBuiltinCode) == CODES[kind] and row.version == version:
                return index
        made = schema.OperatorCodeT()
        made.builtinCode, made.deprecatedBuiltinCode, made.version = CODES[kind], min(CODES[kind], 127), version
        self.model.operatorCodes.append(made)
        return len(self.model.operatorCodes) - 1

    def _buffer(self, value: Array) -> int:
        made = schema.BufferT()
        made.data = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
        self.model.buffers.append(made)
        return len(self.model.buffers) - 1


def only(model: "schema.ModelT", signature: str) -> bytes:
    """A file with one Signature of this one."""
    alone = schema.ModelT.InitFromPackedBuf(pack(model))
    found = next(row for row in alone.signatureDefs if row.signatureKey.decode() == signature)
    alone.subgraphs, alone.signatureDefs = [alone.subgraphs[found.subgraphIndex]], [found]
    found.subgraphIndex = 0
    return pack(alone)


def pack(model: "schema.ModelT") -> bytes:
    """The file's bytes."""
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


def tidy(model: "schema.ModelT") -> None:
    """Leave out what no operator or port uses, and write equal constants once."""
    for graph in model.subgraphs:
        used = {int(index) for row in graph.operators for part in (row.inputs, row.outputs) for index in part}
        used |= {int(index) for part in (graph.inputs, graph.outputs) for index in part} - {-1}
        kept = {old: new for new, old in enumerate(sorted(used - {-1}))} | {-1: -1}
        graph.tensors = [graph.tensors[old] for old in sorted(used - {-1})]
        for row in graph.operators:
            row.inputs = np.array([kept[int(index)] for index in row.inputs], np.int32)
            row.outputs = np.array([kept[int(index)] for index in row.outputs], np.int32)
        graph.inputs = np.array([kept[int(index)] for index in graph.inputs], np.int32)
        graph.outputs = np.array([kept[int(index)] for index in graph.outputs], np.int32)
        for ports in (found for found in model.signatureDefs if model.subgraphs[found.subgraphIndex] is graph):
            for port in (*ports.inputs, *ports.outputs):
                port.tensorIndex = kept[port.tensorIndex]
    _share_buffers(model)
    _drop_codes(model)


def _share_buffers(model: "schema.ModelT") -> None:
    """Number the buffers anew: 0 is the empty one, and what is equal has one number."""
    empty = schema.BufferT()
    buffers, known = [empty], {b"": 0}
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            data = model.buffers[tensor.buffer].data
            if tensor.name:
                # A slot: what stands there now may equal another's, and will not later.
                buffers.append(model.buffers[tensor.buffer])
                tensor.buffer = len(buffers) - 1
                continue
            key = b"" if data is None else np.asarray(data, np.uint8).tobytes()
            if key not in known:
                known[key] = len(buffers)
                buffers.append(model.buffers[tensor.buffer])
            tensor.buffer = known[key]
    model.buffers = buffers


def _drop_codes(model: "schema.ModelT") -> None:
    used = sorted({row.opcodeIndex for graph in model.subgraphs for row in graph.operators})
    model.operatorCodes = [model.operatorCodes[index] for index in used]
    for graph in model.subgraphs:
        for row in graph.operators:
            row.opcodeIndex = used.index(row.opcodeIndex)


def places(data: bytes, signature: str) -> dict[str, tuple[int, int]]:
    """Where the constant and the scales of each named tensor of a Signature lie: (offset, offset), -1 for none."""
    model = schema.Model.GetRootAs(data, 0)
    defs = (model.SignatureDefs(index) for index in range(model.SignatureDefsLength()))
    found = next(row for row in defs if row.SignatureKey().decode() == signature)
    graph = model.Subgraphs(found.SubgraphIndex())
    where = {}
    for index in range(graph.TensorsLength()):
        tensor = graph.Tensors(index)
        name = tensor.Name().decode()
        if name:
            grid = tensor.Quantization()
            where[name] = (
                _vector(model.Buffers(tensor.Buffer())._tab, DATA_FIELD),
                -1 if grid is None else _vector(grid._tab, SCALE_FIELD),
            )
    return where


def _vector(table: "flatbuffers.table.Table", field: int) -> int:
    """Where a table's vector begins; -1 if it has none."""
    offset = table.Offset(field)
    return int(table.Vector(offset)) if offset else -1

"""The file form of a TFLite model: its bytes without unneeded parts, and the positions of its constants."""

import copy
from dataclasses import dataclass
from typing import Final

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

IDENTIFIER: Final = b"TFL3"
SCALE_FIELD, ZERO_POINT_FIELD = 8, 10
DATA_FIELD: Final = 4
"""Offsets of ``scale``, ``zero_point`` and ``data`` in the tables QuantizationParameters and Buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """Positions of the parts of a tensor in a file; -1 for none."""

    constant: int
    scales: int
    zero_points: int


def only(model: "schema.ModelT", signature: str) -> bytes:
    """Return a file with one Signature of this model."""
    # Shallow copies, because a deep one would take longer than all other steps here.
    alone = copy.copy(model)
    ports = copy.copy(next(row for row in model.signatureDefs if row.signatureKey.decode() == signature))
    alone.subgraphs, alone.signatureDefs = [model.subgraphs[ports.subgraphIndex]], [ports]
    ports.subgraphIndex = 0
    return pack(alone)


def copied(model: "schema.ModelT") -> "schema.ModelT":
    """Return a copy whose graphs can be edited. Reading a file again would take ten times as long.

    Contents of buffers, shapes and grids are shared: an edit replaces them.
    """
    other = copy.copy(model)
    other.buffers, other.operatorCodes = list(model.buffers), list(model.operatorCodes)
    other.subgraphs = [copy.copy(graph) for graph in model.subgraphs]
    for graph in other.subgraphs:
        graph.tensors = [copy.copy(tensor) for tensor in graph.tensors]
        graph.operators = [copy.copy(row) for row in graph.operators]
        for row in graph.operators:
            row.builtinOptions = copy.copy(row.builtinOptions)
    other.signatureDefs = [copy.copy(ports) for ports in model.signatureDefs]
    for ports in other.signatureDefs:
        ports.inputs = [copy.copy(port) for port in ports.inputs]
        ports.outputs = [copy.copy(port) for port in ports.outputs]
    return other


def pack(model: "schema.ModelT") -> bytes:
    """Return the bytes of a model."""
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


def tidy(model: "schema.ModelT") -> None:
    """Remove everything that no operator or port uses, and store equal constants once."""
    for graph in model.subgraphs:
        used = {int(index) for row in graph.operators for part in (row.inputs, row.outputs) for index in part}
        used |= {int(index) for part in (graph.inputs, graph.outputs) for index in part} - {-1}
        new_positions = {old: new for new, old in enumerate(sorted(used - {-1}))} | {-1: -1}
        graph.tensors = [graph.tensors[old] for old in sorted(used - {-1})]
        for row in graph.operators:
            row.inputs = np.array([new_positions[int(index)] for index in row.inputs], np.int32)
            row.outputs = np.array([new_positions[int(index)] for index in row.outputs], np.int32)
        graph.inputs = np.array([new_positions[int(index)] for index in graph.inputs], np.int32)
        graph.outputs = np.array([new_positions[int(index)] for index in graph.outputs], np.int32)
        for ports in (row for row in model.signatureDefs if model.subgraphs[row.subgraphIndex] is graph):
            for port in (*ports.inputs, *ports.outputs):
                port.tensorIndex = new_positions[port.tensorIndex]
    _share_buffers(model)
    _drop_codes(model)


def _share_buffers(model: "schema.ModelT") -> None:
    """Renumber the buffers: 0 is the empty one, and equal contents have one number."""
    empty = schema.BufferT()
    buffers, known = [empty], {b"": 0}
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            data = model.buffers[tensor.buffer].data
            if tensor.name and tensor.buffer:
                # A slot: its content may equal another one now, but not in a later Version.
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


def offsets(data: bytes, signature: str) -> dict[str, Offsets]:
    """Return the offsets of each named tensor of a Signature."""
    model = schema.Model.GetRootAs(data, 0)
    defs = (model.SignatureDefs(index) for index in range(model.SignatureDefsLength()))
    ports = next(row for row in defs if row.SignatureKey().decode() == signature)
    graph = model.Subgraphs(ports.SubgraphIndex())
    by_name = {}
    for index in range(graph.TensorsLength()):
        tensor = graph.Tensors(index)
        name = tensor.Name().decode()
        if name:
            grid = tensor.Quantization()
            by_name[name] = Offsets(
                constant=_vector(model.Buffers(tensor.Buffer())._tab, DATA_FIELD),
                scales=-1 if grid is None else _vector(grid._tab, SCALE_FIELD),
                zero_points=-1 if grid is None else _vector(grid._tab, ZERO_POINT_FIELD),
            )
    return by_name


def _vector(table: "flatbuffers.table.Table", field: int) -> int:
    """Return the offset of a table's vector; -1 if it has none."""
    offset = table.Offset(field)
    return int(table.Vector(offset)) if offset else -1

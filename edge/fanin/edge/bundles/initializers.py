"""The constants and nodes of an ONNX file, read without the onnx package. Constants can be replaced, grids removed.

A protobuf message is a sequence of fields, each a key and a value::

    key      varint: field number << 3 | wire type
    value    0: varint    1: 8 bytes    2: varint length, then as many bytes    5: 4 bytes

Only the path to the constants is parsed, with these field numbers of ONNX's schema. All other bytes are copied::

    Model    graph = 7
    Graph    node = 1, initializer = 5, output = 12
    Node     input = 1, output = 2, name = 3, op_type = 4, attribute = 5, domain = 7
    Attr     g = 6, graphs = 11 (the branches and bodies of If, Loop and Scan)
    Tensor   dims = 1, data_type = 2, name = 8, raw_data = 9, external_data = 13, data_location = 14

Reference:
    protobuf.dev, "Encoding".
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final

from fanin.edge.bundles.quantize import SlotValue
from fanin.protos.errors import InvalidBundle

GRAPH: Final = 7
NODE: Final = 1
OUTPUT: Final = 12
INPUTS, RESULTS = 1, 2
NODE_NAME, OPERATOR, ATTRIBUTE, DOMAIN = 3, 4, 5, 7
INNER_GRAPHS: Final = (6, 11)
OWN_DOMAINS: Final = ("", "ai.onnx")
"""The names of ONNX's own set of operators."""
MAX_DEPTH: Final = 8
"""Most graphs within graphs. A file could nest thousands."""
INITIALIZER: Final = 5
DIMS, DATA_TYPE, NAME, RAW_DATA, EXTERNAL_DATA, DATA_LOCATION = 1, 2, 8, 9, 13, 14
EXTERNAL: Final = 1
DTYPES: Final = MappingProxyType({1: "float32", 3: "int8", 6: "int32"})
"""Element types of slots by their ONNX number."""
NOWHERE: Final = "slots"
VARINT, BYTES = 0, 2
FIXED: Final = MappingProxyType({1: 8, 5: 4})
"""Size in bytes of the wire types with a fixed length."""
MAX_VARINT_BYTES: Final = 10
NO_DIMS: Final = b"\x0a\x08keepdims\x18\x00\xa0\x01\x02"
"""The attribute keepdims = 0 (name 1, i 3, type 20: INT) of a reduction over all dimensions."""
SCALAR: Final = b"\x0a\x04\x08\x01\x12\x00"
"""The type of a float32 scalar: tensor_type 1 with elem_type 1 and an empty shape 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Element type and shape of a constant; ``dtype`` is "" for an element type that no slot has."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """One use of an operator in a graph.

    Attributes:
        operator: Name of the operator; ``domain::name`` if it is not of ONNX's own set.
        name: Name of the node; "" if the file has none.
    """

    operator: str
    name: str

    @property
    def module(self) -> str:
        """The module that the node comes from, by the node's name ``module/node``; "" if the name has no module."""
        return self.name.rpartition("/")[0].strip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """A field: its number, wire type, content (``value`` of a varint or ``payload``) and complete encoding."""

    number: int
    wire: int
    value: int
    payload: bytes
    encoding: bytes


def list_constants(model: bytes, what: str) -> dict[str, Constant]:
    """Return the constants of an ONNX file by name. Raises InvalidBundle for a file that does not parse."""
    graphs = (field.payload for field in _fields(model, what) if field.number == GRAPH)
    return dict(
        _tensor(field.payload, what)
        for graph in graphs
        for field in _fields(graph, what)
        if field.number == INITIALIZER
    )


def list_nodes(model: bytes, what: str) -> list[GraphNode]:
    """Return the nodes of an ONNX file, and of the graphs within them, in their order.

    Raises InvalidBundle for a file that does not parse.
    """
    graphs = (field.payload for field in _fields(model, what) if field.number == GRAPH)
    return [node for graph in graphs for node in _nodes(graph, what, MAX_DEPTH)]


def _nodes(graph: bytes, what: str, depth: int) -> Iterator[GraphNode]:
    if depth == 0:
        raise InvalidBundle(
            f"{what}: got graphs within graphs, expected at most {MAX_DEPTH - 1} levels of them", code="FN-0330"
        )
    for row in _fields(graph, what):
        if row.number != NODE:
            continue
        texts, inner = {}, []
        for field in _fields(row.payload, what):
            if field.number in (NODE_NAME, OPERATOR, DOMAIN):
                texts[field.number] = field.payload.decode("utf-8", "replace")
            elif field.number == ATTRIBUTE:
                inner += [part.payload for part in _fields(field.payload, what) if part.number in INNER_GRAPHS]
        operator, domain = texts.get(OPERATOR, ""), texts.get(DOMAIN, "")
        full = operator if domain in OWN_DOMAINS else f"{domain}::{operator}"
        yield GraphNode(operator=full, name=texts.get(NODE_NAME, ""))
        for payload in inner:
            yield from _nodes(payload, what, depth - 1)


def fill_constants(model: bytes, values: Mapping[str, SlotValue], what: str) -> bytes:
    """Return a copy of an ONNX file with these values stored inside it. Raises InvalidBundle for an unknown name."""
    data = {name: value.astype(value.dtype.newbyteorder("<")).tobytes() for name, value in values.items()}
    return _replaced(model, data, what)


def empty_constants(model: bytes, names: Collection[str], what: str) -> bytes:
    """Return a copy of an ONNX file in which these constants have external data, which a runtime supplies on opening.

    Raises InvalidBundle for an unknown name.
    """
    return _replaced(model, dict.fromkeys(names), what)


def without_grids(model: bytes, scales: Mapping[str, str], what: str) -> tuple[bytes, dict[str, tuple[str, str]]]:
    """Return a copy of an ONNX file whose activations are float, and whose outputs are their lowest and highest values.

    A pair of QuantizeLinear and DequantizeLinear rounds an activation to its grid. The copy has no such pairs. Weights
    keep theirs, because no QuantizeLinear computes their codes.

    Args:
        model: The file.
        scales: The activation behind the scale of each QuantizeLinear, by the name of the scale. Others keep their
            grids.
        what: Prefix of error messages.

    Returns:
        The copy, and the names of its outputs for each activation, scalars: the lowest and the highest value.

    Raises:
        InvalidBundle: The file does not parse, or lacks an activation.
    """
    parts, outputs = [], dict[str, tuple[str, str]]()
    for field in _fields(model, what):
        if field.number == GRAPH:
            graph, outputs = _float_graph(field.payload, scales, what)
            parts.append(_bytes(GRAPH, graph))
        else:
            parts.append(field.encoding)
    if missing := sorted({*scales.values()} - {*outputs}):
        raise InvalidBundle(
            f"{what}: got no QuantizeLinear for the activations {missing}, expected one for each, with the scale that "
            "its slot names",
            code="FN-0335",
        )
    return b"".join(parts), outputs


def _float_graph(graph: bytes, scales: Mapping[str, str], what: str) -> tuple[bytes, dict[str, tuple[str, str]]]:
    nodes, tensors, unused = [], dict[str, str](), set[str]()
    # Nodes are in the order of their execution, so the origin of an input is known before its users.
    origins: dict[str, str] = {}
    fields = list(_fields(graph, what))
    for rows in (list(_fields(field.payload, what)) for field in fields if field.number == NODE):
        inputs, results, operators = (
            [row.payload.decode("utf-8", "replace") for row in rows if row.number == number]
            for number in (INPUTS, RESULTS, OPERATOR)
        )
        if operators == ["QuantizeLinear"] and inputs[1] in scales:
            tensors[scales[inputs[1]]] = origins[results[0]] = origins.get(inputs[0], inputs[0])
            unused |= {*inputs[1:]}
        elif operators == ["DequantizeLinear"] and inputs[0] in origins:
            origins[results[0]] = origins[inputs[0]]
        else:
            names = iter(origins.get(name, name) for name in inputs)
            kept = (_bytes(INPUTS, next(names).encode()) if row.number == INPUTS else row.encoding for row in rows)
            nodes.append(_bytes(NODE, b"".join(kept)))
    others = (
        field.encoding
        for field in fields
        if field.number not in (NODE, OUTPUT)
        and not (field.number == INITIALIZER and _tensor(field.payload, what)[0] in unused)
    )
    outputs = {name: (f"lowest:{number}", f"highest:{number}") for number, name in enumerate(tensors)}
    for name in outputs:
        for operator, output in zip(("ReduceMin", "ReduceMax"), outputs[name], strict=True):
            texts = ((INPUTS, tensors[name]), (RESULTS, output), (OPERATOR, operator))
            node = b"".join(_bytes(number, text.encode()) for number, text in texts)
            nodes.append(_bytes(NODE, node + _bytes(ATTRIBUTE, NO_DIMS)))
    ports = (
        _bytes(OUTPUT, _bytes(1, result.encode()) + _bytes(2, SCALAR)) for row in outputs.values() for result in row
    )
    return b"".join([*nodes, *others, *ports]), outputs


def _replaced(model: bytes, data: Mapping[str, bytes | None], what: str) -> bytes:
    """Return a copy with new data for some constants; None marks external data."""
    missing = sorted(set(data) - set(list_constants(model, what)))
    if missing:
        raise InvalidBundle(
            f"{what}: got no constants {missing}, expected them because slots name them", code="FN-0335"
        )
    parts = []
    for field in _fields(model, what):
        if field.number != GRAPH:
            parts.append(field.encoding)
            continue
        graph = []
        for inner in _fields(field.payload, what):
            name, constant = _tensor(inner.payload, what) if inner.number == INITIALIZER else ("", None)
            if constant is None or name not in data:
                graph.append(inner.encoding)
            else:
                graph.append(_bytes(INITIALIZER, _with_data(inner.payload, constant, data[name], what)))
        parts.append(_bytes(GRAPH, b"".join(graph)))
    return b"".join(parts)


def _with_data(tensor: bytes, constant: Constant, data: bytes | None, what: str) -> bytes:
    header = b"".join(field.encoding for field in _fields(tensor, what) if field.number in (DIMS, DATA_TYPE, NAME))
    if data is not None:
        return header + _bytes(RAW_DATA, data)
    size = str(prod(constant.shape) * (1 if constant.dtype == "int8" else 4))
    entries = (("location", NOWHERE), ("offset", "0"), ("length", size))
    rows = (_bytes(1, key.encode()) + _bytes(2, value.encode()) for key, value in entries)
    return (
        header + b"".join(_bytes(EXTERNAL_DATA, row) for row in rows) + _varint(DATA_LOCATION << 3) + _varint(EXTERNAL)
    )


def _tensor(data: bytes, what: str) -> tuple[str, Constant]:
    name, dtype = "", ""
    dims: list[int] = []
    for field in _fields(data, what):
        if field.number == NAME:
            name = field.payload.decode("utf-8", "replace")
        elif field.number == DATA_TYPE:
            dtype = DTYPES.get(field.value, "")
        elif field.number == DIMS:
            # Protobuf permits both the packed and the unpacked form.
            dims += _varints(field.payload, what) if field.wire == BYTES else [field.value]
    return name, Constant(dtype=dtype, shape=tuple(dims))


def _fields(data: bytes, what: str) -> Iterator[_Field]:
    position = 0
    while position < len(data):
        start = position
        key, position = _read_varint(data, position, what)
        wire, value, payload = key & 7, 0, b""
        if wire == VARINT:
            value, position = _read_varint(data, position, what)
        elif wire == BYTES:
            length, position = _read_varint(data, position, what)
            payload, position = data[position : position + length], position + length
        elif wire in FIXED:
            position += FIXED[wire]
        else:
            raise InvalidBundle(
                f"{what}: not an ONNX file (wire type {wire} at byte {start}); export it again", code="FN-0330"
            )
        if position > len(data):
            raise InvalidBundle(
                f"{what}: the ONNX file is cut off ({len(data)} bytes, expected {position} or more); export it again",
                code="FN-0330",
            )
        yield _Field(number=key >> 3, wire=wire, value=value, payload=payload, encoding=data[start:position])


def _read_varint(data: bytes, position: int, what: str) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[position : position + MAX_VARINT_BYTES]):
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, position + index + 1
    raise InvalidBundle(
        f"{what}: not an ONNX file, or it is cut off (at byte {position}); export it again", code="FN-0330"
    )


def _varints(data: bytes, what: str) -> list[int]:
    values, position = [], 0
    while position < len(data):
        value, position = _read_varint(data, position, what)
        values.append(value)
    return values


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def _bytes(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | BYTES) + _varint(len(payload)) + payload

"""Layouts: views, flattening, and each possible fault of canonical bytes."""

import json
import struct

import numpy as np
import pytest
from support.errors import raises
from support.values import TABLE, parameters

from fanin.edge.tensors import (
    MAGIC,
    MAX_VALUES,
    TensorSpec,
    TensorTable,
    decode_parameters,
    encode_parameters,
    sha256_hex,
)
from fanin.protos.errors import InvalidInput


def bytes_with_header(header: str, num_values: int = 0) -> bytes:
    """Return canonical bytes with this header."""
    text = header.encode()
    text += b" " * (-(12 + len(text)) % 64)
    return MAGIC + struct.pack("<I", len(text)) + text + bytes(4 * num_values)


def test_views_are_in_name_order_and_no_copies() -> None:
    table = TensorTable.of({"b": (2,), "a": (2, 2), "c": ()})
    flat = np.arange(7, dtype=np.float32)
    views = table.views(flat)
    assert {name: view.tolist() for name, view in views.items()} == {"a": [[0, 1], [2, 3]], "b": [4, 5], "c": 6}
    views["b"][0] = 9
    assert flat[4] == 9
    assert table.offsets == (0, 4, 6)


def test_flatten_is_the_inverse_of_views() -> None:
    flat = parameters()
    assert TABLE.flatten(TABLE.views(flat)).tobytes() == flat.tobytes()


def test_a_callers_mistakes_are_value_errors() -> None:
    views = TABLE.views(parameters())
    with raises(ValueError, "flat vector: got shape (10,), expected (11,)"):
        TABLE.views(np.zeros(10, np.float32))
    with raises(ValueError, "flat vector: got shape (10,), expected (11,)"):
        encode_parameters(TABLE, np.zeros(10, np.float32))
    with raises(ValueError, "tensors: got names ['a', 'b'], expected ['a', 'b', 'c']"):
        TABLE.flatten({"a": views["a"], "b": views["b"]})
    with raises(ValueError, "tensor 'b': got shape (5,), expected (4,)"):
        TABLE.flatten(views | {"b": np.zeros(5, np.float32)})
    with raises(ValueError, "tensor table: names must be unique and in rising order"):
        TensorTable((TensorSpec(name="b", shape=()), TensorSpec(name="a", shape=())))
    with raises(ValueError, "tensor name: got an empty one"):
        TensorSpec(name="", shape=())


@pytest.mark.parametrize("shape", [(-1,), (1,) * 9, (MAX_VALUES, 2), (0, 1 << 62), (1 << 90, 0)])
def test_a_shape_that_numpy_could_not_hold_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^tensor 'a': got shape \(.*expected at most 8 dimensions, none negative"):
        TensorSpec(name="a", shape=shape)


def test_a_table_that_is_too_large_in_all_is_refused() -> None:
    with raises(ValueError, f"tensor table: got {MAX_VALUES + 1} values, expected at most {MAX_VALUES}"):
        TensorTable.of({"a": (MAX_VALUES,), "b": ()})


def test_the_layout_of_the_bytes() -> None:
    table = TensorTable.of({"b": (1,), "\u00e4": ()})
    data = encode_parameters(table, np.array([1.0, -2.0], np.float32))
    text = b'[["b",[1]],["\xc3\xa4",[]]]'
    assert data == b"fanin-t2\x34\0\0\0" + text.ljust(52) + b"\0\0\x80\x3f\0\0\0\xc0"


@pytest.mark.parametrize("name", ["a" * length for length in range(1, 66)], ids=len)
def test_decoded_values_are_aligned(name: str) -> None:
    table = TensorTable.of({name: (3,)})
    data = encode_parameters(table, np.ones(3, np.float32))
    assert len(table.header()) % 64 == 0 and len(data) - len(table.header()) == 12
    _, values = decode_parameters(data)
    assert values.ctypes.data % 16 == 0


UNPADDED = MAGIC + struct.pack("<I", 11) + b'[["a",[1]]]' + bytes(4)
WRONG = [
    (b"", "parameters: got magic b'', expected b'fanin-t2'"),
    (b"fanin-t1" + bytes(10), "parameters: got magic b'fanin-t1', expected b'fanin-t2'"),
    (MAGIC + b"\0\0", "parameters: got 10 bytes, expected at least 12"),
    (MAGIC + struct.pack("<I", 3) + b"[]", "parameters: got a header of 3 bytes, expected at most 2"),
    (bytes_with_header('[["a",[1]]]' + 64 * " "), "parameters: the header is not in canonical form"),
    (bytes_with_header('[["a",[1]]]' + 41 * " " + "\n"), "parameters: the header is not in canonical form"),
    (bytes_with_header(' [["a",[1]]]'), "parameters: the header is not in canonical form"),
    (UNPADDED, "parameters: the header is not in canonical form"),
    (bytes_with_header('[["a", [1]]]'), "parameters: the header is not in canonical form"),
    (bytes_with_header('[["a",[1],0]]'), "parameters: the header is not in canonical form"),
    (bytes_with_header('[["\\u0061",[1]]]'), "parameters: the header is not in canonical form"),
    (bytes_with_header('[["a",[-0]]]'), "parameters: the header is not in canonical form"),
    (bytes_with_header('[["a",[1]]]'), "parameters: got 0 bytes of values, expected 4"),
    (bytes_with_header('[["a",[1]]]', 2), "parameters: got 8 bytes of values, expected 4"),
    (
        bytes_with_header('[["b",[]],["a",[]]]'),
        "parameters: the header does not parse (tensor table: names must be unique and in rising order)",
    ),
    (
        bytes_with_header('[["a",[true]]]'),
        "parameters: the header does not parse (tensor shape: expected a list of integers)",
    ),
    (
        bytes_with_header('[["a",[1.0]]]'),
        "parameters: the header does not parse (tensor shape: expected a list of integers)",
    ),
    (
        bytes_with_header("[[1,[]]]"),
        "parameters: the header does not parse (tensor name: got int, expected a string)",
    ),
    (bytes_with_header('[["a"]]'), "parameters: the header does not parse (list index out of range)"),
]


@pytest.mark.parametrize(("data", "text"), WRONG)
def test_anything_but_canonical_bytes_is_refused(data: bytes, text: str) -> None:
    with raises(InvalidInput, text):
        decode_parameters(data)


@pytest.mark.parametrize(
    "header",
    [
        '[["\\ud800",[]]]',
        "[" * 100_000,
        '[["a",[' + "9" * 5000 + "]]]",
        '{"a":[1]}',
        "3",
        '[["a",[0,' + "9" * 40 + "]]]",
    ],
    ids=["half a surrogate pair", "deep", "long number", "object", "number", "empty but huge"],
)
def test_hostile_headers_do_not_parse(header: str) -> None:
    with pytest.raises(InvalidInput, match="FN-0355"):
        decode_parameters(bytes_with_header(header))


def test_decoded_values_cannot_be_written() -> None:
    _, values = decode_parameters(encode_parameters(TABLE, parameters()))
    assert not values.flags.writeable


def test_the_header_is_json() -> None:
    header = TABLE.header()
    assert json.loads(header[12:]) == [["a", [2, 3]], ["b", [4]], ["c", []]]


def test_sha256_is_that_of_the_standard() -> None:
    # FIPS 180-4's example for "abc".
    assert sha256_hex(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

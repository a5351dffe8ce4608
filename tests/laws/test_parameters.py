"""Laws of the canonical parameter bytes: each value has one encoding, and no other bytes decode."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.laws import tables

from fanin.edge.tensors import MAGIC, Float32s, TensorTable, decode_parameters, encode_parameters
from fanin.protos.errors import InvalidInput


def flat_of(table: TensorTable, seed: int) -> Float32s:
    """Return values with any bits, including NaN, infinities and denormals."""
    return np.frombuffer(np.random.default_rng(seed).bytes(4 * table.num_values), np.float32)


@given(tables(), st.integers(0, 1 << 32))
def test_round_trip(table: TensorTable, seed: int) -> None:
    flat = flat_of(table, seed)
    decoded_table, values = decode_parameters(encode_parameters(table, flat))
    assert decoded_table == table
    assert values.tobytes() == flat.tobytes()
    assert {name: view.shape for name, view in decoded_table.views(values).items()} == {
        spec.name: spec.shape for spec in table.specs
    }


@given(tables(), st.integers(0, 1 << 32), st.data())
def test_other_bytes_either_decode_to_something_else_or_are_refused(
    table: TensorTable, seed: int, data: st.DataObject
) -> None:
    good = encode_parameters(table, flat_of(table, seed))
    start = data.draw(st.integers(0, len(good)))
    stop = data.draw(st.integers(start, min(start + 4, len(good))))
    bad = good[:start] + data.draw(st.binary(max_size=4)) + good[stop:]
    try:
        decoded_table, values = decode_parameters(bad)
    except InvalidInput:
        return
    assert encode_parameters(decoded_table, values) == bad
    decoded_table.views(values)


@given(tables(), st.integers(0, 1 << 32), st.data())
def test_no_truncation_decodes(table: TensorTable, seed: int, data: st.DataObject) -> None:
    good = encode_parameters(table, flat_of(table, seed))
    with pytest.raises(InvalidInput, match=r"^parameters: "):
        decode_parameters(good[: data.draw(st.integers(0, len(good) - 1))])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text('a[]\\"d8', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_header_is_refused_or_canonical(text: bytes) -> None:
    text += b" " * (-(12 + len(text)) % 64)
    data = MAGIC + len(text).to_bytes(4, "little") + text
    try:
        table, values = decode_parameters(data)
    except InvalidInput:
        return
    assert encode_parameters(table, values) == data

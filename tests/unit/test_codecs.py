"""fixed32 by example, and what it refuses."""

import struct

import numpy as np
import pytest
from support.errors import raises

from fanin.edge.codecs import CODECS, LIMIT, codec_named
from fanin.edge.tensors import TensorTable
from fanin.protos.errors import InvalidUpdate

FIXED32 = CODECS["fixed32"]
TABLE = TensorTable.of({"a": (2,), "b": (2,)})


def test_values_round_to_the_nearest_step_ties_to_even() -> None:
    encoded = FIXED32.encode(TABLE, np.array([0.5, 1.5, -2.5, 3.0], np.float32), (0, 0), 0)
    assert encoded.payload == struct.pack("<4i", 0, 2, -2, 3)
    assert (encoded.shifts, encoded.num_rounded, encoded.num_saturated) == ((0, 0), 3, 0)


def test_a_block_shifts_by_as_little_as_it_needs() -> None:
    update = np.array([2.0**33, 4.0, 1.0, 1.0], np.float32)
    encoded = FIXED32.encode(TABLE, update, (0, 0), 8)
    assert encoded.shifts == (3, 0)
    assert encoded.payload == struct.pack("<4i", 2**30, 0, 1, 1)
    assert (encoded.num_rounded, encoded.num_saturated) == (1, 0)


def test_beyond_the_last_shift_values_are_cut_and_counted() -> None:
    update = np.array([2.0**33, -(2.0**40), 1.0, 1.0], np.float32)
    encoded = FIXED32.encode(TABLE, update, (0, 0), 2)
    assert encoded.shifts == (2, 0)
    assert encoded.payload == struct.pack("<4i", LIMIT, -LIMIT, 1, 1)
    assert (encoded.num_rounded, encoded.num_saturated) == (0, 2)


def test_an_update_is_never_changed_by_encoding_it() -> None:
    update = np.array([0.3, 1e20, -1.0, 0.0], np.float32)
    before = update.tobytes()
    FIXED32.encode(TABLE, update, (0, 0), 3)
    assert update.tobytes() == before


def test_a_callers_mistakes_are_value_errors() -> None:
    with raises(ValueError, "grid: got 1 blocks, expected 2"):
        FIXED32.encode(TABLE, np.zeros(4, np.float32), (0,), 0)
    with raises(ValueError, "flat vector: got shape (3,), expected (4,)"):
        FIXED32.encode(TABLE, np.zeros(3, np.float32), (0, 0), 0)


def test_a_piece_that_ends_within_a_value_is_refused() -> None:
    with raises(InvalidUpdate, "fixed32: got a payload of 7 bytes, expected a multiple of 4"):
        FIXED32.decode(memoryview(bytes(7)))


@pytest.mark.parametrize("name", ["", "int8", "Fixed32"])
def test_an_unknown_codec_is_refused(name: str) -> None:
    with raises(InvalidUpdate, f"codec: got {name!r}, expected one of ['fixed32']"):
        codec_named(name)

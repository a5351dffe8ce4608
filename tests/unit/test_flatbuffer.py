"""The check of a TFLite file before an interpreter follows its offsets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tflite_file import small_file

from fanin.edge.runtimes.engines.flatbuffer import check_file
from fanin.protos.errors import InvalidBundle

FILE = small_file()


def test_a_complete_file_passes() -> None:
    check_file(FILE, "train graph")


@given(size=st.integers(0, len(FILE) - 5))
def test_a_file_that_is_cut_off_is_refused(size: int) -> None:
    # The last four bytes may be the end of a string that no reader uses.
    with pytest.raises(InvalidBundle, match="FN-0330"):
        check_file(FILE[:size], "train graph")


@given(flips=st.lists(st.tuples(st.integers(0, len(FILE) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_damaged_file_is_refused_or_still_consistent(flips: list[tuple[int, int]]) -> None:
    data = bytearray(FILE)
    for position, change in flips:
        data[position] ^= change
    try:
        check_file(bytes(data), "train graph")
    except InvalidBundle as exc:
        assert str(exc).startswith("train graph: ")


def test_another_file_is_refused() -> None:
    with pytest.raises(InvalidBundle, match="FN-0330"):
        check_file(b"no graph, for one", "infer graph")

"""Data sets of other libraries as Examples: what is kept, what is converted, and what is refused."""

import numpy as np
import pytest
from support.errors import raises

from fanin.protos.errors import InvalidInput
from fanin.simulation import examples_of, load_data


def test_pairs_and_mappings_become_examples() -> None:
    pairs = [(np.full((2, 2), index, np.float64), index) for index in range(5)]
    examples = examples_of(pairs)
    assert (examples.x.dtype, examples.y.dtype) == (np.float32, np.int32)
    assert examples.y.tolist() == [0, 1, 2, 3, 4]
    rows = [{"image": x, "label": y} for x, y in pairs]
    assert np.array_equal(examples_of(rows, x="image", y="label").x, examples.x)


def test_bytes_stay_bytes_for_preprocess() -> None:
    examples = examples_of([(np.full((2, 2), 200, np.uint8), np.uint8(3))])
    assert (examples.x.dtype, examples.y.dtype) == (np.uint8, np.int32)
    assert examples.x.max() == 200


@pytest.mark.parametrize("label", [2**32 + 7, 2**40, -(2**40)])
def test_labels_that_32_bits_cannot_hold_are_refused(label: int) -> None:
    text = f"data: got y from {label} to {label}, expected integers of 32 bits; number the labels or tokens from 0"
    with raises(InvalidInput, text):
        examples_of([(np.zeros(3, np.float32), label)] * 2)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ([], "data: got a data set without items, expected at least one"),
        ([np.zeros(3)], "data: item 0 is a ndarray, expected a pair (input, target) or a mapping"),
        ([{"a": 1}], "data: item 0 has the names ['a'], not ['', '']; pass x=... and y=..."),
        ([(np.zeros(2), "cat")], "data: got y of <U3, expected numbers; convert them first"),
    ],
)
def test_other_items_are_one_error(data: list[object], error: str) -> None:
    with raises(InvalidInput, error):
        examples_of(data)


def test_the_digits_have_a_test_part_of_their_own() -> None:
    data = load_data("digits", seed=1)
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert not np.array_equal(load_data("digits", seed=2).test.x, data.test.x)

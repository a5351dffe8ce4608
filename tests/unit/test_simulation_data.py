"""Data sets of other libraries as Examples: types that are kept, converted or refused."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from support.errors import raises

from fanin.protos.errors import InvalidInput
from fanin.simulation import Iid, examples_of, load_data, partition, partition_of


def test_pairs_and_mappings_become_examples() -> None:
    pairs = [(np.full((2, 2), index, np.float64), index) for index in range(5)]
    examples = examples_of(pairs)
    assert (examples.inputs["x"].dtype, examples.y.dtype) == (np.float32, np.int32)
    assert examples.y.tolist() == [0, 1, 2, 3, 4]
    rows = [{"image": x, "label": y} for x, y in pairs]
    assert np.array_equal(examples_of(rows, x="image", y="label").inputs["x"], examples.inputs["x"])


def test_bytes_stay_bytes_for_preprocess() -> None:
    examples = examples_of([(np.full((2, 2), 200, np.uint8), np.uint8(3))])
    assert (examples.inputs["x"].dtype, examples.y.dtype) == (np.uint8, np.int32)
    assert examples.inputs["x"].max() == 200


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
def test_other_items_raise_one_error(data: list[object], error: str) -> None:
    with raises(InvalidInput, error):
        examples_of(data)


def test_the_digits_have_a_test_part_of_their_own() -> None:
    data = load_data("digits", seed=1)
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert not np.array_equal(load_data("digits", seed=2).test.inputs["x"], data.test.inputs["x"])


class ByParity:
    """A partitioner with the methods of flwr-datasets' partitioners. It separates even and odd rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    @property
    def num_partitions(self) -> int:
        if not self.num_rows:
            raise AttributeError("The dataset field should be set before using it")
        return 2

    def load_partition(self, partition_id: int) -> Sequence[Mapping[str, object]]:
        rows = range(partition_id, self.num_rows, self.num_partitions)
        return [{"image": np.full((2, 2), row, np.float64), "label": row} for row in rows]


def test_a_partitioner_of_another_library_is_a_partition() -> None:
    clients = partition_of(ByParity(7), x="image", y="label")
    assert clients.sizes == (4, 3)
    assert [clients[client].y.tolist() for client in range(2)] == [[0, 2, 4, 6], [1, 3, 5]]
    assert (clients.examples.inputs["x"].dtype, clients[1].inputs["x"][2].tolist()) == (
        np.float32,
        [[5.0, 5.0], [5.0, 5.0]],
    )


@pytest.mark.parametrize(
    ("num_rows", "error"),
    [
        (
            0,
            (
                "partition: the partitioner ByParity raised AttributeError: The dataset field should be set before "
                "using it; expected one with a data set, num_partitions and load_partition(index)"
            ),
        ),
        (
            3,
            (
                "partition: got 2 partitions, of which 1 have fewer than 2 examples: [1]; use fewer partitions, or "
                "another partitioner"
            ),
        ),
    ],
)
def test_a_partitioner_that_cannot_be_used_raises_one_error(num_rows: int, error: str) -> None:
    with raises(InvalidInput, error):
        partition_of(ByParity(num_rows), x="image", y="label")


@pytest.mark.parametrize("data", [(np.zeros((4, 2), np.float32), np.zeros(4, np.int32)), load_data("digits")])
def test_data_of_another_type_is_not_spread(data: object) -> None:
    with pytest.raises(InvalidInput, match=r"partition: got (tuple|LoadedData) as examples, expected Examples; write "):
        partition(data, 2, Iid())  # type: ignore[arg-type]  # the mistake under test

"""Data sets by name, and those of other libraries as Examples: types that are kept, converted or refused."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.data import images, labels, real_places, write_fashion_mnist
from support.errors import raises

from fanin.clients.data.files import DATA_VARIABLE
from fanin.protos.errors import InvalidInput
from fanin.simulation import Iid, Natural, examples_of, load_data, partition, partition_of


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
        ([], "data: got a data set without items, expected at least one; pass one that has items"),
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


def test_fashion_mnist_is_loaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion_mnist(tmp_path, images(30), labels(*range(10), *[3] * 20), images(4, seed=1), labels(7, 7, 0, 9))
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    data = load_data("fashion-mnist")
    assert (data.train.inputs["x"].shape, data.test.inputs["x"].shape) == ((30, 1, 28, 28), (4, 1, 28, 28))
    assert (data.train.inputs["x"].dtype, data.train.y.dtype) == (np.float32, np.int32)
    assert (data.train.y[:10].tolist(), data.test.y.tolist()) == ([*range(10)], [7, 7, 0, 9])
    assert data.ids is None


def speech(name: str, letter: str, num_characters: int) -> str:
    """Return a block of a play: a speaker who repeats one letter."""
    return f"{name}:\n{letter * (num_characters - 1)}\n"


def test_each_speaker_of_tinyshakespeare_is_a_natural_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = speech("ROMEO", "r", 1000), speech("Page", "p", 500), speech("First Citizen", "c", 1300)
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text("\n".join((*blocks, speech("ROMEO", "r", 600))))
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    data = load_data("tinyshakespeare")
    assert data.ids is not None
    # A sequence has 64 characters, and a fifth of the sequences of each speaker are held out. Page has too few.
    assert data.ids.tolist() == ["ROMEO"] * 19 + ["First Citizen"] * 16
    assert (data.train.inputs["x"].shape, data.train.y.shape, len(data.test)) == ((35, 64), (35, 64), 5 + 4)
    letters = data.train.inputs["x"][:, 0]
    assert {(name, int(letter)) for name, letter in zip(data.ids, letters, strict=True)} == {
        ("ROMEO", letters[0]),
        ("First Citizen", letters[-1]),
    }
    parts = partition(data.train, 2, Natural(ids=data.ids))
    assert sorted(parts.sizes) == [16, 19]
    assert all(len(np.unique(part.inputs["x"][:, 0])) == 1 for part in parts)


def test_each_speaker_of_the_real_tinyshakespeare_is_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(real_places("tinyshakespeare").data))
    data = load_data("tinyshakespeare")
    assert data.ids is not None and len(data.ids) == len(data.train)
    parts = partition(data.train, 141, Natural(ids=data.ids))
    # Each client is one speaker, and each speaker one client.
    names = [set(data.ids[rows]) for rows in parts.indices]
    assert all(len(each) == 1 for each in names) and len(set.union(*names)) == 141


@pytest.mark.heavy
def test_a_torch_data_set_is_converted() -> None:
    import torch
    from torch.utils.data import Subset, TensorDataset

    images, digits = torch.arange(24.0, dtype=torch.float64).reshape(6, 1, 2, 2), torch.arange(6)
    data = TensorDataset(images, digits)
    examples = examples_of(data)
    assert (examples.inputs["x"].dtype, examples.y.dtype) == (np.float32, np.int32)
    assert np.array_equal(examples.inputs["x"], images.numpy()) and examples.y.tolist() == [*range(6)]
    part = examples_of(Subset(data, [4, 1]))
    assert (part.inputs["x"][:, 0, 0, 0].tolist(), part.y.tolist()) == ([16.0, 4.0], [4, 1])


@pytest.mark.heavy
def test_a_hugging_face_data_set_is_converted() -> None:
    from datasets import Dataset
    from PIL import Image

    pixels = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    columns = {"image": [Image.fromarray(each) for each in pixels], "values": pixels / 2, "label": range(6)}
    data = Dataset.from_dict(columns)
    # Pictures stay bytes, for ``preprocess``.
    pictures = examples_of(data, x="image", y="label")
    assert pictures.inputs["x"].dtype == np.uint8 and np.array_equal(pictures.inputs["x"], pixels)
    assert (pictures.y.dtype, pictures.y.tolist()) == (np.int32, [*range(6)])
    values = examples_of(data.with_format("numpy"), x="values", y="label")
    assert values.inputs["x"].dtype == np.float32 and np.array_equal(values.inputs["x"], pixels / 2)
    both = examples_of(data.select([3, 5]), x=("image", "values"), y="label")
    assert (set(both.inputs), both.y.tolist()) == ({"image", "values"}, [3, 5])
    names = r"\['image', 'label', 'values'\]"
    with pytest.raises(InvalidInput, match=rf"^data: item 0 has the names {names}, not \['pixels'\]"):
        examples_of(data, x="pixels", y="label")


@pytest.mark.nightly
def test_partitioners_of_flwr_datasets_are_partitions() -> None:
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner, NaturalIdPartitioner

    columns = {"image": np.arange(200.0).reshape(50, 2, 2), "label": [row % 2 for row in range(50)]}
    data = Dataset.from_dict(columns | {"writer": ["anna" if row < 20 else "bert" for row in range(50)]})
    by_writer = NaturalIdPartitioner(partition_by="writer")
    by_label = DirichletPartitioner(num_partitions=3, partition_by="label", alpha=5.0, min_partition_size=2)
    with pytest.raises(InvalidInput, match="the partitioner NaturalIdPartitioner raised AttributeError: The dataset"):
        partition_of(by_writer, x="image", y="label")
    by_writer.dataset = by_label.dataset = data
    clients = partition_of(by_writer, x="image", y="label")
    assert clients.sizes == (20, 30)
    assert np.array_equal(clients[0].inputs["x"], np.arange(80.0, dtype=np.float32).reshape(20, 2, 2))
    clients = partition_of(by_label, x="image", y="label")
    rows = sorted(int(x[0, 0]) // 4 for part in clients for x in part.inputs["x"])
    assert len(clients) == 3 and rows == [*range(50)]
    assert all(row % 2 == y for part in clients for row, y in zip(part.inputs["x"][:, 0, 0] // 4, part.y, strict=True))


class ByParity:
    """A partitioner of one's own, with the methods of those of flwr-datasets. It separates even and odd rows."""

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


def test_an_own_partitioner_is_a_partition() -> None:
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
    with pytest.raises(InvalidInput, match="FN-1134"):
        partition(data, 2, Iid())  # type: ignore[arg-type]  # the mistake under test

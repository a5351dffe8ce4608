"""Examples, their files, and the laws of batches, held-out parts and partitions."""

import io
import re
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fanin.clients.data.batching import batches, batches_in_order
from fanin.clients.data.examples import SLICE_VALUES, Examples, check_examples
from fanin.clients.data.npz import open_npz, read_npz
from fanin.clients.data.partitions import dirichlet_partition, hold_out, stratified_choice
from fanin.clients.data.stores import ExampleStore, MemoryStore, memory_store, num_held_out
from fanin.protos.errors import InvalidInput

seeds = st.integers(0, 2**32 - 1)
label_lists = st.lists(st.integers(0, 6), min_size=1, max_size=80).map(lambda y: np.array(y, np.int32))


def indexed_examples(num: int, labels: np.ndarray | None = None) -> Examples:
    """Return examples whose input is their own index."""
    x = np.arange(num, dtype=np.float32)[:, None]
    return Examples(inputs={"x": x}, y=np.zeros(num, np.int32) if labels is None else labels)


def indices_of(examples: Examples) -> list[int]:
    return examples.inputs["x"][:, 0].astype(int).tolist()


@given(num=st.integers(1, 60), batch_size=st.integers(1, 20), seed=seeds)
def test_an_epoch_has_every_example_once_in_an_order_of_the_generator(num: int, batch_size: int, seed: int) -> None:
    examples = indexed_examples(num)
    epoch = list(batches(examples, batch_size, np.random.default_rng(seed)))
    seen = np.concatenate([batch.inputs["x"][batch.mask == 1.0, 0] for batch in epoch]).astype(int)
    assert seen.tolist() == np.random.default_rng(seed).permutation(num).tolist()
    for batch in epoch:
        assert batch.inputs["x"].shape == (batch_size, 1)
        assert (batch.inputs["x"].dtype, batch.y.dtype, batch.mask.dtype) == (np.float32, np.int32, np.float32)
        assert set(batch.inputs["x"][:, 0]) == set(batch.inputs["x"][batch.mask == 1.0, 0]), (
            "padding repeats real examples"
        )
    assert all(batch.mask.all() for batch in epoch[:-1])


@given(num=st.integers(1, 60), batch_size=st.integers(1, 20))
def test_batches_for_evaluation_keep_the_order(num: int, batch_size: int) -> None:
    epoch = list(batches_in_order(indexed_examples(num), batch_size))
    assert np.concatenate([batch.inputs["x"][batch.mask == 1.0, 0] for batch in epoch]).astype(int).tolist() == list(
        range(num)
    )


def test_take_returns_the_examples_of_the_indices_and_at_least_one() -> None:
    examples = indexed_examples(5, np.arange(5, dtype=np.int32))
    subset = examples.take(np.array([3, 0, 3]))
    assert (indices_of(subset), subset.y.tolist(), len(subset)) == ([3, 0, 3], [3, 0, 3], 3)
    with pytest.raises(ValueError, match="got no indices, expected at least one"):
        examples.take(np.empty(0, np.int64))


def test_a_batch_needs_a_size() -> None:
    with pytest.raises(ValueError, match="got batch size 0, expected at least 1"):
        next(batches_in_order(indexed_examples(3), 0))


@given(labels=label_lists, data=st.data(), seed=seeds)
def test_a_stratified_choice_has_the_mix_of_all(labels: np.ndarray, data: st.DataObject, seed: int) -> None:
    num = data.draw(st.integers(0, len(labels)))
    choice = stratified_choice(labels, num, np.random.default_rng(seed))
    assert len(choice) == num
    assert (np.diff(choice) > 0).all(), "rising, so none twice"
    for label in np.unique(labels):
        exact = (labels == label).sum() * num / len(labels)
        assert abs((labels[choice] == label).sum() - exact) < 1.0


@given(labels=label_lists.filter(len), num=st.integers(1, 9), seed=seeds)
def test_a_stratified_choice_draws_from_each_class_in_turn(labels: np.ndarray, num: int, seed: int) -> None:
    num = min(num, len(labels))
    choice = stratified_choice(labels, num, np.random.default_rng(seed))
    rng = np.random.default_rng(seed)
    rng.random(len(np.unique(labels)))
    expected: list[int] = []
    for label in np.unique(labels):
        drawn = rng.permutation(np.flatnonzero(labels == label))
        expected += drawn[: int((labels[choice] == label).sum())].tolist()
    assert choice.tolist() == sorted(expected)


@given(labels=label_lists.filter(lambda y: len(y) > 1), data=st.data(), seed=seeds)
def test_held_out_and_remaining_examples_cover_all_once(labels: np.ndarray, data: st.DataObject, seed: int) -> None:
    num = data.draw(st.integers(1, len(labels) - 1))
    rest, validation = hold_out(indexed_examples(len(labels), labels), num, np.random.default_rng(seed))
    assert len(validation) == num
    assert sorted(indices_of(rest) + indices_of(validation)) == list(range(len(labels)))
    assert (labels[indices_of(validation)] == validation.y).all()


@pytest.mark.parametrize("num", [0, 5, 6])
def test_neither_side_of_a_held_out_part_is_empty(num: int) -> None:
    with pytest.raises(ValueError, match=f"got {num} of 5 examples, expected 1 to 4"):
        hold_out(indexed_examples(5), num, np.random.default_rng(0))


@given(labels=label_lists, alpha=st.sampled_from([1e-3, 0.1, 0.5, 1.0, 100.0]), data=st.data(), seed=seeds)
def test_parts_cover_all_examples_once_and_have_equal_size(
    labels: np.ndarray, alpha: float, data: st.DataObject, seed: int
) -> None:
    num_parts = data.draw(st.integers(1, len(labels)))
    parts = dirichlet_partition(labels, num_parts, alpha, np.random.default_rng(seed))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert {len(part) for part in parts} <= {len(labels) // num_parts, len(labels) // num_parts + 1}
    repeat = dirichlet_partition(labels, num_parts, alpha, np.random.default_rng(seed))
    assert all((one == other).all() for one, other in zip(parts, repeat, strict=True))


@settings(max_examples=25)
@given(seed=seeds)
@pytest.mark.heavy
def test_a_small_alpha_gives_parts_of_few_labels_and_a_large_one_similar_parts(seed: int) -> None:
    labels = np.repeat(np.arange(10), 100)

    def largest_shares(alpha: float) -> np.ndarray:
        parts = dirichlet_partition(labels, 10, alpha, np.random.default_rng(seed))
        return np.array([np.bincount(labels[part], minlength=10).max() / len(part) for part in parts])

    # Parts that draw the same label exhaust it, so even at 0.01 a part seldom has a single label.
    assert largest_shares(0.01).mean() > largest_shares(1000.0).mean() + 0.1
    assert largest_shares(1000.0).mean() < 0.25


@pytest.mark.parametrize(("num_parts", "alpha"), [(0, 1.0), (4, 1.0), (2, 0.0), (2, -1.0), (2, np.inf), (2, np.nan)])
def test_an_impossible_partition_is_refused(num_parts: int, alpha: float) -> None:
    with pytest.raises(ValueError, match=r"dirichlet partition: got (\d parts of 3 examples|alpha)"):
        dirichlet_partition(np.zeros(3, np.int32), num_parts, alpha, np.random.default_rng(0))


@given(labels=label_lists.filter(lambda y: len(y) > 1), partition=st.integers(0, 9), fraction=st.floats(0.01, 0.99))
def test_a_store_keeps_its_contract(labels: np.ndarray, partition: int, fraction: float) -> None:
    examples = indexed_examples(len(labels), labels)
    store: ExampleStore = memory_store(examples, partition, fraction)
    assert store.partition == partition
    assert sorted(indices_of(store.train) + indices_of(store.validation)) == list(range(len(labels)))
    assert len(store.train) and len(store.validation)
    assert abs(len(store.validation) - fraction * len(labels)) <= 1.0
    assert indices_of(memory_store(examples, partition, fraction).validation) == indices_of(store.validation)


def test_a_store_of_some_rows_is_the_store_of_these_examples_alone() -> None:
    examples, rows = indexed_examples(40, np.arange(40, dtype=np.int32) % 3), np.arange(39, 9, -2)
    store, alone = memory_store(examples, 5, 0.3, rows), memory_store(examples.take(rows), 5, 0.3)
    assert indices_of(store.train) == indices_of(alone.train)
    assert indices_of(store.validation) == indices_of(alone.validation)
    with pytest.raises(ValueError, match="got 1 example, expected at least 2"):
        memory_store(examples, 5, 0.3, rows[:1])


@pytest.mark.parametrize("fraction", [1.0, -0.1, np.nan])
def test_a_validation_fraction_is_less_than_1(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"got validation fraction .*, expected at least 0 and less than 1"):
        memory_store(indexed_examples(4), 0, fraction)


def test_a_store_without_a_validation_part_trains_on_all_examples() -> None:
    examples = indexed_examples(4)
    store, one = memory_store(examples, 0, 0.0), memory_store(examples, 0, 0.0, np.array([2]))
    assert (indices_of(store.train), store.validation) == (indices_of(examples), None)
    assert (indices_of(one.train), one.validation) == (indices_of(examples.take(np.array([2]))), None)
    assert num_held_out(4, 0.0) == 0
    with pytest.raises(ValueError, match="got 0 examples, expected at least 1"):
        memory_store(examples, 0, 0.0, np.array([], np.int64))


def test_a_store_has_a_partition_number_and_two_examples() -> None:
    with pytest.raises(ValueError, match="got partition -1, expected 0 or more"):
        MemoryStore(partition=-1, train=indexed_examples(4), validation=indexed_examples(4))
    with pytest.raises(ValueError, match="got 1 example, expected at least 2"):
        memory_store(indexed_examples(1), 0, 0.5)


def test_a_file_is_read_as_examples_and_as_a_store(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    x, y = np.random.default_rng(0).random((9, 2, 2)), np.arange(9, dtype=np.uint8)
    np.savez(path, x=x, y=y, more=x)
    examples = read_npz(path)
    assert (examples.inputs["x"].dtype, examples.y.dtype) == (np.float32, np.int32)
    assert (examples.inputs["x"] == x.astype(np.float32)).all()
    assert examples.y.tolist() == list(range(9))
    store = open_npz(path, 3, 0.3)
    assert (store.partition, len(store.train), len(store.validation)) == (3, 6, 3)


@pytest.mark.parametrize(
    ("x", "y", "kinds"),
    [
        (np.arange(12, dtype=np.int32).reshape(4, 3), np.arange(12).reshape(4, 3) - 1, (np.int32, np.int32)),
        (np.ones((4, 3)), np.linspace(-1.0, 1.0, 8).reshape(4, 2), (np.float32, np.float32)),
    ],
    ids=["tokens", "values"],
)
def test_a_file_may_hold_tokens_or_values(
    tmp_path: Path, x: np.ndarray, y: np.ndarray, kinds: tuple[type, type]
) -> None:
    np.savez(tmp_path / "data.npz", x=x, y=y)
    examples = read_npz(tmp_path / "data.npz")
    assert (examples.inputs["x"].dtype, examples.y.dtype) == kinds
    np.testing.assert_array_equal(examples.inputs["x"], x.astype(kinds[0]))
    np.testing.assert_array_equal(examples.y, y.astype(kinds[1]))
    rest, validation = hold_out(examples, 1, np.random.default_rng(0))
    assert (len(rest), len(validation)) == (3, 1)


X, Y = np.ones((4, 2), np.float32), np.arange(4)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"x": X}, "got the arrays ['x'], expected y and an array for each input, such as x; add y"),
        ({}, "got the arrays [], expected y and an array for each input, such as x; add y"),
        ({"y": Y}, "got the arrays ['y'], expected y and an array for each input, such as x; add x"),
        ({"x": X, "mask": X, "y": Y}, "got the inputs ['mask', 'x'], expected at least one, none of them named"),
        ({"x": X, "y": Y[:3]}, "got arrays of different lengths (x (4, 2), y (3,)), expected one row of each"),
        ({"ids": X, "numbers": X[1:], "y": Y}, "different lengths (ids (4, 2), numbers (3, 2), y (4,))"),
        ({"x": X[0], "y": Y}, "got x (2,), y (4,), expected (n, ...) and y (n,)"),
        ({"x": X, "y": Y.astype(complex)}, "got y of complex128, expected integers (y.astype('int32')), or floats"),
        ({"x": X, "y": np.array(4)}, "got x (4, 2), y (), expected (n, ...) and y (n,)"),
        ({"x": X, "y": np.where(X > 0, np.inf, X)}, "got 8 values of y that are not finite float32 numbers"),
        ({"x": X, "y": Y[:, None] - 2}, "got labels from -2 to 1, expected -1 to 2147483647"),
        ({"x": Y[:, None].astype(np.int32) - 1, "y": Y}, "got tokens of x from -1 to 2, expected 0 to 2147483647"),
        ({"x": Y[:, None] + 2**31, "y": Y}, "got tokens of x from 2147483648 to 2147483651, expected 0 to 2147483647"),
        ({"x": X.astype(np.uint16), "y": Y}, "got x of uint16, expected floats, scaled"),
        ({"x": X.astype(complex), "y": Y}, "got x of complex128, expected floats"),
        ({"x": np.array(["a", "b"]), "y": Y[:2]}, "got x of <U1, expected floats"),
        ({"x": np.where(X > 0, np.nan, X), "y": Y}, "got 8 values of x that are not finite float32 numbers"),
        ({"x": X.astype(float) * 1e300, "y": Y}, "got 8 values of x that are not finite float32 numbers"),
        ({"x": X, "y": Y - 1}, "got labels from -1 to 2, expected 0 to 2147483647"),
        ({"x": X, "y": np.array([0, 1, 2, 2**64 - 1], np.uint64)}, "got labels from 0 to 18446744073709551615"),
        ({"x": X[:0], "y": Y[:0]}, "got no examples (x (0, 2), y (0,)), expected at least one"),
        ({"x": X[:, :0], "y": Y}, "got no examples (x (4, 0), y (4,)), expected at least one"),
        ({"x": X.astype(object), "y": Y}, "not a readable .npz file of plain arrays"),
    ],
)
def test_an_invalid_file_raises_one_clear_error(tmp_path: Path, arrays: dict[str, np.ndarray], expected: str) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    with pytest.raises(InvalidInput) as excinfo:
        read_npz(path)
    assert str(excinfo.value).startswith(f"{path}: ")
    assert expected in str(excinfo.value)


def test_a_missing_a_single_and_a_foreign_file_have_different_errors(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    with pytest.raises(InvalidInput, match="FN-0851"):
        read_npz(path)
    with pytest.raises(InvalidInput, match="FN-0851"):
        read_npz(tmp_path)
    with path.open("wb") as file:
        np.save(file, X)
    with pytest.raises(InvalidInput, match="FN-0852"):
        read_npz(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.txt", "hello")
    with pytest.raises(InvalidInput, match="FN-0853"):
        read_npz(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "hello")
        archive.writestr("y", "hello")
    with pytest.raises(InvalidInput, match="FN-0852"):
        read_npz(path)
    np.savez(path, x=X[:1], y=Y[:1])
    with pytest.raises(InvalidInput, match="FN-0855"):
        open_npz(path, 0, 0.5)


def npz_bytes() -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=X, y=Y)
    return buffer.getvalue()


@given(position=st.integers(0, len(npz_bytes()) - 1), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_file_raises_only_invalid_input(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int, cut: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    data = bytearray(npz_bytes())
    data[position] = byte
    path.write_bytes(data[:position] if cut else data)
    try:
        examples = read_npz(path)
    except InvalidInput as exc:
        assert str(exc).startswith(f"{path}: ")
    else:
        assert len(examples) == len(examples.inputs["x"]), "what is read in spite of the damage is valid"


def test_the_first_example_with_nan_is_named() -> None:
    pictures = np.zeros((20, 3, 4, 4), np.float32).transpose(0, 2, 3, 1)
    pictures[17, 2, 1, 0] = pictures[18] = np.nan
    with pytest.raises(ValueError, match=r"got 49 values of x .*, the first one in example 17, expected none"):
        Examples(inputs={"x": pictures}, y=np.zeros(20, np.int32))


@pytest.mark.heavy
def test_examples_are_checked_in_code_too() -> None:
    import torch

    with pytest.raises(ValueError, match="examples: got arrays of different lengths"):
        Examples(inputs={"x": X}, y=Y[:2])
    with pytest.raises(ValueError, match=r"x of float64, expected .* or uint8; write x = x.astype\(np.float32\)"):
        Examples(inputs={"x": X.astype(np.float64)}, y=Y)
    with pytest.raises(ValueError, match=r"got y of int64, expected float32 or int32; write y = y.astype\(np.int32\)"):
        Examples(inputs={"x": X}, y=Y)
    with pytest.raises(ValueError, match=r"got y of Tensor, expected a numpy array; write y = y.numpy\(\)"):
        Examples(inputs={"x": X}, y=torch.zeros(len(X)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got y of list, expected a numpy array; write y = np.asarray\(y\)"):
        Examples(inputs={"x": X}, y=[0] * len(X))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got inputs of ndarray, expected arrays by name; write inputs={'x': x}"):
        Examples(inputs=X, y=Y)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.float32])
def test_examples_are_checked_without_a_copy_of_the_data(kind: type[np.generic]) -> None:
    x, y = np.ones((4096, 256), kind), np.zeros(4096, np.int32)
    Examples(inputs={"x": x}, y=y)
    tracemalloc.start()
    try:
        Examples(inputs={"x": x}, y=y)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # One slice of float32 and its flags. A copy of the data as float32 would need 4 MiB.
    assert peak < 1 << 19


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, SLICE_VALUES - 1, SLICE_VALUES, 2 * SLICE_VALUES])
def test_a_value_that_is_not_finite_is_detected_in_every_slice(value: float, position: int) -> None:
    x = np.zeros((2 * SLICE_VALUES + 1, 1), np.float32)
    x[position] = value
    with pytest.raises(
        ValueError, match=f"not finite float32 numbers, the first one in example {len(x) - 1 - position},"
    ):
        Examples(inputs={"x": x[::-1]}, y=np.zeros(len(x), np.int32))


def test_examples_of_an_unsupported_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match="examples: got x of object, expected float32 or int32"):
        Examples(inputs={"x": X.astype(object)}, y=Y.astype(np.int32))


def test_bytes_are_not_converted_and_are_only_for_preprocess(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=X.astype(np.uint8), y=Y.astype(np.uint8))
    examples = read_npz(tmp_path / "data.npz")
    assert (examples.inputs["x"].dtype, examples.y.dtype) == (np.uint8, np.int32)
    (batch,) = batches_in_order(examples, 4)
    assert batch.inputs["x"].dtype == np.uint8
    with pytest.raises(InvalidInput, match="FN-0858"):
        check_examples(examples, {"x": (2,)}, 4, "int32")


def test_examples_must_fit_the_model() -> None:
    examples = Examples(inputs={"x": X}, y=Y.astype(np.int32))
    check_examples(examples, {"x": (2,)}, 4, "int32")
    with pytest.raises(InvalidInput, match="FN-0858"):
        check_examples(examples, {"x": (1, 8, 8)}, 4, "int32")
    with pytest.raises(InvalidInput, match="FN-0856"):
        check_examples(examples, {"x": (2,)}, 3, "int32")
    from_1 = Examples(inputs={"x": X}, y=Y.astype(np.int32) + 1)
    error = "examples: got label 4, expected 0 to 3; count classes from 0: y - 1, or set num_classes=5 in the App"
    with pytest.raises(InvalidInput, match=re.escape(error)):
        check_examples(from_1, {"x": (2,)}, 4, "int32")
    with pytest.raises(
        InvalidInput, match=r"got y of int32, expected float32 values; write y = y.astype\(np.float32\)"
    ):
        check_examples(examples, {"x": (2,)}, 0, "float32")
    values = Examples(inputs={"x": X}, y=X)
    check_examples(values, {"x": (2,)}, 0, "float32")
    with pytest.raises(InvalidInput, match="got y of float32, expected int32 labels below 4"):
        check_examples(values, {"x": (2,)}, 4, "int32")

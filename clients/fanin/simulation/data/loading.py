"""Data sets for a simulation: named data sets, the user's files, and data sets of other libraries.

``load_data`` accepts a name or a file. ``examples_of`` accepts the data sets of other libraries: objects with a length
and items by index, such as a torch ``Dataset`` or a Hugging Face ``datasets.Dataset``. ``partition_of`` accepts a
partitioner with such a data set, for example from ``flwr-datasets``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from fanin.clients.data.digits import load_digits
from fanin.clients.data.examples import Examples, Y, joined
from fanin.clients.data.npz import read_npz
from fanin.clients.data.partitions import hold_out
from fanin.clients.data.public import Cutting, fashion_mnist, shakespeare
from fanin.clients.data.stores import MIN_EXAMPLES
from fanin.edge.runtimes.base import Inputs
from fanin.edge.runtimes.graphs import X
from fanin.protos.errors import InvalidInput, SubjectError
from fanin.simulation.data.partitioning import MAX_NAMED, Partition
from fanin.simulation.data.tables import is_table, read_table

NAMES: Final = ("digits", "fashion-mnist", "tinyshakespeare")
"""The data sets that have a name."""
TEST_FRACTION: Final = 0.2
"""Share of the examples that is held out as test part, for data without one."""
STREAM: Final = 0x74657374
"""Separates the generator of the test part from all other generators of a seed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedData:
    """A data set for a simulation.

    Attributes:
        train: Examples for the clients.
        test: Examples for the evaluation of each Version.
        ids: The natural id of each training example (n,), such as its speaker; None if there is none.
    """

    train: Examples
    test: Examples
    ids: npt.NDArray[np.str_] | None = None


class IndexedData(Protocol):
    """A data set of another library: a length, and items by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class LoadedPartitions(Protocol):
    """A partitioner of another library, with its data set."""

    @property
    def num_partitions(self) -> int: ...

    def load_partition(self, partition_id: int, /) -> IndexedData: ...


def load_data(name: str, *, seed: int = 0) -> LoadedData:
    """Load a data set by its name, an .npz file with arrays ``x`` and ``y``, or CSV or Parquet tables.

    Args:
        name: ``digits``, ``fashion-mnist``, ``tinyshakespeare``, or the path of an .npz, .csv or .parquet file, or of a
            folder of tables (docs/howto/data.md).
        seed: Seed of the choice of the test part, for data without one.

    Raises:
        InvalidInput: Nothing has this name, or the data cannot be loaded.
        RuntimeMissing: A table is Parquet, and pyarrow is not installed.
    """
    if name == "digits":
        return _held_out(load_digits(), seed)
    if name == "fashion-mnist":
        data = fashion_mnist()
        return LoadedData(train=data.train, test=data.test)
    if name == "tinyshakespeare":
        return _by_speaker()
    if name.endswith(".npz"):
        return _held_out(read_npz(Path(name)), seed)
    check_name(name)
    return _tables(Path(name), seed)


def check_name(name: str) -> None:
    """Raise InvalidInput unless ``name`` is a data set, or has the form of a file of data."""
    if name not in NAMES and not name.endswith(".npz") and not is_table(Path(name)):
        raise InvalidInput(
            f"data: got {name!r}, expected {', '.join(NAMES)}, or the path of an .npz, .csv or .parquet file or of a "
            "folder",
            code="FN-1120",
        )


def examples_of(data: IndexedData, *, x: str | tuple[str, ...] = "", y: str = "") -> Examples:
    """Convert a data set of another library.

    Args:
        data: Its items are pairs of an input and a target, or mappings. They hold numbers, arrays or tensors.
        x: The name of the input, if the items are mappings. For a model with several inputs, a tuple of their names,
            which are kept.
        y: The name of the targets, if the items are mappings.

    Raises:
        InvalidInput: The data set is empty, an item has another form, or the items have different shapes.

    Example:
        ``examples_of(torchvision_dataset)``, ``examples_of(hugging_face_dataset, x="image", y="label")``,
        ``examples_of(tokenized, x=("input_ids", "attention_mask"), y="label")``
    """
    if not len(data):
        raise InvalidInput(
            "data: got a data set without items, expected at least one; pass one that has items", code="FN-1121"
        )
    names = x if isinstance(x, tuple) else (x,)
    rows = [_row(data[index], index, (*names, y)) for index in range(len(data))]
    *inputs, targets = zip(*rows, strict=True)
    keys = names if isinstance(x, tuple) else (X,)
    try:
        return Examples(
            inputs={key: _stacked(key, column) for key, column in zip(keys, inputs, strict=True)},
            y=_stacked(Y, targets),
        )
    except SubjectError as exc:
        raise InvalidInput(f"data: {exc.fault}", code="FN-1124") from exc


def partition_of(partitioner: LoadedPartitions, *, x: str | tuple[str, ...] = "", y: str = "") -> Partition:
    """Convert the partitions of another library, such as those of a partitioner of ``flwr-datasets``.

    Args:
        partitioner: It has a number of partitions and loads each of them as a data set. Assign its data set before the
            call.
        x: The name of the input, or a tuple of names, if the items are mappings.
        y: The name of the targets, if the items are mappings.

    Raises:
        InvalidInput: The partitioner raises an error, a partition has fewer than two examples, or an item has another
            form (see ``examples_of``).

    Example:
        ``partition_of(fds.partitioners["train"], x="image", y="label")``
    """
    try:
        loaded = [partitioner.load_partition(index) for index in range(partitioner.num_partitions)]
    except Exception as exc:  # Any error: the partitioner comes from another library.
        raise InvalidInput(
            f"partition: the partitioner {type(partitioner).__name__} raised {type(exc).__name__}: {exc}; expected one "
            "with a data set, num_partitions and load_partition(index)",
            code="FN-1137",
        ) from exc
    small = [index for index, data in enumerate(loaded) if len(data) < MIN_EXAMPLES]
    if small or not loaded:
        raise InvalidInput(
            f"partition: got {len(loaded)} partitions, of which {len(small)} have fewer than {MIN_EXAMPLES} examples: "
            f"{small[:MAX_NAMED]}; use fewer partitions, or another partitioner",
            code="FN-1133",
        )
    bounds = np.cumsum([0, *map(len, loaded)])
    items = [data[index] for data in loaded for index in range(len(data))]
    indices = tuple(np.arange(start, end) for start, end in pairwise(bounds))
    return Partition(examples=examples_of(items, x=x, y=y), indices=indices)


def _held_out(examples: Examples, seed: int) -> LoadedData:
    num_test = max(1, round(len(examples) * TEST_FRACTION))
    if len(examples) <= num_test:
        raise InvalidInput(
            f"data: got {len(examples)} example, expected at least 2: one of them is the test", code="FN-1121"
        )
    train, test = hold_out(examples, num_test, np.random.default_rng((STREAM, seed)))
    return LoadedData(train=train, test=test)


def _tables(path: Path, seed: int) -> LoadedData:
    """Return tables with their ids. The parts are the folders ``train`` and ``test``; otherwise rows are held out."""
    if (path / "train").is_dir() and (path / "test").is_dir():
        train = read_table(path / "train")
        return LoadedData(train=train.examples, test=read_table(path / "test").examples, ids=train.ids)
    table = read_table(path)
    numbered = Examples(inputs={X: np.arange(len(table.examples), dtype=np.int32)[:, None]}, y=table.examples.y)
    parts = _held_out(numbered, seed)
    rows, held = (part.inputs[X][:, 0].astype(np.int64) for part in (parts.train, parts.test))
    return LoadedData(train=table.examples.take(rows), test=table.examples.take(held), ids=table.ids[rows])


def _by_speaker() -> LoadedData:
    speakers = shakespeare(Cutting()).speakers
    return LoadedData(
        train=joined([speaker.train for speaker in speakers]),
        test=joined([speaker.held_out for speaker in speakers]),
        ids=np.concatenate([np.repeat(speaker.name, len(speaker.train)) for speaker in speakers]),
    )


def _row(item: object, index: int, names: tuple[str, ...]) -> tuple[object, ...]:
    """Return the inputs and the target of an item."""
    if isinstance(item, Mapping):
        missing = [name for name in names if name not in item]
        if missing:
            raise InvalidInput(
                f"data: item {index} has the names {sorted(map(str, item))}, not {missing}; pass x=... and y=...",
                code="FN-1122",
            )
        return tuple(item[name] for name in names)
    if isinstance(item, tuple | list) and len(item) == len(names) == 2:
        return tuple(item)
    raise InvalidInput(
        f"data: item {index} is a {type(item).__name__}, expected a pair (input, target) or a mapping", code="FN-1122"
    )


def _stacked(what: str, values: tuple[object, ...]) -> Inputs:
    """Return values as one array: floats as float32, bytes of an input unchanged, other integers as int32."""
    try:
        stacked = np.stack([np.asarray(value) for value in values])
    except ValueError as exc:
        raise InvalidInput(
            f"data: the items have {what} of different shapes ({exc}); give them one shape", code="FN-1123"
        ) from exc
    if stacked.dtype.kind == "f":
        return stacked.astype(np.float32)
    if what != Y and stacked.dtype == np.uint8:
        return stacked
    if stacked.dtype.kind in "iub":
        limits = np.iinfo(np.int32)
        if stacked.size and not limits.min <= stacked.min() <= stacked.max() <= limits.max:
            raise InvalidInput(
                f"data: got {what} from {stacked.min()} to {stacked.max()}, expected integers of 32 bits; number the "
                "labels or tokens from 0",
                code="FN-1123",
            )
        return stacked.astype(np.int32)
    raise InvalidInput(f"data: got {what} of {stacked.dtype}, expected numbers; convert them first", code="FN-1123")

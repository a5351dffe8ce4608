"""Data sets for a simulation: those with a name, files of one's own, and data sets of other libraries.

``load_data`` takes a name or a file. ``examples_of`` takes what other libraries call a data set: anything with a length
and items by index, such as a torch ``Dataset`` or a Hugging Face ``datasets.Dataset``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from fanin.clients.data.digits import load_digits
from fanin.clients.data.examples import Examples
from fanin.clients.data.npz import read_npz
from fanin.clients.data.partitions import hold_out
from fanin.clients.data.public import Cutting, fashion_mnist, shakespeare
from fanin.edge.runtimes.base import Inputs
from fanin.protos.errors import InvalidInput
from fanin.simulation.data.tables import is_table, read_table

TEST_FRACTION: Final = 0.2
"""Share of the examples that is held out for the test, of data that has no test part of its own."""
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


def load_data(name: str, *, seed: int = 0) -> LoadedData:
    """Load a data set by its name, an .npz file with arrays ``x`` and ``y``, or CSV or Parquet tables.

    Args:
        name: ``digits``, ``fashion-mnist``, ``tinyshakespeare``, or the path of an .npz, .csv or .parquet file, or of a
            folder of tables (docs/simulation.md).
        seed: Seed of the choice of the test part, for data that has none of its own.

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
    if is_table(Path(name)):
        return _tables(Path(name), seed)
    raise InvalidInput(
        f"data: got {name!r}, expected {', '.join(NAMES)}, or the path of an .npz, .csv or .parquet file or of a folder"
    )


NAMES: Final = ("digits", "fashion-mnist", "tinyshakespeare")


def examples_of(data: IndexedData, *, x: str = "", y: str = "") -> Examples:
    """Convert a data set of another library.

    Args:
        data: Its items are pairs of an input and a target, or mappings. They hold numbers, arrays or tensors.
        x: The name of the inputs, if the items are mappings.
        y: The name of the targets, if the items are mappings.

    Raises:
        InvalidInput: The data set is empty, an item has another form, or the items have different shapes.

    Example:
        ``examples_of(torchvision_dataset)``, ``examples_of(hugging_face_dataset, x="image", y="label")``
    """
    if not len(data):
        raise InvalidInput("data: got a data set without items, expected at least one")
    pairs = [_pair(data[index], index, x, y) for index in range(len(data))]
    inputs, targets = (_stacked(what, column) for what, column in zip("xy", zip(*pairs, strict=True), strict=True))
    try:
        return Examples(x=inputs, y=targets)
    except ValueError as exc:
        raise InvalidInput(f"data: {str(exc).removeprefix('examples: ')}") from exc


def _held_out(examples: Examples, seed: int) -> LoadedData:
    num_test = max(1, round(len(examples) * TEST_FRACTION))
    if len(examples) <= num_test:
        raise InvalidInput(f"data: got {len(examples)} example, expected at least 2: one of them is the test")
    train, test = hold_out(examples, num_test, np.random.default_rng((STREAM, seed)))
    return LoadedData(train=train, test=test)


def _tables(path: Path, seed: int) -> LoadedData:
    """Return tables with their ids. The folders ``train`` and ``test`` are the parts; else some rows are held out."""
    if (path / "train").is_dir() and (path / "test").is_dir():
        train = read_table(path / "train")
        return LoadedData(train=train.examples, test=read_table(path / "test").examples, ids=train.ids)
    table = read_table(path)
    numbered = Examples(x=np.arange(len(table.examples), dtype=np.int32)[:, None], y=table.examples.y)
    parts = _held_out(numbered, seed)
    rows, held = (part.x[:, 0].astype(np.int64) for part in (parts.train, parts.test))
    return LoadedData(train=table.examples.take(rows), test=table.examples.take(held), ids=table.ids[rows])


def _by_speaker() -> LoadedData:
    speakers = shakespeare(Cutting()).speakers
    return LoadedData(
        train=_joined([speaker.train for speaker in speakers]),
        test=_joined([speaker.held_out for speaker in speakers]),
        ids=np.concatenate([np.repeat(speaker.name, len(speaker.train)) for speaker in speakers]),
    )


def _joined(parts: list[Examples]) -> Examples:
    return Examples(x=np.concatenate([part.x for part in parts]), y=np.concatenate([part.y for part in parts]))


def _pair(item: object, index: int, x: str, y: str) -> tuple[object, object]:
    if isinstance(item, Mapping):
        missing = [name for name in (x, y) if name not in item]
        if missing:
            raise InvalidInput(
                f"data: item {index} has the names {sorted(map(str, item))}, not {missing}; pass x=... and y=..."
            )
        return item[x], item[y]
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise InvalidInput(f"data: item {index} is a {type(item).__name__}, expected a pair (input, target) or a mapping")


def _stacked(what: str, values: tuple[object, ...]) -> Inputs:
    """Return values as one array: floats as float32, bytes of ``x`` as they are, other integers as int32."""
    try:
        stacked = np.stack([np.asarray(value) for value in values])
    except ValueError as exc:
        raise InvalidInput(f"data: the items have {what} of different shapes ({exc}); give them one shape") from exc
    if stacked.dtype.kind == "f":
        return stacked.astype(np.float32)
    if what == "x" and stacked.dtype == np.uint8:
        return stacked
    if stacked.dtype.kind in "iub":
        limits = np.iinfo(np.int32)
        if stacked.size and not limits.min <= stacked.min() <= stacked.max() <= limits.max:
            raise InvalidInput(
                f"data: got {what} from {stacked.min()} to {stacked.max()}, expected integers of 32 bits; number the "
                "labels or tokens from 0"
            )
        return stacked.astype(np.int32)
    raise InvalidInput(f"data: got {what} of {stacked.dtype}, expected numbers; convert them first")

"""Tables as data sets: CSV and Parquet files, and folders of them.

    FILE.csv, FILE.parquet      one table
    FOLDER/*.csv, *.parquet     one table a client: the file's name is the natural id of its rows
    FOLDER/train, FOLDER/test   folders of tables, if the data has a test part

A row is an example. The column ``y``, ``label``, ``labels``, ``class`` or ``target`` is the target. The column
``client``, if there is one, is the natural id. All other columns are the input, in their order. A column of lists of
one length (Parquet) counts as several columns.
"""

import csv
import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from fanin.clients.data.examples import Examples
from fanin.clients.textfiles import reason_of
from fanin.edge.files import without_foreign
from fanin.edge.runtimes.base import Inputs
from fanin.edge.runtimes.graphs import X
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidInput, RuntimeMissing, SubjectError
from fanin.protos.texts import counted

SUFFIXES: Final = (".csv", ".parquet")
TARGETS: Final = ("y", "label", "labels", "class", "target")
CLIENT: Final = "client"
Columns = Mapping[str, Sequence[object]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedTable:
    """Examples, and the natural id of each (n,)."""

    examples: Examples
    ids: npt.NDArray[np.str_]


def is_table(path: Path) -> bool:
    """Return whether a path is a table by its suffix, or a folder."""
    return path.suffix.lower() in SUFFIXES or path.is_dir()


def read_table(path: Path) -> LoadedTable:
    """Read one table, or all tables of a folder in the order of their names.

    Raises:
        InvalidInput: A file cannot be read, has no target, or has other columns than the first one.
        RuntimeMissing: A file is Parquet, and pyarrow is not installed.
    """
    entries = without_foreign(path.iterdir()) if path.is_dir() else ()
    files = sorted(each for each in entries if each.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise InvalidInput(
            f"{path}: got a folder without tables, expected files that end in {' or '.join(SUFFIXES)}", code="FN-1125"
        )
    names: list[str] = []
    xs, ys, ids = [], [], []
    for file in files:
        columns = parquet_columns(file) if file.suffix.lower() == ".parquet" else _csv(file)
        if "" in columns:
            raise InvalidInput(
                f"{file}: column {[*columns].index('') + 1} has no name, expected names for all; if pandas wrote its "
                "index, write the file again with to_csv(index=False)",
                code="FN-1127",
            )
        target = _target(file, columns)
        inputs = [name for name in columns if name not in (target, CLIENT)]
        if names and inputs != names:
            raise InvalidInput(f"{file}: got the columns {inputs}, expected {names} as in {files[0]}", code="FN-1128")
        names = inputs
        xs.append(np.concatenate([_values(file, name, columns[name]) for name in inputs], axis=1))
        ys.append(_targets(file, target, columns[target]))
        ids += list(map(str, columns[CLIENT])) if CLIENT in columns else [file.stem] * len(ys[-1])
    other = next((index for index, y in enumerate(ys) if (y.dtype, y.shape[1:]) != (ys[0].dtype, ys[0].shape[1:])), 0)
    if other:
        raise InvalidInput(
            f"{files[other]}: got targets {ys[other].dtype} {ys[other].shape[1:]}, but {files[0]} has {ys[0].dtype} "
            f"{ys[0].shape[1:]}; write the targets of all files alike, with or without a decimal point",
            code="FN-1128",
        )
    x: Inputs = np.concatenate(xs)
    targets = np.concatenate(ys)
    y: Inputs = targets.astype(np.int32) if ys[0].dtype == np.int32 else targets.astype(np.float32)
    try:
        examples = Examples(inputs={X: x}, y=y)
    except SubjectError as exc:
        raise InvalidInput(f"{path}: {exc.fault}", code="FN-1124") from exc
    return LoadedTable(examples=examples, ids=np.array(ids))


def _csv(path: Path) -> Columns:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [row for row in csv.reader(file) if row]
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({reason_of(exc)})", code="FN-1125") from exc
    except (csv.Error, UnicodeDecodeError) as exc:
        raise InvalidInput(f"{path}: not a readable .csv file ({exc})", code="FN-1125") from exc
    if len(lines) < 2 or any(len(row) != len(lines[0]) for row in lines):
        raise InvalidInput(
            f"{path}: expected a line of names and rows of as many values; correct the file", code="FN-1125"
        )
    return {name.strip(): column for name, *column in zip(*lines, strict=True)}


def parquet_columns(path: Path) -> Columns:
    """Return the columns of a Parquet file. Raises InvalidInput if it cannot be read, and RuntimeMissing."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table as read
    except ModuleNotFoundError as exc:
        raise RuntimeMissing(
            f"{path}: pyarrow is not installed here; pip install 'fanin[parquet]'", code="FN-1104"
        ) from exc
    try:
        columns: Columns = read(path).to_pydict()
    except FileNotFoundError as exc:
        raise InvalidInput(f"{path}: cannot be read ({os.strerror(errno.ENOENT)})", code="FN-1125") from exc
    except (OSError, ArrowException) as exc:
        raise InvalidInput(f"{path}: not a readable .parquet file ({exc})", code="FN-1125") from exc
    return columns


def _target(path: Path, columns: Columns) -> str:
    """Return the name of the target's column. Raises InvalidInput unless there is one, and at least one input."""
    targets = [name for name in columns if name.lower() in TARGETS]
    if len(targets) != 1 or not set(columns) - {*targets, CLIENT} or not columns[targets[0]]:
        raise InvalidInput(
            f"{path}: got the columns {list(columns)}, expected inputs and one target named {', '.join(TARGETS)}",
            code="FN-1127",
        )
    return targets[0]


def _numbers(path: Path, name: str, column: Sequence[object]) -> npt.NDArray[np.float64]:
    try:
        return np.array(column, np.float64)
    except (TypeError, ValueError) as exc:
        if "" in column or None in column:
            row = next(number for number, value in enumerate(column, 1) if value in ("", None))
            raise InvalidInput(
                f"{path}: column {name!r}: got no value in row {row}; fill it in or leave the row out", code="FN-1129"
            ) from exc
        raise InvalidInput(
            f"{path}: column {name!r}: expected numbers, or lists of one length ({exc}); convert texts first",
            code="FN-1129",
        ) from exc


def _values(path: Path, name: str, column: Sequence[object]) -> Inputs:
    """Return the inputs of a column (n, k) as float32."""
    return _finite(path, name, _numbers(path, name, column).reshape(len(column), -1))


def _finite(path: Path, name: str, values: npt.NDArray[np.float64]) -> Inputs:
    """Return the numbers of a column (n, ...) as float32. Raises InvalidInput if one is not finite."""
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    _check_rows(path, name, numbers, np.isfinite(numbers), "finite float32 numbers")
    return numbers


def _check_rows(path: Path, name: str, values: Array, good: npt.NDArray[np.bool_], expected: str) -> None:
    """Raise InvalidInput with the first row of a column (n, ...) that has a value that is not ``good``."""
    rows, *places = np.nonzero(~good)
    if len(rows):
        first = values[(rows[0], *(each[0] for each in places))]
        num = len(set(rows.tolist()))
        others = f" and wrong values in {counted(num - 1, 'other row')}" if num > 1 else ""
        raise InvalidInput(
            f"{path}: column {name!r}: got {first} in row {rows[0] + 1}{others}, expected {expected}; correct the "
            "value or leave the row out",
            code="FN-1129",
        )


def _targets(path: Path, name: str, column: Sequence[object]) -> Inputs:
    """Return targets (n,) or (n, k): int32 if all of them are integers without a decimal point, otherwise float32."""
    values = _numbers(path, name, column)
    is_text = isinstance(column[0], str)
    are_integers = (
        all("." not in str(item) and "e" not in str(item).lower() for item in column)
        if is_text
        else (np.array(column).dtype.kind in "iub")
    )
    with np.errstate(invalid="ignore"):
        labels = values.astype(np.int32)
    if are_integers and np.array_equal(values, labels):
        if labels.ndim == 1:
            _check_rows(path, name, labels, labels >= 0, "labels of at least 0")
        return labels
    return _finite(path, name, values)

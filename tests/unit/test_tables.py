"""CSV and Parquet tables as data sets of a simulation. Without torch."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.errors import raises

from fanin.clients.data.examples import Examples
from fanin.protos.errors import InvalidInput, RuntimeMissing
from fanin.simulation import Natural, load_data, partition

ROWS = "a,label,b\n" + "".join(f"{number},{number % 2},{number / 10}\n" for number in range(10))


def rows_of(examples: Examples) -> set[tuple[float, ...]]:
    return {(*map(float, x), float(y)) for x, y in zip(examples.inputs["x"], examples.y, strict=True)}


def test_a_csv_file_has_inputs_and_labels(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    data = load_data(str(tmp_path / "rows.csv"))
    assert (data.train.inputs["x"].dtype, data.train.y.dtype) == (np.float32, np.int32)
    assert (data.train.inputs["x"].shape, data.test.inputs["x"].shape) == ((8, 2), (2, 2))
    rows = rows_of(data.train) | rows_of(data.test)
    assert rows == {(float(n), float(np.float32(n / 10)), float(n % 2)) for n in range(10)}


def write_csv(path: Path, columns: Mapping[str, Sequence[float]]) -> None:
    rows = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    path.with_suffix(".csv").write_text("\n".join([",".join(columns), *rows]))


def write_parquet(path: Path, columns: Mapping[str, Sequence[object]]) -> None:
    # Imported here, because pyarrow takes half a second.
    from pyarrow import table
    from pyarrow.parquet import write_table

    write_table(table(columns), path.with_suffix(".parquet"))


@pytest.mark.parametrize("write", [write_csv, pytest.param(write_parquet, marks=pytest.mark.heavy)])
def test_each_file_of_a_folder_is_a_client(
    write: Callable[[Path, Mapping[str, Sequence[float]]], None], tmp_path: Path
) -> None:
    for client, first in (("anna", 0), ("bert", 100)):
        columns = {"value": range(first, first + 10), "target": [number + 0.5 for number in range(10)]}
        write(tmp_path / client, columns)
    data = load_data(str(tmp_path))
    assert data.ids is not None and data.train.y.dtype == np.float32
    assert all((name == "anna") == (x[0] < 100) for name, x in zip(data.ids, data.train.inputs["x"], strict=True))
    parts = partition(data.train, 2, Natural(ids=data.ids))
    assert sorted(int(part.inputs["x"].min() >= 100) for part in parts) == [0, 1]
    assert all(len(np.unique(part.inputs["x"] >= 100)) == 1 for part in parts)


def test_train_and_test_may_be_folders_and_clients_a_column(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "all.csv").write_text("client,x,y\n" + "".join(f"c{n % 3},{n},1\n" for n in range(6)))
    data = load_data(str(tmp_path))
    assert data.ids is not None
    assert (len(data.train), len(data.test), sorted(set(data.ids))) == (6, 6, ["c0", "c1", "c2"])


@pytest.mark.heavy
def test_train_and_test_may_be_folders_of_parquet_files_with_a_column_of_clients(tmp_path: Path) -> None:
    for name, num_rows in (("train", 6), ("test", 4)):
        (tmp_path / name).mkdir()
        columns = {"client": [f"c{n % 3}" for n in range(num_rows)], "x": range(num_rows), "label": [1] * num_rows}
        write_parquet(tmp_path / name / "all", columns)
    data = load_data(str(tmp_path))
    assert data.ids is not None
    assert (len(data.train), len(data.test), data.ids.tolist()) == (6, 4, ["c0", "c1", "c2"] * 2)
    assert data.train.y.dtype == np.int32


@pytest.mark.heavy
def test_a_parquet_file_has_lists_as_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path / "rows", {"pixels": [[float(n), n + 0.5] for n in range(10)], "y": range(10)})
    data = load_data(str(tmp_path / "rows.parquet"))
    assert data.train.inputs["x"].shape == (8, 2) and data.train.y.dtype == np.int32
    assert all(x.tolist() == [y, y + 0.5] for x, y in zip(data.train.inputs["x"], data.train.y, strict=True))
    (tmp_path / "wrong.parquet").write_bytes(b"no")
    with pytest.raises(InvalidInput, match="FN-1125"):
        load_data(str(tmp_path / "wrong.parquet"))


def test_parquet_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises(RuntimeMissing, f"{path}: pyarrow is not installed here; pip install 'fanin[parquet]'"):
        load_data(str(path))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "a,b\n1,2\n",
            "got the columns ['a', 'b'], expected inputs and one target named y, label, labels, class, target",
        ),
        ("a,y\n1,2\n3\n", "expected a line of names and rows of as many values; correct the file"),
        (
            "a,y\nred,2\n",
            "column 'a': expected numbers, or lists of one length (could not convert string to float: 'red'",
        ),
        ("a,y\n1,2\n,3\n", "column 'a': got no value in row 2; fill it in or leave the row out"),
        (
            ",a,y\n0,1,2\n",
            "column 1 has no name, expected names for all; if pandas wrote its index, write the file again",
        ),
        (
            "a,y\nnan,2\n",
            "column 'a': got nan in row 1, expected finite float32 numbers; correct the value or leave the row out",
        ),
        ("a,y\n1,2\n1,2\n1e39,2\n", "column 'a': got inf in row 3, expected finite float32 numbers; correct the value"),
        ("a,y\n1,0.5\n1,-inf\n", "column 'y': got -inf in row 2, expected finite float32 numbers; correct the value"),
        (
            "a,y\n1,2\n1,-1\n1,-1\n",
            "column 'y': got -1 in row 2 and wrong values in 1 other row, expected labels of",
        ),
    ],
)
def test_a_wrong_table_raises_one_error(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(InvalidInput) as excinfo:
        load_data(str(path))
    assert str(excinfo.value).startswith(f"{path}: {error}")


def test_a_wrong_value_in_a_file_of_a_folder_names_the_file_and_the_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,y\n1,2\n")
    (tmp_path / "b.csv").write_text("a,y\n1,2\nnan,2\nnan,2\n3,1\ninf,1\n")
    error = (
        f"{tmp_path / 'b.csv'}: column 'a': got nan in row 2 and wrong values in 2 other rows, expected finite float32 "
        "numbers; correct the value or leave the row out"
    )
    with raises(InvalidInput, error):
        load_data(str(tmp_path))
    (tmp_path / "b.csv").write_text("a,y\n1,2.5\n")
    error = (
        f"{tmp_path / 'b.csv'}: got targets float32 (), but {tmp_path / 'a.csv'} has int32 (); write the targets of "
        "all files alike, with or without a decimal point"
    )
    with raises(InvalidInput, error):
        load_data(str(tmp_path))


@pytest.mark.heavy
def test_a_wrong_value_in_a_list_of_a_parquet_file_names_the_row(tmp_path: Path) -> None:
    write_parquet(tmp_path / "rows", {"pixels": [[1.0, 2.0], [3.0, float("nan")]], "y": range(2)})
    with pytest.raises(InvalidInput, match="FN-1129"):
        load_data(str(tmp_path))


def test_a_folder_with_other_files_raises_one_error(tmp_path: Path) -> None:
    error = f"{tmp_path}: got a folder without tables, expected files that end in .csv or .parquet"
    with raises(InvalidInput, error):
        load_data(str(tmp_path))
    (tmp_path / "a.csv").write_text("a,y\n1,2\n")
    (tmp_path / "b.csv").write_text("b,y\n1,2\n")
    with raises(
        InvalidInput, f"{tmp_path / 'b.csv'}: got the columns ['b'], expected ['a'] as in {tmp_path / 'a.csv'}"
    ):
        load_data(str(tmp_path))

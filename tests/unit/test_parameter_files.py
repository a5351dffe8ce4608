"""Files of parameters: both formats are read back, and any other file has one error that names it."""

from pathlib import Path

import numpy as np
import pytest
from support.errors import raises

from fanin.edge.parameter_files import read_parameters
from fanin.edge.tensors import TensorTable, encode_parameters
from fanin.protos.errors import InvalidInput

TABLE = TensorTable.of({"a.weight": (2, 3), "b": ()})
FLAT = np.arange(7, dtype=np.float32)


def test_canonical_bytes_and_an_npz_file_have_the_same_parameters(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(encode_parameters(TABLE, FLAT))
    views = TABLE.views(FLAT)
    np.savez(tmp_path / "arrays.npz", **{name: views[name] for name in reversed(views)})
    for name in ("bytes", "arrays.npz"):
        table, flat = read_parameters(tmp_path / name)
        assert table == TABLE and flat.tolist() == FLAT.tolist()


def test_a_file_that_holds_something_else_is_named(tmp_path: Path) -> None:
    with raises(InvalidInput, f"{tmp_path}/none: cannot be read (No such file or directory)"):
        read_parameters(tmp_path / "none")
    (tmp_path / "other").write_bytes(b"not parameters")
    with raises(InvalidInput, f"{tmp_path}/other: parameters: got magic b'not para', expected b'fanin-t2'"):
        read_parameters(tmp_path / "other")
    np.savez(tmp_path / "double.npz", w=np.zeros(2))
    message = "double.npz: got w of float64, expected float32 arrays by the names of the parameters"
    with raises(InvalidInput, f"{tmp_path}/{message}"):
        read_parameters(tmp_path / "double.npz")


@pytest.mark.parametrize("num_bytes", [4, 30, 100, 200])
def test_an_archive_that_is_cut_raises_one_error(tmp_path: Path, num_bytes: int) -> None:
    np.savez(tmp_path / "whole.npz", w=np.zeros(200, np.float32))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:num_bytes])
    with pytest.raises(InvalidInput, match="FN-0350"):
        read_parameters(tmp_path / "cut.npz")

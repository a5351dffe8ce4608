"""Files of parameters: both formats are read back, and any other file has one error that names it."""

from collections.abc import Callable
from functools import partial
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


def _torch_file(path: Path, *, is_zip: bool) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.zeros(2)}, path, _use_new_zipfile_serialization=is_zip)


def _safetensors(path: Path) -> None:
    pytest.importorskip("safetensors.numpy").save_file({"w": np.zeros(2, np.float32)}, path)


def _array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("write", "kind", "arrays"),
    [
        (partial(_torch_file, is_zip=True), "a checkpoint of torch", "torch.load(FILE)"),
        (partial(_torch_file, is_zip=False), "a pickle, such as a checkpoint of torch", "torch.load(FILE)"),
        (_safetensors, "a .safetensors file", "safetensors.numpy.load_file(FILE)"),
        (_array, "a single array of numpy", "arrays"),
    ],
)
def test_a_file_of_another_library_is_named_with_its_conversion(
    tmp_path: Path, write: Callable[[Path], None], kind: str, arrays: str
) -> None:
    write(tmp_path / "weights")
    message = (
        f"{tmp_path}/weights: got {kind}, expected the parameters of fanin fetch, parameters.bin of fanin train, or an "
        f".npz file; write one with np.savez('parameters.npz', **{arrays})"
    )
    with raises(InvalidInput, message):
        read_parameters(tmp_path / "weights")


def test_the_state_dict_of_torch_is_converted_as_the_error_shows(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.BatchNorm1d(3).state_dict(), tmp_path / "state.pt")
    np.savez(tmp_path / "parameters.npz", **torch.load(tmp_path / "state.pt"))
    table, _ = read_parameters(tmp_path / "parameters.npz")
    assert [spec.name for spec in table.specs] == ["bias", "running_mean", "running_var", "weight"]


def test_a_folder_is_no_file_of_parameters(tmp_path: Path) -> None:
    with raises(InvalidInput, f"{tmp_path}: is a folder, expected a file of parameters; name the file"):
        read_parameters(tmp_path)


@pytest.mark.parametrize("num_bytes", [4, 30, 100, 200])
def test_an_archive_that_is_cut_raises_one_error(tmp_path: Path, num_bytes: int) -> None:
    np.savez(tmp_path / "whole.npz", w=np.zeros(200, np.float32))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:num_bytes])
    with pytest.raises(InvalidInput, match="FN-0350"):
        read_parameters(tmp_path / "cut.npz")

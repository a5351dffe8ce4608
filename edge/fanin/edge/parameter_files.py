"""Files of parameters as fanin writes them: canonical bytes, or an .npz file with an array for each name."""

import zipfile
import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np

from fanin.edge.tensors import Array, Float32s, TensorTable, decode_parameters
from fanin.protos.errors import InvalidInput

ARCHIVE: Final = b"PK\x03\x04"
"""The first bytes of an .npz file, and of a checkpoint of torch."""
_TORCH: Final = "/data.pkl"
"""The end of a name that each checkpoint of torch has."""
_PICKLE: Final = b"\x80"
"""The first byte of a pickle, such as a checkpoint of torch before 1.6."""
_ARRAY: Final = b"\x93NUMPY"
_LENGTH_BYTES: Final = 8
"""A .safetensors file has the length of its JSON header first."""


def read_parameters(path: Path) -> tuple[TensorTable, Float32s]:
    """Return the table and vector (num_values,) in a file.

    Raises:
        InvalidInput: The file cannot be read, or has other content.
    """
    try:
        data = path.read_bytes()
        if data.startswith(ARCHIVE):
            return _of_archive(data)
        if data.startswith(_PICKLE):
            raise _refusal("a pickle, such as a checkpoint of torch", "torch.load(FILE)")
        if data.startswith(_ARRAY):
            raise _refusal("a single array of numpy", "arrays")
        if data[_LENGTH_BYTES:].startswith(b'{"'):
            raise _refusal("a .safetensors file", "safetensors.numpy.load_file(FILE)")
        return decode_parameters(data)
    except IsADirectoryError as exc:
        raise InvalidInput(
            f"{path}: is a folder, expected a file of parameters; name the file", code="FN-0352"
        ) from exc
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({exc.strerror or exc})", code="FN-0352") from exc
    except InvalidInput as exc:
        raise InvalidInput(f"{path}: {exc}", code=exc.code) from exc


def read_tensors(path: Path, expected: TensorTable) -> Float32s:
    """Return the vector (num_values,) in a file with these tensors. Raises InvalidInput for another file."""
    table, flat = read_parameters(path)
    if table != expected:
        raise InvalidInput(
            f"{path}: has parameters of other names or shapes than the bundle, expected its own", code="FN-1021"
        )
    return flat


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays as an .npz file, in their order."""
    # numpy.savez takes arrays as keyword arguments, so a tensor named like one of its parameters would fail.
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _refusal(kind: str, arrays: str) -> InvalidInput:
    return InvalidInput(
        f"got {kind}, expected the parameters of fanin fetch, parameters.bin of fanin train, or an .npz file; write "
        f"one with np.savez('parameters.npz', **{arrays})",
        code="FN-0350",
    )


def _of_archive(data: bytes) -> tuple[TensorTable, Float32s]:
    try:
        with np.load(BytesIO(data), allow_pickle=False) as archive:
            if any(name.endswith(_TORCH) for name in archive.files):
                raise _refusal("a checkpoint of torch", "torch.load(FILE)")
            arrays = {name: np.asarray(archive[name]) for name in archive.files}
    except (ValueError, EOFError, KeyError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as exc:
        raise InvalidInput(f"not a readable .npz file of plain arrays ({exc})", code="FN-0350") from exc
    # Counters of a Flower app, such as num_batches_tracked: a fetched file has them, and no Version.
    arrays = {name: array for name, array in arrays.items() if array.dtype.kind not in "biu"}
    for name, array in arrays.items():
        if array.dtype != np.float32:
            raise InvalidInput(
                f"got {name} of {array.dtype}, expected float32 arrays by the names of the parameters", code="FN-0351"
            )
    try:
        table = TensorTable.of({name: array.shape for name, array in arrays.items()})
    except ValueError as exc:
        raise InvalidInput(str(exc), code="FN-0351") from exc
    return table, table.flatten(arrays)

"""Examples in .npz files, read without pickle."""

import lzma
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from fanin.clients.data.examples import Examples, NamedArrays, Y, shape_fault, value_fault
from fanin.clients.data.stores import MemoryStore, least_examples, memory_store
from fanin.clients.textfiles import reason_of
from fanin.edge.runtimes.base import Inputs
from fanin.edge.runtimes.graphs import X
from fanin.protos.errors import InvalidInput
from fanin.protos.texts import counted

EXPECTED: Final = "y and an array for each input, such as x"
UNREADABLE: Final = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""Errors of numpy and zipfile for files of another format. RuntimeError: the file is encrypted or has an unknown
compression. Most of the others come from a header that does not describe an array."""


def open_npz(path: Path, partition: int, validation_fraction: float) -> MemoryStore:
    """Create the store of an .npz file with inputs and ``y`` (see ``read_npz`` and ``memory_store``).

    Raises:
        InvalidInput: The file is no such file, or has too few examples.
    """
    examples = read_npz(path)
    least = least_examples(validation_fraction)
    if len(examples) < least:
        reason = ": one is held out for validation" if validation_fraction else ""
        raise InvalidInput(
            f"{path}: got {counted(len(examples), 'example')}, expected at least {least}{reason}", code="FN-0855"
        )
    return memory_store(examples, partition, validation_fraction)


def read_npz(path: Path) -> Examples:
    """Read examples from an .npz file.

    The file has the array ``y`` with labels, tokens or floats. For each input of the model it has an array (n, ...) of
    floats, integers, masks or bytes with the input's name: ``x`` for most models. Pickled objects are rejected.

    Raises:
        InvalidInput: The file cannot be read. The message names the file, the array and the fix.
    """
    try:
        with path.open("rb") as file:
            inputs, y = _arrays(path, file)
    except FileNotFoundError as exc:
        raise InvalidInput(f"{path}: no such file; expected an .npz file with {EXPECTED}", code="FN-0851") from exc
    except (IsADirectoryError, PermissionError) as exc:
        raise InvalidInput(f"{path}: cannot be read ({reason_of(exc)})", code="FN-0851") from exc
    except UNREADABLE as exc:
        # numpy takes any other format for a pickle, and advises to load it unsafely.
        reason = "another format" if "contains pickled" in str(exc) else exc
        raise InvalidInput(f"{path}: not a readable .npz file of plain arrays ({reason})", code="FN-0852") from exc
    fault = _dtype_fault(inputs, y) or shape_fault(inputs, y) or value_fault(inputs, y)
    if fault is not None:
        raise InvalidInput(f"{path}: {fault}", code="FN-0854")
    return Examples(inputs={name: _input(array) for name, array in inputs.items()}, y=_narrow(y))


def write_npz(path: Path, examples: Examples) -> None:
    """Write examples to a file that ``read_npz`` reads."""
    np.savez(path, **examples.inputs, y=examples.y)  # type: ignore[arg-type]  # RESERVED: no input is named so


def _arrays(path: Path, file: BinaryIO) -> tuple[NamedArrays, npt.NDArray[np.generic]]:
    archive = np.load(file, allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise InvalidInput(f"{path}: got a single array, expected an .npz file with {EXPECTED}", code="FN-0852")
    with archive:
        names = [name for name in archive if name != Y]
        if Y not in archive or not names:
            missing = Y if Y not in archive else X
            raise InvalidInput(
                f"{path}: got the arrays {sorted(archive)}, expected {EXPECTED}; add {missing}", code="FN-0853"
            )
        return {name: _array(path, archive, name) for name in names}, _array(path, archive, Y)


def _array(path: Path, archive: Mapping[str, object], key: str) -> npt.NDArray[np.generic]:
    array = archive[key]
    # numpy returns a member that is not in its array format as bytes.
    if not isinstance(array, np.ndarray):
        raise InvalidInput(
            f"{path}: {key} is {type(array).__name__}, expected an array as numpy.savez writes it", code="FN-0852"
        )
    return array


def _dtype_fault(inputs: NamedArrays, y: npt.NDArray[np.generic]) -> str | None:
    for name, array in inputs.items():
        if array.dtype.kind != "f" and array.dtype not in (np.int32, np.int64, np.bool_, np.uint8):
            return (
                f"got {name} of {array.dtype}, expected floats, scaled as the model wants them "
                f"({name}.astype('float32') / 255), integers ({name}.astype('int32')), or bytes for a bundle with "
                f"preprocess ({name}.astype('uint8')); remove an array that is no input"
            )
    if y.dtype.kind not in "iuf":
        return f"got y of {y.dtype}, expected integers (y.astype('int32')), or floats for a model of values"
    return None


def _input(array: npt.NDArray[np.generic]) -> Inputs:
    return array.astype(np.uint8, copy=False) if array.dtype == np.uint8 else _narrow(array)


def _narrow(array: npt.NDArray[np.generic]) -> Inputs:
    """Convert floats to float32, and integers and masks to int32."""
    return array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array.astype(np.int32, copy=False)

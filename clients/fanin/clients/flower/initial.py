"""The initial arrays that a command line names: a file of arrays, or an object that has them."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.clients.data.npz import UNREADABLE
from fanin.clients.textfiles import reason_of
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidInput, RuntimeMissing

STATES: Final = ("state_dict", "model_state_dict", "model")
"""Keys of a torch checkpoint, as of Lightning, below which the state dict is."""


def read_initial(text: str, folder: Path) -> dict[str, Array]:
    """Return the arrays of the option ``--initial`` by name, in their order.

    Args:
        text: The path of a file of arrays, or ``package.module:name`` or ``path/to/file.py:name`` (see
            ``load_arrays``).
        folder: The folder that the module is imported from.

    Raises:
        InvalidInput: The file cannot be read, or the object has no arrays.
        RuntimeMissing: The library that reads the file is not installed.
    """
    path = Path(text)
    if path.suffix not in READERS:
        if ":" not in text and not (folder / text).is_dir():
            raise InvalidInput(
                f"--initial: got {text}, expected a file with one of the suffixes {', '.join(READERS)}, the folder of "
                "a project, or MODULE:NAME",
                code="FN-0902",
            )
        # Imported late: a file needs no flwr.
        from fanin.clients.flower.app import load_arrays

        return load_arrays(text, folder)
    try:
        return READERS[path.suffix](path)
    except ModuleNotFoundError as exc:
        raise RuntimeMissing(
            f"--initial: {path}: {exc.name} is not installed here; pip install {exc.name}", code="FN-0020"
        ) from exc
    except (FileNotFoundError, IsADirectoryError, PermissionError) as exc:
        raise InvalidInput(f"--initial: {path}: cannot be read ({reason_of(exc)})", code="FN-0902") from exc
    except UNREADABLE as exc:
        reason = "another format" if "contains pickled" in str(exc) else exc
        raise InvalidInput(
            f"--initial: {path}: not a readable {path.suffix} file of plain arrays ({reason})", code="FN-0902"
        ) from exc


def _npz(path: Path) -> dict[str, Array]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    # numpy returns a member that is not in its array format as bytes.
    if others := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise ValueError(f"{others[0]} is no array; a checkpoint of torch needs the suffix .pt")
    return arrays


def _npy(path: Path) -> dict[str, Array]:
    with path.open("rb") as file:
        return {"0": np.load(file, allow_pickle=False)}


def _torch(path: Path) -> dict[str, Array]:
    """Read a state dict, also inside a checkpoint. The file cannot run code, because only plain data is read."""
    torch = importlib.import_module("torch")
    with path.open("rb") as file:
        try:
            content: object = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as exc:  # Any error: torch has many for a damaged file, and a long one for a pickled module.
            raise ValueError(f"{type(exc).__name__}; save the module's state_dict()") from exc
    for key in STATES:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    from fanin.clients.flower.app import arrays_of

    return arrays_of(content)


def _safetensors(path: Path) -> dict[str, Array]:
    library = importlib.import_module("safetensors.numpy")
    try:
        arrays: dict[str, Array] = library.load(path.read_bytes())
    except (OSError, ModuleNotFoundError):
        raise
    except Exception as exc:  # Its own error, which has no common base.
        raise ValueError(f"{type(exc).__name__}: {exc}") from exc
    return arrays


READERS: Final[Mapping[str, Callable[[Path], dict[str, Array]]]] = MappingProxyType(
    {".npz": _npz, ".npy": _npy, ".safetensors": _safetensors} | dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), _torch)
)
"""The files that ``--initial`` reads, by suffix."""

"""The initial arrays that a command line names: an .npz file, or an object that has them."""

from pathlib import Path

import numpy as np

from fanin.clients.data.npz import UNREADABLE
from fanin.clients.textfiles import reason_of
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidInput


def read_initial(text: str, folder: Path) -> dict[str, Array]:
    """Return the arrays of the option ``--initial`` by name, in their order.

    Args:
        text: The path of an .npz file, or ``package.module:name`` or ``path/to/file.py:name`` (see ``load_arrays``).
        folder: The folder that the module is imported from.

    Raises:
        InvalidInput: The file cannot be read, or the object has no arrays.
    """
    if not text.endswith(".npz"):
        # Imported late: a file needs no flwr.
        from fanin.clients.flower.app import load_arrays

        return load_arrays(text, folder)
    path = Path(text)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (FileNotFoundError, IsADirectoryError, PermissionError) as exc:
        raise InvalidInput(f"--initial: {path}: cannot be read ({reason_of(exc)})", code="FN-0902") from exc
    except UNREADABLE as exc:
        reason = "another format" if "contains pickled" in str(exc) else exc
        raise InvalidInput(
            f"--initial: {path}: not a readable .npz file of plain arrays ({reason})", code="FN-0902"
        ) from exc

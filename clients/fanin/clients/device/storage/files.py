"""File helpers of a device's folder."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from fanin.edge.files import replace_file, storage_error


def own_files(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """Return the regular files in a folder whose full name matches ``name``; other files are foreign."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if name.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)]
    return [folder / each for each in names]


def replace(path: Path, data: bytes | Sequence[bytes | memoryview], mode: int = 0o666) -> None:
    """Replace a file durably: the old content does not come back after a power cut.

    Args:
        path: The file.
        data: Its new content, perhaps in pieces.
        mode: Permissions of the new file, reduced by the umask.

    Raises:
        StorageFull, StorageUnavailable: It cannot be written.
    """
    try:
        replace_file(path, data, mode=mode)
    except OSError as exc:
        raise storage_error(str(path), exc) from exc

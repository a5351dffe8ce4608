"""Where a job is to write, tried before a process of it starts: when it has trained it is too late to be told."""

import tempfile
from pathlib import Path

from fanin.protos.errors import InvalidInput


def check_folder(folder: Path, what: str, *, makes: bool = False) -> None:
    """Raise InvalidInput unless files can be made in a folder, which is made first if it is to be (``makes``).

    ``what`` names the place that needs it, in errors.
    """
    try:
        if makes:
            folder.mkdir(parents=True, exist_ok=True)
        # Tried, not asked for: permissions do not tell of a disk that takes nothing.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        told = "name another" if makes else "make the folder, or name another"
        raise InvalidInput(
            f"{what}, expected a place that can be written (folder {folder}: {exc.strerror}); {told}"
        ) from exc


def check_renamed(path: Path, what: str) -> None:
    """Raise InvalidInput unless a file can be written aside and renamed to this path."""
    if path.is_dir():
        raise InvalidInput(f"{what}, which is a folder; name a file in it")
    check_folder(path.parent, what)

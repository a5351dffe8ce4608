"""Calls of a process to the operating system, as the interpreter's audit hooks report them."""

import sys
from pathlib import Path


def opened_folders() -> list[Path]:
    """Return a list that grows with each opened folder. A folder is opened to sync its names.

    An audit hook cannot be removed from its process, so call this function in a child process.
    """
    folders: list[Path] = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        path = arguments[0] if event == "open" and arguments else None
        if isinstance(path, str | Path) and Path(path).is_dir():
            folders.append(Path(path))

    sys.addaudithook(note)
    return folders

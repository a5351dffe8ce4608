"""What a process asks of the operating system, as the interpreter reports it."""

import sys
from pathlib import Path


def opened_folders() -> list[Path]:
    """A list that grows with each folder that is opened, which is how its names are synced.

    An audit hook stays for as long as its process: call it in a child.
    """
    found: list[Path] = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        path = arguments[0] if event == "open" and arguments else None
        if isinstance(path, str | Path) and Path(path).is_dir():
            found.append(Path(path))

    sys.addaudithook(note)
    return found

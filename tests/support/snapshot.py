"""The durable state of a coordinator at one moment, for tests that it did not change."""

import hashlib
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("blobs", "spool", "updates")


@dataclass(frozen=True)
class Snapshot:
    """The rows of every table except two, and the digest of every file in spool, updates and blobs.

    Leases change with each start of a coordinator, and the audit log with each call that may change something.
    """

    rows: dict[str, list[tuple[object, ...]]]
    files: dict[str, str]

    def under(self, folder: str) -> list[str]:
        """Return the files in one of the folders."""
        return sorted(name for name in self.files if name.startswith(f"{folder}/"))


def snapshot(state: Path) -> Snapshot:
    """Return the current content of a coordinator's folder. The coordinator may be running."""
    with closing(sqlite3.connect(f"file:{state / 'fanin.db'}?mode=ro", uri=True)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
        rows = {
            name: connection.execute(f'SELECT * FROM "{name}" ORDER BY 1, 2').fetchall()
            for (name,) in names
            if name not in ("alembic_version", "audit", "leases", "sqlite_sequence")
        }
    paths = (path for folder in FOLDERS for path in (state / folder).rglob("*") if path.is_file())
    files = {str(path.relative_to(state)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    return Snapshot(rows=rows, files=files)

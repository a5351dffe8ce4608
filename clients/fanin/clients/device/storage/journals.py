"""The journals of round protocols on a device's disk: one file for each Run, with bytes that the protocol defines.

A journal may have secrets, so only the owner of the folder can read it. It outlives its Assignments: a protocol keeps
there what it must never do twice.
"""

from pathlib import Path

from fanin.clients.device.storage.files import replace


class JournalStore:
    """The journals in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, run_id: str) -> bytes:
        """Return the journal of a Run; empty without one."""
        try:
            return self._path(run_id).read_bytes()
        except FileNotFoundError:
            return b""

    def put(self, run_id: str, data: bytes) -> None:
        """Store the journal of a Run instead of the last one. It is durable before this returns. Raises StorageFull."""
        replace(self._path(run_id), data, mode=0o600)

    def _path(self, run_id: str) -> Path:
        return self._folder / f"{run_id}.journal"

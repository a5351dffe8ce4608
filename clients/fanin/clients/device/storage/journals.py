"""The journals of round protocols on a device's disk: one file for each Run, with bytes that the protocol defines.

A journal may have secrets, so only the owner of the folder can read it. It outlives its Assignments: a protocol keeps
there what it must never do twice.
"""

from pathlib import Path

from fanin.clients.device.storage.files import replace
from fanin.protos.errors import Corrupted


class JournalStore:
    """The journals in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, run_id: str) -> bytes:
        """Return the journal of a Run; empty without one. Raises Corrupted if there was one."""
        try:
            return self._path(run_id).read_bytes()
        except FileNotFoundError as exc:
            if not self._mark(run_id).exists():
                return b""
            raise Corrupted(
                f"journal of a round protocol: {self._path(run_id)} is lost; give up the attempt, because a key could "
                "serve twice",
                code="FN-1634",
            ) from exc

    def put(self, run_id: str, data: bytes) -> None:
        """Store the journal of a Run instead of the last one. It is durable before this returns. Raises StorageFull."""
        if not self._mark(run_id).exists():
            replace(self._mark(run_id), b"", mode=0o600)
        replace(self._path(run_id), data, mode=0o600)

    def _mark(self, run_id: str) -> Path:
        """Return the file that says that a Run has a journal. It is created before the journal."""
        return self._folder / f"{run_id}.begun"

    def _path(self, run_id: str) -> Path:
        return self._folder / f"{run_id}.journal"

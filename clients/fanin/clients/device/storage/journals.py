"""The journals of round protocols on a device's disk: one file for each Run, with bytes that the protocol defines.

A journal may have secrets, so only the owner of the folder can read it. It outlives its Assignments: a protocol keeps
there what it must never do twice. So a journal that lost records must not look like an earlier one. The mark beside it
has the SHA-256 of each content that is whole, in hexadecimal, one a line. A journal is replaced in three steps, each
durable before the next one:

    1. mark: old and new     a process that is killed here leaves the old journal
    2. journal: new          or the new one here. Both are whole
    3. mark: new             from now on the old one is damage

Nothing that follows from the new journal is sent before step 3. After a kill, the first read carries out step 3 for the
content that is there. A damaged journal is in no mark, so its replacement does not make it whole.
"""

from collections.abc import Iterable
from pathlib import Path

from fanin.clients.device.storage.files import replace
from fanin.edge.tensors import sha256_hex
from fanin.protos.errors import Corrupted


class JournalStore:
    """The journals in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, run_id: str) -> bytes:
        """Return the journal of a Run; empty without one. Raises Corrupted if it, or a part of it, is lost."""
        whole, data = self._whole(run_id), self._read(run_id)
        digest = sha256_hex(data)
        if whole is None and not self._path(run_id).exists():
            return b""
        if whole is None or digest not in whole:
            problem = "its mark .begun is lost" if whole is None else "is not the journal that was stored last"
            raise Corrupted(
                f"journal of a round protocol: {self._path(run_id)}: {problem}; give up the attempt, because a key "
                "could serve twice",
                code="FN-1634",
            )
        if len(whole) > 1:
            self._put_mark(run_id, (digest,))
        return data

    def put(self, run_id: str, data: bytes) -> None:
        """Store the journal of a Run instead of the last one. It is durable before this returns. Raises StorageFull."""
        old, new = sha256_hex(self._read(run_id)), sha256_hex(data)
        whole = self._whole(run_id)
        is_whole = old in whole if whole is not None else not self._path(run_id).exists()
        self._put_mark(run_id, (old, new) if is_whole else (new,))
        replace(self._path(run_id), data, mode=0o600)
        self._put_mark(run_id, (new,))

    def _read(self, run_id: str) -> bytes:
        """Return the bytes of a journal. A missing one has none."""
        try:
            return self._path(run_id).read_bytes()
        except FileNotFoundError:
            return b""

    def _whole(self, run_id: str) -> tuple[str, ...] | None:
        """Return the digests of the whole contents, None without a mark."""
        try:
            return tuple(self._mark(run_id).read_text(encoding="ascii", errors="replace").splitlines())
        except FileNotFoundError:
            return None

    def _put_mark(self, run_id: str, digests: Iterable[str]) -> None:
        replace(self._mark(run_id), "\n".join(digests).encode(), mode=0o600)

    def _mark(self, run_id: str) -> Path:
        return self._folder / f"{run_id}.begun"

    def _path(self, run_id: str) -> Path:
        return self._folder / f"{run_id}.journal"

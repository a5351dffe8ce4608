"""The folder of a simulated device, in memory."""

import hashlib
from collections.abc import Callable, Iterable

from fanin.protos.chunks import ChunkRef
from fanin.protos.messages import UpdateHeader


class MemoryChunks(dict[str, bytes]):
    """Downloaded Chunks by their SHA-256: those that ``trim`` keeps, so their number does not grow with the Rounds."""

    def has(self, ref: ChunkRef) -> bool:
        """Return whether a Chunk is stored."""
        return ref.sha256 in self

    def read(self, sha256: str) -> bytes:
        """Return a Chunk's bytes; the caller verifies them."""
        return self[sha256]

    def fetch(self, ref: ChunkRef, download: Callable[[int], Iterable[bytes]]) -> int:
        """Store a Chunk from its stream. Returns the number of bytes. What is read from it is verified."""
        self[ref.sha256] = b"".join(download(0))
        return len(self[ref.sha256])

    def remove_damaged(self, refs: Iterable[ChunkRef]) -> None:
        """Remove those of these Chunks whose bytes do not have the digest in their name."""
        for ref in refs:
            if ref.sha256 in self and hashlib.sha256(self[ref.sha256]).hexdigest() != ref.sha256:
                del self[ref.sha256]

    def trim(self, keep: Iterable[str]) -> None:
        """Remove all other Chunks."""
        for name in self.keys() - set(keep):
            del self[name]


class MemoryUpdates:
    """At most one Update."""

    def __init__(self) -> None:
        self._update: tuple[UpdateHeader, bytes] | None = None

    def put(self, header: UpdateHeader, payload: bytes) -> None:
        """Store an Update instead of the last one."""
        self._update = (header, payload)

    def header(self, assignment_id: str) -> UpdateHeader | None:
        """Return the header of an Assignment's Update; None if there is none."""
        if self._update is None or self._update[0].assignment_id != assignment_id:
            return None
        return self._update[0]

    def read(self, assignment_id: str, offset: int, size_bytes: int) -> bytes:
        """Return a slice of an Update's payload."""
        assert self._update is not None and self._update[0].assignment_id == assignment_id, "stored before it is sent"
        return self._update[1][offset : offset + size_bytes]

    def clear(self) -> None:
        """Remove the Update."""
        self._update = None


class MemoryRecords(dict[str, int]):
    """The highest verified Version number of each Run."""

    def highest_version(self, run_id: str) -> int:
        """Return the highest number; -1 for none."""
        return self.get(run_id, -1)

    def raise_version(self, run_id: str, number: int) -> None:
        """Record a number, unless a higher one is recorded."""
        self[run_id] = max(number, self.highest_version(run_id))


class MemoryFolder:
    """A ``DeviceFolder``: it survives ``VirtualDevice.restart``."""

    def __init__(self) -> None:
        self.chunks = MemoryChunks()
        self.updates = MemoryUpdates()
        self.records = MemoryRecords()

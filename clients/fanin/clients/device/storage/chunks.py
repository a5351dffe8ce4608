"""Downloaded Chunks on a device's disk, named by their SHA-256.

A Bundle that many Rounds use is downloaded once, and an interrupted download resumes. A Chunk that is damaged on this
disk is removed and downloaded again.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from fanin.clients.device.storage.files import own_files
from fanin.edge.files import storage_error
from fanin.edge.tensors import sha256_hex
from fanin.protos.chunks import ChunkRef, check_digest, short
from fanin.protos.errors import InvalidInput, NotFound, Unavailable

LOG = logging.getLogger("fanin.clients")
_CHUNK_NAME: Final = re.compile(r"[0-9a-f]{64}(\.part)?", re.ASCII)


class ChunkStore:
    """The Chunks in a folder, at most ``max_bytes`` of them after ``trim``."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        # Digests of the Chunks that this process has verified.
        self._verified: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, ref: ChunkRef) -> bool:
        """Return whether a Chunk is stored. Each process verifies it once; a damaged Chunk is removed."""
        path = self._folder / ref.sha256
        if not path.exists():
            return False
        if ref.sha256 not in self._verified:
            self.remove_damaged((ref,))
            self._verified.add(ref.sha256)
        return path.exists()

    def read(self, sha256: str) -> bytes:
        """Return a Chunk's bytes; the caller verifies them. Raises NotFound."""
        path = self._folder / sha256
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError as exc:
            raise NotFound(f"chunk {sha256}: not in the cache", code="FN-0823") from exc
        return data

    def fetch(self, ref: ChunkRef, download: Callable[[int], Iterable[bytes]]) -> int:
        """Download a Chunk, from the offset at which an earlier try stopped. Received bytes survive any failure.

        Args:
            ref: The Chunk.
            download: Streams the Chunk's bytes from an offset.

        Returns:
            The number of bytes that ``download`` delivered.

        Raises:
            InvalidInput: The Chunk does not verify; the next try downloads all of it.
            Unavailable: The stream ended early, or the bytes of an earlier try may be damaged.
            StorageFull: The disk is full.
        """
        part = self._folder / f"{ref.sha256}.part"
        received, digest = 0, hashlib.sha256()
        try:
            with part.open("a+b") as file:
                offset = file.tell()
                if offset > ref.size_bytes:
                    file.truncate(offset := 0)
                if offset:
                    file.seek(0)
                    digest.update(file.read())
                for data in download(offset):
                    file.write(data)
                    digest.update(data)
                    received += len(data)
                    if offset + received > ref.size_bytes:
                        break
        except OSError as exc:
            raise storage_error(str(part), exc) from exc
        size = offset + received
        if size < ref.size_bytes:
            raise Unavailable(
                f"chunk {short(ref.sha256)}: the stream ended at byte {size} of {ref.size_bytes}", code="FN-0826"
            )
        try:
            check_digest(f"chunk {short(ref.sha256)}", ref, size, digest.hexdigest())
        except InvalidInput as exc:
            part.unlink()
            if offset:
                raise Unavailable(
                    f"{exc}; its first {offset} bytes, which were stored here, may be damaged, so the next try "
                    "downloads all of it",
                    code="FN-0826",
                ) from exc
            raise
        part.replace(self._folder / ref.sha256)
        self._verified.add(ref.sha256)
        return received

    def remove_damaged(self, refs: Iterable[ChunkRef]) -> None:
        """Remove those of these Chunks whose bytes do not have the digest in their name."""
        for ref in refs:
            path = self._folder / ref.sha256
            if path.exists() and sha256_hex(path.read_bytes()) != ref.sha256:
                LOG.warning("cache: chunk %s: damaged on this disk, removed and downloaded again", short(ref.sha256))
                path.unlink()

    def trim(self, keep: Iterable[str]) -> None:
        """Remove the least recently used Chunks until the others fit, but none of the names in ``keep``."""
        names = set(keep)
        paths = sorted(own_files(self._folder, _CHUNK_NAME), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in paths)
        for path in paths:
            if total <= self._max_bytes:
                return
            if path.name not in names:
                total -= path.stat().st_size
                path.unlink()

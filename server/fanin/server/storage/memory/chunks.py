"""Blobs in memory."""

import hashlib
from collections.abc import Iterable, Iterator

from fanin.edge.tensors import sha256_hex
from fanin.protos.chunks import Artifact, assemble, check_sha256, short
from fanin.protos.errors import InvalidInput, NotFound
from fanin.server.storage.blobs import cut, named


class MemoryBlobs:
    """``Blobs`` in memory."""

    def __init__(self) -> None:
        self._chunks: dict[str, bytes] = {}

    def read(self, digest: str, offset: int = 0, size_bytes: int = -1) -> bytes:
        """See ``BlobReader.read``."""
        check_sha256("chunk", digest)
        if digest not in self._chunks:
            raise NotFound(f"chunk {short(digest)}: not stored here", code="FN-0520")
        data = self._chunks[digest]
        if not 0 <= offset <= len(data):
            raise InvalidInput(f"chunk {short(digest)}: got offset {offset}, expected 0 to {len(data)}", code="FN-0120")
        return data[offset:] if size_bytes < 0 else data[offset : offset + size_bytes]

    def read_artifact(self, what: str, artifact: Artifact) -> bytes:
        """See ``BlobReader.read_artifact``."""
        return assemble(what, artifact, self.read)

    def pieces(self, what: str, artifact: Artifact) -> Iterator[bytes]:
        """See ``BlobReader.pieces``."""
        for ref in artifact.chunks:
            yield self.read(ref.sha256)

    def put(self, digest: str, data: bytes) -> None:
        """See ``Blobs.put``."""
        check_sha256("chunk", digest)
        if sha256_hex(data) != digest:
            raise InvalidInput(
                f"chunk: digest mismatch (got {short(sha256_hex(data))}, expected {short(digest)})", code="FN-0117"
            )
        self._chunks[digest] = bytes(data)

    def put_pieces(self, pieces: Iterable[bytes]) -> Artifact:
        """See ``Blobs.put_pieces``."""
        total, refs = hashlib.sha256(), []
        for ref, data in named(cut(pieces), total):
            self._chunks[ref.sha256] = data
            refs.append(ref)
        size_bytes = sum(ref.size_bytes for ref in refs)
        return Artifact(sha256=total.hexdigest(), size_bytes=size_bytes, chunks=tuple(refs))

    def missing(self, digests: Iterable[str]) -> tuple[str, ...]:
        """See ``Blobs.missing``."""
        digests = tuple(dict.fromkeys(digests))
        for digest in digests:
            check_sha256("chunk", digest)
        return tuple(digest for digest in digests if digest not in self._chunks)

    def renew(self, digests: Iterable[str]) -> None:
        """See ``Blobs.renew``."""

    def older_than(self, before_s: float) -> set[str]:
        """See ``OldBlobs.older_than``. Chunks in memory have no age."""
        return set()

    def stored(self, digests: Iterable[str]) -> set[str]:
        """See ``OldBlobs.stored``. Chunks in memory are never removed, and nobody looks for them."""
        return set()

    def remove_older(self, digests: Iterable[str], before_s: float) -> int:
        """See ``OldBlobs.remove_older``."""
        return 0

    def sweep(self) -> None:
        """See ``Blobs.sweep``. A Chunk in memory is complete or absent."""

"""Artifacts and Chunks: how content is split, named by digest, and assembled again.

A Chunk is named by its SHA-256. So a transfer can stop anywhere and resume with the missing Chunks, from any server. An
Artifact lists its Chunks in order and has a digest over its complete content.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import InvalidInput

CHUNK_BYTES: Final = 1 << 20
"""1 MiB: a quarter of gRPC's default 4 MiB message limit, so a Chunk and its envelope always fit."""
MAX_CHUNK_BYTES: Final = 3 << 20
"""Longest Chunk that is accepted in a peer's manifest. With its envelope it stays below gRPC's 4 MiB."""
MAX_MORE_CHUNKS: Final = 64
"""Most Chunks after the first in one download. More would hold a download permit for too long."""
SHA256_HEX_CHARS: Final = 64
_SHA256: Final = re.compile(rf"[0-9a-f]{{{SHA256_HEX_CHARS}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRef:
    """Digest and size of a Chunk. ``url`` may name another server of the same bytes."""

    sha256: str
    size_bytes: int
    url: str = ""

    def __post_init__(self) -> None:
        check_sha256("chunk", self.sha256)
        if not 0 < self.size_bytes <= MAX_CHUNK_BYTES:
            raise InvalidInput(f"chunk: got {self.size_bytes} bytes, expected 1 to {MAX_CHUNK_BYTES}", code="FN-0116")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Content-addressed bytes: digest, size, and Chunks in order."""

    sha256: str
    size_bytes: int
    chunks: tuple[ChunkRef, ...]

    def __post_init__(self) -> None:
        check_sha256("artifact", self.sha256)
        total = sum(chunk.size_bytes for chunk in self.chunks)
        if total != self.size_bytes:
            raise InvalidInput(
                f"artifact: got chunks of {total} bytes in all, expected {self.size_bytes}", code="FN-0116"
            )


def check_sha256(what: str, digest: str) -> None:
    """Raise InvalidInput unless ``digest`` is 64 lower-case hexadecimal characters."""
    if _SHA256.fullmatch(digest) is None:
        raise InvalidInput(
            f"{what}: got digest {digest[:80]!r}, expected {SHA256_HEX_CHARS} hexadecimal characters", code="FN-0116"
        )


def check_num_chunks(number: int, size_bytes: int) -> None:
    """Raise InvalidInput for more Chunks than an Update of this size has.

    Check it before a loop over all that a device has sent.
    """
    most = -(-size_bytes // CHUNK_BYTES)
    if number > most:
        raise InvalidInput(
            f"update: got {number} chunks, expected at most {most} for {size_bytes} bytes", code="FN-0116"
        )


def short(digest: str) -> str:
    """Return the first characters of a digest, for messages. A peer may have sent any text in its place."""
    first = digest[:8]
    return f"{first if first.isprintable() else ascii(first)}.."


def cut(data: bytes, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[ChunkRef, bytes]]:
    """Split ``data`` into Chunks; yield each with its bytes, in order."""
    for start in range(0, len(data), chunk_bytes):
        chunk = data[start : start + chunk_bytes]
        yield _ref(chunk), chunk


def artifact_of(data: bytes) -> Artifact:
    """Return the Artifact of ``data``."""
    # Slices of a view are not copied.
    view = memoryview(data)
    chunks = tuple(_ref(view[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))
    # A single Chunk is the content, so it is not hashed again.
    digest = chunks[0].sha256 if len(chunks) == 1 else hashlib.sha256(data).hexdigest()
    return Artifact(sha256=digest, size_bytes=len(data), chunks=chunks)


def check_chunk(what: str, ref: ChunkRef, data: bytes) -> None:
    """Raise InvalidInput unless ``data`` is the Chunk that ``ref`` names."""
    check_digest(what, ref, len(data), hashlib.sha256(data).hexdigest())


def check_digest(what: str, ref: ChunkRef, size_bytes: int, digest: str) -> None:
    """Check a Chunk by size and digest, for a caller that hashed the bytes while it received them.

    Raises InvalidInput for a mismatch.
    """
    if size_bytes != ref.size_bytes:
        raise InvalidInput(f"{what}: got {size_bytes} bytes, expected {ref.size_bytes}", code="FN-0117")
    if digest != ref.sha256:
        raise InvalidInput(
            f"{what}: digest mismatch (got {short(digest)}, expected {short(ref.sha256)})", code="FN-0117"
        )


def assemble(what: str, artifact: Artifact, read: Callable[[str], bytes]) -> bytes:
    """Return the verified bytes of an Artifact.

    Args:
        what: Name of the Artifact in error messages.
        artifact: Its digest and Chunks.
        read: Returns the bytes of a Chunk by digest. Its exceptions are passed on.

    Raises:
        InvalidInput: A Chunk or the complete content does not match its digest.
    """
    # Each Chunk once: the content of an Artifact may repeat one.
    pieces = {digest: read(digest) for digest in dict.fromkeys(ref.sha256 for ref in artifact.chunks)}
    data = b"".join([pieces[ref.sha256] for ref in artifact.chunks])
    digest = hashlib.sha256(data).hexdigest()
    if digest == artifact.sha256 and len(data) == artifact.size_bytes:
        # The digest of the content implies those of its Chunks, so they are not hashed again one by one.
        return data
    for index, ref in enumerate(artifact.chunks):
        if (piece := pieces.pop(ref.sha256, None)) is not None:
            check_chunk(f"{what}: chunk {index}", ref, piece)
    raise InvalidInput(
        f"{what}: digest mismatch (got {short(digest)}, expected {short(artifact.sha256)})", code="FN-0117"
    )


def _ref(chunk: bytes | memoryview) -> ChunkRef:
    return ChunkRef(sha256=hashlib.sha256(chunk).hexdigest(), size_bytes=len(chunk))

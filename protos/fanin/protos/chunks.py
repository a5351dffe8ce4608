"""Artifacts as Chunks: how a long piece of bytes is cut, named and put together again.

A Chunk is named by its SHA-256, so a transfer can stop anywhere and go on with the Chunks still missing,
whoever serves them. An Artifact lists its Chunks in order and has a digest of its own over the whole.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import InvalidInput

CHUNK_BYTES: Final = 1 << 20
"""1 MiB: a quarter of gRPC's default 4 MiB message limit, so a Chunk and its envelope always fit."""
MAX_CHUNK_BYTES: Final = 3 << 20
"""Longest Chunk that we accept from somebody else's manifest; a message stays under 4 MiB."""
MAX_MORE_CHUNKS: Final = 64
"""Most Chunks that may follow the first in one download: calls are few then, and none holds its place for long."""
SHA256_HEX_CHARS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRef:
    """Name and size of a Chunk; ``url`` may name another place that serves the same bytes."""

    sha256: str
    size_bytes: int
    url: str = ""

    def __post_init__(self) -> None:
        check_sha256("chunk", self.sha256)
        if not 0 < self.size_bytes <= MAX_CHUNK_BYTES:
            raise InvalidInput(f"chunk: got {self.size_bytes} bytes, expected 1 to {MAX_CHUNK_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One content-addressed piece of bytes: its digest, its size and its Chunks in order."""

    sha256: str
    size_bytes: int
    chunks: tuple[ChunkRef, ...]

    def __post_init__(self) -> None:
        check_sha256("artifact", self.sha256)
        total = sum(chunk.size_bytes for chunk in self.chunks)
        if total != self.size_bytes:
            raise InvalidInput(f"artifact: got chunks of {total} bytes in all, expected {self.size_bytes}")


def check_sha256(what: str, digest: str) -> None:
    """Raise InvalidInput unless ``digest`` is 64 lower-case hexadecimal characters."""
    if len(digest) != SHA256_HEX_CHARS or not set(digest) <= set("0123456789abcdef"):
        raise InvalidInput(f"{what}: got digest {digest[:80]!r}, expected {SHA256_HEX_CHARS} hexadecimal characters")


def short(digest: str) -> str:
    """The first characters of a digest, for messages."""
    return f"{digest[:8]}.."


def cut(data: bytes, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[ChunkRef, bytes]]:
    """The Chunks of ``data`` in order, each with its bytes."""
    for start in range(0, len(data), chunk_bytes):
        piece = data[start : start + chunk_bytes]
        yield _ref(piece), piece


def artifact_of(data: bytes) -> Artifact:
    """The Artifact that names ``data``."""
    # Views: a long piece of bytes is not copied to be named.
    view = memoryview(data)
    chunks = tuple(_ref(view[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))
    return Artifact(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data), chunks=chunks)


def check_chunk(what: str, ref: ChunkRef, data: bytes) -> None:
    """Raise InvalidInput unless ``data`` is the Chunk that ``ref`` names."""
    check_digest(what, ref, len(data), hashlib.sha256(data).hexdigest())


def check_digest(what: str, ref: ChunkRef, size_bytes: int, got: str) -> None:
    """``check_chunk`` for bytes that were hashed as they came."""
    if size_bytes != ref.size_bytes:
        raise InvalidInput(f"{what}: got {size_bytes} bytes, expected {ref.size_bytes}")
    if got != ref.sha256:
        raise InvalidInput(f"{what}: digest mismatch (got {short(got)}, expected {short(ref.sha256)})")


def assemble(what: str, artifact: Artifact, read: Callable[[str], bytes]) -> bytes:
    """The bytes of an Artifact from a source that reads a Chunk by its digest.

    Raises InvalidInput if a Chunk or the whole does not verify; what ``read`` raises passes through.
    """
    pieces = [read(ref.sha256) for ref in artifact.chunks]
    data = b"".join(pieces)
    got = hashlib.sha256(data).hexdigest()
    if got == artifact.sha256 and len(data) == artifact.size_bytes:
        # The whole is what it should be, so its parts are; they were hashed one by one as they came.
        return data
    for index, (ref, piece) in enumerate(zip(artifact.chunks, pieces, strict=True)):
        check_chunk(f"{what}: chunk {index}", ref, piece)
    raise InvalidInput(f"{what}: digest mismatch (got {short(got)}, expected {short(artifact.sha256)})")


def _ref(piece: bytes | memoryview) -> ChunkRef:
    return ChunkRef(sha256=hashlib.sha256(piece).hexdigest(), size_bytes=len(piece))

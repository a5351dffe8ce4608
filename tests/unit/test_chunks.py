"""Chunks: bytes are cut into Chunks, named by digest, and assembled again."""

import hashlib

import pytest
from support.errors import raises

from fanin.protos.chunks import (
    CHUNK_BYTES,
    MAX_CHUNK_BYTES,
    Artifact,
    ChunkRef,
    artifact_of,
    assemble,
    check_chunk,
    check_sha256,
    cut,
)
from fanin.protos.errors import InvalidInput, NotFound

DIGEST = hashlib.sha256(b"abc").hexdigest()
REF = ChunkRef(sha256=DIGEST, size_bytes=3)


@pytest.mark.parametrize(
    "digest", ["", DIGEST[:-1], DIGEST + "0", DIGEST.upper(), "../" + DIGEST[3:], "g" * 64, "\u0663" * 64]
)
def test_a_digest_is_64_lower_case_hexadecimal_characters(digest: str) -> None:
    with raises(InvalidInput, f"chunk: got digest {digest[:80]!r}, expected 64 hexadecimal characters"):
        check_sha256("chunk", digest)


@pytest.mark.parametrize("size", [-1, 0, MAX_CHUNK_BYTES + 1])
def test_a_chunk_has_a_size_that_fits_a_message(size: int) -> None:
    with raises(InvalidInput, f"chunk: got {size} bytes, expected 1 to {MAX_CHUNK_BYTES}"):
        ChunkRef(sha256=DIGEST, size_bytes=size)
    assert MAX_CHUNK_BYTES < 4 << 20


def test_an_artifact_is_as_long_as_its_chunks() -> None:
    with raises(InvalidInput, "artifact: got chunks of 3 bytes in all, expected 4"):
        Artifact(sha256=DIGEST, size_bytes=4, chunks=(REF,))


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_cut_and_assemble_are_inverse(size: int) -> None:
    data = bytes(index % 251 for index in range(size))
    pieces = {ref.sha256: piece for ref, piece in cut(data)}
    artifact = artifact_of(data)
    assert [ref.size_bytes for ref in artifact.chunks[:-1]] == [CHUNK_BYTES] * (len(artifact.chunks) - 1)
    assert artifact.sha256 == hashlib.sha256(data).hexdigest()
    assert assemble("data", artifact, pieces.__getitem__) == data


def test_a_chunk_of_another_length_is_refused() -> None:
    with raises(InvalidInput, "chunk 7: got 2 bytes, expected 3"):
        check_chunk("chunk 7", REF, b"ab")


def test_a_chunk_with_other_bytes_is_refused() -> None:
    digest = hashlib.sha256(b"abd").hexdigest()[:8]
    with raises(InvalidInput, f"graph: chunk 0: digest mismatch (got {digest}.., expected {DIGEST[:8]}..)"):
        assemble("graph", Artifact(sha256=DIGEST, size_bytes=3, chunks=(REF,)), lambda _: b"abd")


def test_valid_chunks_of_a_wrong_artifact_are_refused() -> None:
    wrong_artifact = Artifact(sha256="0" * 64, size_bytes=6, chunks=(REF, REF))
    digest = hashlib.sha256(b"abcabc").hexdigest()[:8]
    with raises(InvalidInput, f"graph: digest mismatch (got {digest}.., expected 00000000..)"):
        assemble("graph", wrong_artifact, lambda _: b"abc")


def test_a_chunk_that_an_artifact_repeats_is_read_once() -> None:
    reads: list[str] = []

    def read(digest: str) -> bytes:
        reads.append(digest)
        return b"abc"

    whole = Artifact(sha256=hashlib.sha256(b"abc" * 1000).hexdigest(), size_bytes=3000, chunks=(REF,) * 1000)
    assert assemble("graph", whole, read) == b"abc" * 1000
    assert reads == [DIGEST]


def test_an_error_of_the_reader_propagates() -> None:
    def read(_: str) -> bytes:
        raise NotFound("chunk: not here")

    with raises(NotFound, "chunk: not here"):
        assemble("graph", artifact_of(b"abc"), read)

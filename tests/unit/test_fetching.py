"""Several Chunks in one call: the calls that the client makes, and the Chunks of each."""

import hashlib
from collections.abc import Iterator

import pytest
from support.errors import raises

from fanin.clients.device.downloads import Fetching
from fanin.protos.chunks import MAX_MORE_CHUNKS, ChunkRef
from fanin.protos.errors import InvalidInput, Unavailable
from fanin.protos.messages import Download
from fanin.protos.wire import from_proto, to_proto
from fanin.v1 import fleet_pb2

PIECE = 4


def chunk(number: int, size: int = 10) -> bytes:
    """Return a Chunk whose bytes differ from those of other Chunks."""
    return bytes([number]) * size


def ref_of(data: bytes) -> ChunkRef:
    return ChunkRef(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


class Server:
    """A server that sends Chunks in pieces of 4 bytes, at most ``num_a_call`` Chunks in a call."""

    def __init__(self, chunks: list[bytes], num_a_call: int = 1 << 30) -> None:
        self.data = {ref_of(content).sha256: content for content in chunks}
        self.num_a_call = num_a_call
        self.calls: list[Download] = []
        self.num_open = 0

    def serve(self, request: Download) -> Iterator[bytes]:
        self.calls.append(request)
        self.num_open += 1
        try:
            offset = request.offset
            for number, sha256 in enumerate((request.sha256, *request.more_sha256)[: self.num_a_call]):
                if number:
                    yield b""
                data = self.data[sha256][offset:]
                offset = 0
                yield from (data[start : start + PIECE] for start in range(0, len(data), PIECE))
        finally:
            self.num_open -= 1


@pytest.mark.parametrize(("num_a_call", "num_calls"), [(1 << 30, 1), (3, 2), (2, 3), (1, 5)])
def test_one_call_downloads_as_many_chunks_as_the_coordinator_sends(num_a_call: int, num_calls: int) -> None:
    chunks = [chunk(number, 7 + number) for number in range(5)]
    server = Server(chunks, num_a_call)
    refs = tuple(map(ref_of, chunks))
    with Fetching(server.serve, "run.1.device", refs) as fetching:
        assert [b"".join(fetching.chunk(ref, 0)) for ref in refs] == chunks
    assert len(server.calls) == num_calls
    assert server.calls[0].more_sha256 == tuple(ref.sha256 for ref in refs[1:])
    assert server.num_open == 0


def test_a_partial_chunk_resumes_at_its_offset_in_a_call_of_its_own() -> None:
    chunks = [chunk(0), chunk(1), chunk(2)]
    server = Server(chunks)
    refs = tuple(map(ref_of, chunks))
    with Fetching(server.serve, "run.1.device", refs) as fetching:
        assert b"".join(fetching.chunk(refs[0], 0)) == chunks[0]
        assert b"".join(fetching.chunk(refs[1], 3)) == chunks[1][3:]
        # The client has closed the previous call.
        assert server.num_open == 1
        assert b"".join(fetching.chunk(refs[2], 0)) == chunks[2]
    assert [(call.sha256, call.offset) for call in server.calls] == [(refs[0].sha256, 0), (refs[1].sha256, 3)]
    assert server.num_open == 0


def test_a_call_requests_at_most_the_allowed_chunks() -> None:
    chunks = [chunk(number) for number in range(MAX_MORE_CHUNKS + 3)]
    server = Server(chunks)
    refs = tuple(map(ref_of, chunks))
    with Fetching(server.serve, "run.1.device", refs) as fetching:
        assert [b"".join(fetching.chunk(ref, 0)) for ref in refs] == chunks
    assert [len(call.more_sha256) for call in server.calls] == [MAX_MORE_CHUNKS, 1]
    message = to_proto(server.calls[0], fleet_pb2.DownloadRequest)
    assert from_proto(Download, message) == server.calls[0]
    message.more_sha256.append(refs[0].sha256)
    with raises(InvalidInput, "download: got 65 more chunks, expected at most 64"):
        from_proto(Download, message)


def test_a_broken_connection_is_reported_and_one_that_ends_returns_less() -> None:
    data = chunk(1)

    def broken_transport(_: Download) -> Iterator[bytes]:
        yield data[:PIECE]
        raise Unavailable("the line broke")

    with Fetching(broken_transport, "run.1.device", (ref_of(data),)) as fetching, raises(Unavailable, "the line broke"):
        list(fetching.chunk(ref_of(data), 0))
    with Fetching(lambda _: iter([data[:PIECE]]), "run.1.device", (ref_of(data),)) as fetching:
        assert list(fetching.chunk(ref_of(data), 0)) == [data[:PIECE]]


def test_a_truncated_chunk_does_not_run_into_the_next() -> None:
    chunks = [chunk(0), chunk(1)]
    server = Server(chunks)
    refs = tuple(map(ref_of, chunks))
    server.data[refs[0].sha256] = chunks[0][:7]
    with Fetching(server.serve, "run.1.device", refs) as fetching:
        assert b"".join(fetching.chunk(refs[0], 0)) == chunks[0][:7]

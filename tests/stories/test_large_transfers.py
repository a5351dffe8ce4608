"""For a model of any size, no message exceeds gRPC's default limit, and an Update streams through the spool."""

import hashlib
import resource
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest
from google.protobuf.message import Message
from support import federations as f
from support import values
from support.hosted import Hosted
from support.peers import Peer

from fanin.clients.operator import Operator
from fanin.clients.transport import CallOptions, Connection, GrpcTransport
from fanin.protos import convert as c
from fanin.protos import messages as m
from fanin.protos.chunks import CHUNK_BYTES, Artifact, ChunkRef
from fanin.server.storage.disk import Durability
from fanin.server.storage.spool import FolderSpool

R = TypeVar("R", bound=Message)
MAX_MESSAGE_BYTES = 4 << 20
"""gRPC's default limit, on which proxies rely."""
SHAPES = {"a": (1000, 1500), "b": (3,)}
LARGE_BYTES = (2 << 30) + (100 << 20) + 1
"""More bytes than 31 bits can count."""


@dataclass
class Sizes:
    """The serialized sizes of all messages, as requests and replies."""

    requests: list[int] = field(default_factory=list)
    replies: list[int] = field(default_factory=list)

    def request(self, data: bytes) -> bytes:
        """Record the size of a request."""
        self.requests.append(len(data))
        return data

    def parser(self, parse: Callable[[bytes], R]) -> Callable[[bytes], R]:
        """Return a parser that records the size of each reply."""

        def noting(data: bytes) -> R:
            self.replies.append(len(data))
            return parse(data)

        return noting


class MeasuringConnection(Connection):
    """The production connection, which also measures its messages."""

    def __init__(self, address: str, ca: bytes, sizes: Sizes) -> None:
        super().__init__(address, ca)
        self._sizes = sizes

    def unary(self, method: str, request: bytes, parse: Callable[[bytes], R], call: CallOptions) -> R:
        """See Connection."""
        return super().unary(method, self._sizes.request(request), self._sizes.parser(parse), call)

    def unary_stream(self, method: str, request: bytes, parse: Callable[[bytes], R], call: CallOptions) -> Iterator[R]:
        """See Connection."""
        return super().unary_stream(method, self._sizes.request(request), self._sizes.parser(parse), call)

    def stream_unary(self, method: str, requests: Iterator[bytes], parse: Callable[[bytes], R], call: CallOptions) -> R:
        """See Connection."""
        return super().stream_unary(method, map(self._sizes.request, requests), self._sizes.parser(parse), call)

    def stream_stream(
        self, method: str, requests: Iterator[bytes], parse: Callable[[bytes], R], call: CallOptions
    ) -> Generator[R, None, None]:
        """See Connection."""
        return super().stream_stream(method, map(self._sizes.request, requests), self._sizes.parser(parse), call)


@contextmanager
def measured(host: Hosted, sizes: Sizes) -> Iterator[MeasuringConnection]:
    """Yield a measuring connection of the test's own."""
    line = MeasuringConnection(host.address, host.ca, sizes)
    try:
        yield line
    finally:
        line.close()


class MeasuredPeer(Peer):
    """A device on a measuring connection."""

    sizes: Sizes

    @contextmanager
    def transport(self) -> Iterator[GrpcTransport]:
        """See MeasuringConnection."""
        with measured(self.host, self.sizes) as line:
            yield GrpcTransport(line, self.key)


def test_no_message_of_a_run_exceeds_what_grpc_takes(tmp_path: Path) -> None:
    host = Hosted(tmp_path).start()
    sizes = Sizes()
    try:
        bundle = f.bundle_in(tmp_path, SHAPES)
        with measured(host, sizes) as line:
            operator = Operator(line, host.operator_token)
            operator.publish_bundle(bundle)
            operator.start_run("run", f.plan(), bundle, f.PUBLISHER)
            for index in range(f.NUM_DEVICES):
                device = MeasuredPeer(host, bundle, index, tmp_path / f"device-{index}")
                device.sizes = sizes
                device.take_part()
            assert [one.sequence for one in operator.watch("run")]
            assert operator.parameters(operator.version("run").version).size == 1_500_003
    finally:
        host.stop()
    # Each device received and sent 6 MB, and none of it in one message.
    assert sum(sizes.requests) > f.NUM_DEVICES * 6_000_000
    assert CHUNK_BYTES <= max(sizes.requests) < MAX_MESSAGE_BYTES
    assert max(sizes.replies) < MAX_MESSAGE_BYTES


def announced(size_bytes: int) -> Artifact:
    """Return an Artifact of zeros, described by its Chunks."""
    zeros = bytes(CHUNK_BYTES)
    whole = ChunkRef(sha256=hashlib.sha256(zeros).hexdigest(), size_bytes=CHUNK_BYTES)
    num_whole, rest = divmod(size_bytes, CHUNK_BYTES)
    digest = hashlib.sha256()
    for _ in range(num_whole):
        digest.update(zeros)
    digest.update(zeros[:rest])
    last = (ChunkRef(sha256=hashlib.sha256(zeros[:rest]).hexdigest(), size_bytes=rest),) if rest else ()
    return Artifact(sha256=digest.hexdigest(), size_bytes=size_bytes, chunks=(whole,) * num_whole + last)


def test_what_names_a_model_of_32_gigabytes_fits_in_one_message() -> None:
    whole = ChunkRef(sha256="f" * 64, size_bytes=CHUNK_BYTES)
    artifact = Artifact(sha256="f" * 64, size_bytes=32 << 30, chunks=(whole,) * (32 << 10))
    work = values.assignment()
    work = replace(work, version=replace(work.version, parameters=artifact))
    header = replace(values.update(work)[0], payload=artifact)
    for message in (c.assignment_to_proto(work), c.upload_to_proto(header)):
        assert 1 << 20 < message.ByteSize() < MAX_MESSAGE_BYTES
    assert c.header_from_proto(c.header_to_proto(header)) == header


@pytest.mark.nightly
def test_an_update_over_two_gigabytes_streams_through_the_spool(tmp_path: Path) -> None:
    header = replace(values.update(values.assignment())[0], payload=announced(LARGE_BYTES))
    spool = FolderSpool(tmp_path / "spool", tmp_path / "updates", Durability.PROCESS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = bytes(256 << 10)
    # In two parts, so that the second one resumes at an offset beyond 31 bits.
    for stop in (LARGE_BYTES - (2 << 20), LARGE_BYTES):
        upload = spool.open(header, "device")
        while upload.received_bytes < stop:
            start = upload.received_bytes
            if upload.add(m.Piece(offset=start, data=data[: stop - start])):
                upload.store()
        if not upload.is_complete():
            upload.close()
    assert upload.resumed_bytes > 1 << 31
    spool.commit(upload, "device")
    upload.close()
    assert sum(len(piece) for piece in spool.read(header, "device")) == LARGE_BYTES
    spool.withdraw(header, "device")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The unit is KiB: memory holds only a few Chunks at a time.
    assert after - before < 64 << 10

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
from fanin.protos import messages as m
from fanin.protos.chunks import CHUNK_BYTES, Artifact, ChunkRef
from fanin.protos.wire import from_proto, to_proto
from fanin.server.storage.disk import Durability
from fanin.server.storage.spool import FolderSpool
from fanin.v1 import fleet_pb2

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

        def parse_and_record(data: bytes) -> R:
            self.replies.append(len(data))
            return parse(data)

        return parse_and_record


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
def measuring_connection(host: Hosted, sizes: Sizes) -> Iterator[MeasuringConnection]:
    """Yield a measuring connection of the test's own."""
    connection = MeasuringConnection(host.address, host.ca, sizes)
    try:
        yield connection
    finally:
        connection.close()


class MeasuringPeer(Peer):
    """A device on a measuring connection."""

    sizes: Sizes

    @contextmanager
    def transport(self) -> Iterator[GrpcTransport]:
        """See MeasuringConnection."""
        with measuring_connection(self.host, self.sizes) as connection:
            yield GrpcTransport(connection, self.key)


def test_no_message_of_a_run_exceeds_the_limit_of_grpc(tmp_path: Path) -> None:
    host = Hosted(tmp_path).start()
    sizes = Sizes()
    try:
        bundle = f.bundle_in(tmp_path, SHAPES)
        with measuring_connection(host, sizes) as connection:
            operator = Operator(connection, host.operator_token)
            operator.publish_bundle(bundle)
            operator.start_run("run", f.plan(), bundle, f.PUBLISHER)
            for index in range(f.NUM_DEVICES):
                device = MeasuringPeer(host, bundle, index, tmp_path / f"device-{index}")
                device.sizes = sizes
                device.take_part()
            assert [entry.sequence for entry in operator.watch("run")]
            assert operator.parameters(operator.version("run").version).size == 1_500_003
    finally:
        host.stop()
    # Each device received and sent 6 MB, and none of it in one message.
    assert sum(sizes.requests) > f.NUM_DEVICES * 6_000_000
    assert CHUNK_BYTES <= max(sizes.requests) < MAX_MESSAGE_BYTES
    assert max(sizes.replies) < MAX_MESSAGE_BYTES


def zeros_artifact(size_bytes: int) -> Artifact:
    """Return an Artifact of zeros, described by its Chunks."""
    zeros = bytes(CHUNK_BYTES)
    complete_chunk = ChunkRef(sha256=hashlib.sha256(zeros).hexdigest(), size_bytes=CHUNK_BYTES)
    num_complete, remainder = divmod(size_bytes, CHUNK_BYTES)
    digest = hashlib.sha256()
    for _ in range(num_complete):
        digest.update(zeros)
    digest.update(zeros[:remainder])
    last = (ChunkRef(sha256=hashlib.sha256(zeros[:remainder]).hexdigest(), size_bytes=remainder),) if remainder else ()
    return Artifact(sha256=digest.hexdigest(), size_bytes=size_bytes, chunks=(complete_chunk,) * num_complete + last)


def test_the_chunk_list_of_a_model_of_32_gigabytes_fits_in_one_message() -> None:
    chunk = ChunkRef(sha256="f" * 64, size_bytes=CHUNK_BYTES)
    artifact = Artifact(sha256="f" * 64, size_bytes=32 << 30, chunks=(chunk,) * (32 << 10))
    work = values.assignment()
    work = replace(work, version=replace(work.version, parameters=artifact))
    header = replace(values.update(work)[0], payload=artifact)
    for message in (
        to_proto(work, fleet_pb2.Assignment),
        to_proto(m.UploadRequest(part=header), fleet_pb2.UploadRequest),
    ):
        assert 1 << 20 < message.ByteSize() < MAX_MESSAGE_BYTES
    assert from_proto(m.UpdateHeader, to_proto(header, fleet_pb2.UpdateHeader)) == header


@pytest.mark.nightly
def test_an_update_over_two_gigabytes_streams_through_the_spool(tmp_path: Path) -> None:
    header = replace(values.update(values.assignment())[0], payload=zeros_artifact(LARGE_BYTES))
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

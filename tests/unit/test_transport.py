"""The gRPC transport over a connection in this process: the error that ends an upload."""

from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

import pytest
from google.protobuf.message import Message
from support.errors import raises
from support.values import DEVICE_KEY, assignment, update

from fanin.clients.transport import CallOptions, Connection, GrpcTransport
from fanin.protos import messages as m
from fanin.protos.errors import Corrupted, Unavailable
from fanin.protos.wire import to_proto
from fanin.v1 import fleet_pb2

R = TypeVar("R", bound=Message)
MAX_REQUESTS = 100
RECEIVING = m.UploadReply(round_state=m.RoundState.OPEN, update_state=m.UpdateState.RECEIVING, received_bytes=2)


class LocalConnection(Connection):
    """A connection to a coordinator that has two bytes of each Update. The call ends with ``error``, if it is set."""

    def __init__(self, error: Exception | None) -> None:
        self.address = "here"
        self.num_requests = 0
        self._error = error

    def stream_stream(
        self, method: str, requests: Iterator[bytes], parse: Callable[[bytes], R], call: CallOptions
    ) -> Generator[R, None, None]:
        """Read the header, reply, read the pieces, and end the call."""
        next(requests)
        yield parse(to_proto(RECEIVING, fleet_pb2.UploadReply).SerializeToString())
        for _ in requests:
            self.num_requests += 1
            assert self.num_requests < MAX_REQUESTS, "the upload sends pieces without end"
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, Unavailable("the stream ended early")], ids=["end", "error"])
def test_a_payload_shorter_than_declared_is_one_clear_error(error: Exception | None) -> None:
    header, payload = update(assignment())
    connection = LocalConnection(error)
    text = f"update of run.1.device: its payload on this device ends at byte 10, expected {len(payload)} bytes"
    with raises(Corrupted, text):
        GrpcTransport(connection, DEVICE_KEY).upload(header, lambda offset, size: payload[:10][offset : offset + size])
    assert connection.num_requests == 1


def test_a_payload_that_cannot_be_read_is_one_clear_error() -> None:
    def read(offset: int, size: int) -> bytes:
        raise OSError("input/output error")

    header, _ = update(assignment())
    with pytest.raises(Corrupted, match="FN-0823"):
        GrpcTransport(LocalConnection(None), DEVICE_KEY).upload(header, read)


def test_an_error_of_the_coordinator_is_not_replaced() -> None:
    header, payload = update(assignment())
    with raises(Unavailable, "gone"):
        GrpcTransport(LocalConnection(Unavailable("gone")), DEVICE_KEY).upload(
            header, lambda offset, size: payload[offset : offset + size]
        )

"""The line to a coordinator: one Protocol, and gRPC over TLS behind it.

This is the one place where gRPC's errors become ours: ``mapped`` looks at the name that the coordinator put
into the trailing metadata, and else at the status. Calls are signed over their exact bytes.
"""

import queue
import ssl
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from fanin.edge.bundles.keys import CALL_CONTEXT, SigningKey
from fanin.edge.tensors import sha256_hex
from fanin.protos import calls
from fanin.protos import convert as c
from fanin.protos import messages as m
from fanin.protos.errors import (
    FaninError,
    InvalidInput,
    InvalidUpdate,
    Unauthenticated,
    Unavailable,
    Untimely,
    Untrusted,
    error_named,
)
from fanin.v1 import fleet_pb2 as pb

FLEET: Final = "/fanin.v1.Fleet/"
CALL_S: Final = 30.0
"""How long a short call may take; a long poll takes its own wait on top."""
KEEPALIVE_MS: Final = 60_000
"""How often an idle line is looked after: routers forget one after minutes. The coordinator's server allows it."""
IDLE_MS: Final = 120_000
"""How long a line without a call stays open: less than the coordinator allows, so that the device closes it, not the
coordinator, which gRPC would write to standard error."""
PIECE_BYTES: Final = 256 << 10
MAX_PORT: Final = 65535
_TOKEN_CREDENTIAL: Final = "an enrollment token that was made there (--token-file)"
_KEY_CREDENTIAL: Final = (
    "a device that enrolled there; was this device's folder (--state) made for another coordinator?"
)

ReadPayload = Callable[[int, int], bytes]
"""Bytes of an Update's payload: (offset, at most so many) -> bytes."""
R = TypeVar("R", bound=Message)


class Transport(Protocol):
    """What a device can say to a coordinator. Everything raises FaninError and nothing else."""

    def enroll(self, token: str) -> str:
        """Make this device known; its id."""
        ...

    def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        """Ask for work."""
        ...

    def download(self, download: m.Download) -> Iterator[bytes]:
        """A Chunk's bytes from an offset on."""
        ...

    def upload(self, header: m.UpdateHeader, read: ReadPayload) -> m.UploadReply:
        """Send an Update from where the coordinator wants it; the last reply."""
        ...

    def report(self, report: m.Report) -> m.UploadReply:
        """Give up an Assignment, or ask what became of its Update."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Metadata and time-out of one call (None: as long as it takes); ``now`` is the caller's clock.

    ``credential`` says what shows who is calling, for the one whom the coordinator turns away.
    """

    metadata: tuple[tuple[str, str | bytes], ...]
    timeout_s: float | None = None
    now: Callable[[], float] = time.time
    credential: str = "a caller whom it knows"


class Line:
    """A TLS connection to one coordinator; requests are bytes that the caller has serialized."""

    def __init__(self, address: str, ca_certificate: bytes) -> None:
        """Raises InvalidInput for an address that is none, or a CA file that holds no certificate."""
        self.address = address
        self._channel = _open_channel(address, ca_certificate)

    def unary(self, method: str, request: bytes, parse: Callable[[bytes], R], call: CallOptions) -> R:
        """One request, one reply. Raises FaninError."""
        ask = self._channel.unary_unary(method, request_serializer=_as_is, response_deserializer=parse)
        with mapped(self.address, call):
            return ask(request, metadata=call.metadata, timeout=call.timeout_s)

    def unary_stream(self, method: str, request: bytes, parse: Callable[[bytes], R], call: CallOptions) -> Iterator[R]:
        """One request, many replies. Raises FaninError."""
        ask = self._channel.unary_stream(method, request_serializer=_as_is, response_deserializer=parse)
        with mapped(self.address, call):
            stream = ask(request, metadata=call.metadata, timeout=call.timeout_s)
            try:
                yield from stream
            finally:
                stream.cancel()

    def stream_unary(self, method: str, requests: Iterator[bytes], parse: Callable[[bytes], R], call: CallOptions) -> R:
        """Many requests, one reply. Raises FaninError."""
        ask = self._channel.stream_unary(method, request_serializer=_as_is, response_deserializer=parse)
        with mapped(self.address, call):
            return ask(requests, metadata=call.metadata, timeout=call.timeout_s)

    def stream_stream(
        self, method: str, requests: Iterator[bytes], parse: Callable[[bytes], R], call: CallOptions
    ) -> Generator[R, None, None]:
        """Requests and replies at the same time; leaving the iterator ends the call. Raises FaninError."""
        ask = self._channel.stream_stream(method, request_serializer=_as_is, response_deserializer=parse)
        with mapped(self.address, call):
            stream = ask(requests, metadata=call.metadata, timeout=call.timeout_s)
            try:
                yield from stream
            finally:
                stream.cancel()

    def close(self) -> None:
        """Hang up."""
        self._channel.close()


class GrpcTransport:
    """The Transport over a Line, each call signed with the device's key."""

    def __init__(self, line: Line, key: SigningKey, wall: Callable[[], float] = time.time) -> None:
        """``wall`` is the device's clock, which may be off."""
        self._line = line
        self._key = key
        self._wall = wall
        self._device_id = calls.device_id_of(key.public)
        self._clock_offset_s = 0.0
        self._last_time_us = 0

    def enroll(self, token: str) -> str:
        """Raises Unauthenticated for a wrong token."""
        enrollment = m.Enrollment(protocol=m.PROTOCOL, token=token, public_key=self._key.public)
        request = c.enrollment_to_proto(enrollment).SerializeToString()
        return self._unary("Enroll", request, pb.EnrollReply.FromString, CALL_S).device_id

    def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        """A long poll."""
        request = c.check_in_to_proto(check_in).SerializeToString()
        reply = self._unary("CheckIn", request, pb.CheckInReply.FromString, check_in.wait_s + CALL_S)
        return c.answer_from_proto(reply)

    def download(self, download: m.Download) -> Iterator[bytes]:
        """Raises NotFound."""
        request = c.download_to_proto(download).SerializeToString()
        call = self._signed("Download", request)
        with self._clock_moved():
            for piece in self._line.unary_stream(f"{FLEET}Download", request, pb.DownloadPiece.FromString, call):
                yield piece.data

    def upload(self, header: m.UpdateHeader, read: ReadPayload) -> m.UploadReply:
        """Stops at once when the coordinator says that the Round is closed.

        Raises InvalidUpdate if ``read`` fails or returns fewer bytes than the header declares.
        """
        first = c.upload_to_proto(header).SerializeToString()
        offsets: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        faults: list[InvalidUpdate] = []
        requests = _upload_requests(header, first, offsets, read, faults)
        call = self._signed("Upload", first)
        replies = self._line.stream_stream(f"{FLEET}Upload", requests, pb.UploadReply.FromString, call)
        last = None
        try:
            with self._clock_moved():
                for message in replies:
                    reply = c.upload_reply_from_proto(message)
                    if last is None:
                        offsets.put(reply.received_bytes)
                    last = reply
                    if reply.round_state is m.RoundState.CLOSED:
                        break
        except FaninError as exc:
            if not faults:
                raise
            # The payload ended the stream early; the coordinator's error only follows from that.
            raise faults[0] from exc
        finally:
            offsets.put(None)
            replies.close()
        if faults:
            raise faults[0]
        if last is None:
            raise Unavailable(f"{self._line.address}: the upload ended without a reply; try again later")
        return last

    def report(self, report: m.Report) -> m.UploadReply:
        """Raises NotFound."""
        request = c.report_to_proto(report).SerializeToString()
        return c.upload_reply_from_proto(self._unary("Report", request, pb.ReportReply.FromString, CALL_S))

    def close(self) -> None:
        """Close the line."""
        self._line.close()

    def _unary(self, method: str, request: bytes, parse: Callable[[bytes], R], timeout_s: float) -> R:
        try:
            return self._line.unary(f"{FLEET}{method}", request, parse, self._signed(method, request, timeout_s))
        except _ClockOff as exc:
            self._set_clock(exc.offset_s)
            return self._line.unary(f"{FLEET}{method}", request, parse, self._signed(method, request, timeout_s))

    @contextmanager
    def _clock_moved(self) -> Iterator[None]:
        """For streams: set the clock right and let the caller try again, where it left off."""
        try:
            yield
        except _ClockOff as exc:
            self._set_clock(exc.offset_s)
            raise Unavailable(f"{self._line.address}: this device's clock was set by {exc.offset_s:.1f} s") from exc

    def _now(self) -> float:
        return self._wall() + self._clock_offset_s

    def _set_clock(self, offset_s: float) -> None:
        self._clock_offset_s += offset_s
        self._last_time_us = 0

    def _next_time_us(self) -> int:
        """A time that no call of this process has used: the coordinator serves each once."""
        self._last_time_us = max(int(self._now() * calls.MICROSECONDS), self._last_time_us + 1)
        return self._last_time_us

    def _signed(self, method: str, body: bytes, timeout_s: float | None = None) -> CallOptions:
        call = calls.DeviceCall(
            method=f"{FLEET}{method}",
            device_id=self._device_id,
            time_us=self._next_time_us(),
            body_sha256=sha256_hex(body),
        )
        metadata = (
            (calls.DEVICE, call.device_id),
            (calls.TIME, str(call.time_us)),
            (calls.SIGNATURE, self._key.sign(CALL_CONTEXT, call.signed_bytes())),
        )
        credential = _TOKEN_CREDENTIAL if method == "Enroll" else _KEY_CREDENTIAL
        return CallOptions(metadata=metadata, timeout_s=timeout_s, now=self._now, credential=credential)


class _ClockOff(Untimely):
    """The coordinator did not take the time of a call; ``offset_s`` brings our clock to its own."""

    def __init__(self, message: str, offset_s: float) -> None:
        super().__init__(message)
        self.offset_s = offset_s


def _open_channel(address: str, ca_certificate: bytes) -> grpc.Channel:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise InvalidInput(f"server: got {address!r}, expected HOST:PORT, for example 127.0.0.1:7443")
    try:
        # gRPC would take anything and fail later, without a reason. asyncio, which comes with it, has loaded ssl; the
        # parser in cryptography.x509 would take a device 1.4 MB more. What is no base64 is a comment.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca_certificate.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as exc:
        raise InvalidInput(
            "certificate authority (--ca): got no PEM certificate, expected the coordinator's tls/ca.pem"
        ) from exc
    credentials = grpc.ssl_channel_credentials(root_certificates=ca_certificate)
    options = (
        # A coordinator that restarts should be found again soon, not after gRPC's default two minutes.
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.client_idle_timeout_ms", IDLE_MS),
    )
    return grpc.secure_channel(address, credentials, options=options)


def _upload_requests(
    header: m.UpdateHeader,
    first: bytes,
    offsets: queue.SimpleQueue[int | None],
    read: ReadPayload,
    faults: list[InvalidUpdate],
) -> Iterator[bytes]:
    """The header; then, from the offset that the first reply names, the pieces.

    gRPC iterates on a thread of its own, where an exception would look like a broken connection. The error of a
    payload that cannot be read goes to ``faults``, and the iteration ends.
    """
    yield first
    offset, size_bytes, what = offsets.get(), header.payload.size_bytes, f"update of {header.assignment_id}"
    while offset is not None and offset < size_bytes:
        try:
            data = read(offset, PIECE_BYTES)
        except (FaninError, OSError, ValueError) as exc:
            faults.append(InvalidUpdate(f"{what}: its payload cannot be read at byte {offset} ({exc})"))
            return
        if not data:
            faults.append(InvalidUpdate(f"{what}: its payload ends at byte {offset}, expected {size_bytes} bytes"))
            return
        yield c.upload_to_proto(m.Piece(offset=offset, data=data)).SerializeToString()
        offset += len(data)


@contextmanager
def mapped(address: str, call: CallOptions) -> Iterator[None]:
    """gRPC's errors as ours."""
    try:
        yield
    except grpc.RpcError as exc:
        raise _our_error(address, exc, call) from exc
    except DecodeError as exc:
        raise InvalidInput(f"{address}: the reply does not parse ({exc})") from exc


def _our_error(address: str, exc: grpc.RpcError, call: CallOptions) -> FaninError:
    details = exc.details() or ""
    trailing = {item.key: item.value for item in exc.trailing_metadata() or ()}
    named = error_named(str(trailing.get(calls.ERROR, "")), details)
    if isinstance(named, Untimely):
        server_time = str(trailing.get(calls.SERVER_TIME, ""))
        offset_s = float(server_time) / calls.MICROSECONDS - call.now() if server_time.isdecimal() else 0.0
        return _ClockOff(f"{address}: {details}", offset_s)
    if isinstance(named, Unauthenticated):
        return Unauthenticated(f"{address}: {details}; it expects {call.credential}")
    if named is not None:
        return named
    if any(word in details for word in ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed")):
        return Untrusted(
            f"{address}: its certificate is not trusted; expected one by the authority given with --ca ({details})"
        )
    return Unavailable(f"{address}: cannot be reached ({exc.code().name}: {details}); is the coordinator running?")


def _as_is(data: bytes) -> bytes:
    return data

"""The device's calls to a coordinator: the Protocol ``Transport``, and its implementation over gRPC and TLS.

No other module of the clients imports grpc. ``mapped`` translates gRPC's errors to ours: by the error name in the
trailing metadata, otherwise by the status. A device signs the exact bytes of each call.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from fanin.clients.probe import CONNECT_S, cause_of_failure, reported_silence
from fanin.clients.route import IDLE_MS, KEEPALIVE_MS, Route, check_authority, route_to
from fanin.edge.bundles.keys import CALL_CONTEXT, SigningKey
from fanin.edge.tensors import sha256_hex
from fanin.protos import calls
from fanin.protos import messages as m
from fanin.protos.addresses import check_remote
from fanin.protos.errors import (
    Conflict,
    Corrupted,
    FaninError,
    InvalidInput,
    Unauthenticated,
    Unavailable,
    Untimely,
    Untrusted,
    error_named,
)
from fanin.protos.wire import from_proto, to_proto
from fanin.v1 import fleet_pb2 as pb

FLEET: Final = "/fanin.v1.Fleet/"
CALL_S: Final = 30.0
"""Seconds until a short call times out. A long poll adds its own wait."""
PIECE_BYTES: Final = 256 << 10
_CREDENTIAL: Final = "a device that enrolled there; was this device's folder (--state) made for another coordinator?"

ReadPayload = Callable[[int, int], bytes]
"""Reads a slice of an Update's payload: (offset, maximum size) -> bytes."""
R = TypeVar("R", bound=Message)


class Transport(Protocol):
    """The calls of a device to a coordinator. Every method raises FaninError and nothing else."""

    def enroll(self, token: str) -> str:
        """Register this device with an enrollment token. Returns its id."""
        ...

    def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        """Ask for an Assignment."""
        ...

    def download(self, download: m.Download) -> Iterator[bytes]:
        """Stream a Chunk's bytes from an offset."""
        ...

    def upload(self, header: m.UpdateHeader, read: ReadPayload) -> m.UploadReply:
        """Upload an Update from the offset that the coordinator names. Returns the last reply."""
        ...

    def exchange(self, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        """Send the message of a phase, and wait for the coordinator's message."""
        ...

    def report(self, report: m.Report) -> m.UploadReply:
        """Give up an Assignment, report its progress, or ask for the state of its Update. Called by two threads."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Metadata and time-out of one call; a time-out of None is none.

    ``now`` is the caller's clock.
    """

    metadata: tuple[tuple[str, str | bytes], ...]
    timeout_s: float | None = None
    now: Callable[[], float] = time.time
    on_trailing: Callable[[Mapping[str, str | bytes]], None] = lambda _trailing: None


class Connection:
    """A TLS connection to one coordinator. Requests are serialized bytes."""

    def __init__(self, address: str, ca_certificate: bytes) -> None:
        """Open the channel; it connects on the first call, on the route that the environment names (``route``).

        Raises:
            InvalidInput: ``address`` is not HOST:PORT, ``ca_certificate`` holds no PEM certificate, or the environment
                names a proxy of another form.
        """
        self.address = address
        self._ca_certificate = ca_certificate
        self._route = route_to(check_remote("server", address), os.environ)
        self._channel = _open_channel(self._route, ca_certificate)
        self._silence: AbstractContextManager[None] = reported_silence(address)

    def unary(self, method: str, request: bytes, parse: Callable[[bytes], R], call: CallOptions) -> R:
        """Send one request and return one reply. Raises FaninError."""
        call_method = self._channel.unary_unary(method, request_serializer=_as_is, response_deserializer=parse)
        silence, self._silence = self._silence, nullcontext()
        with self._mapped(call), silence:
            reply, ended = call_method.with_call(request, metadata=call.metadata, timeout=call.timeout_s)
            call.on_trailing(dict(ended.trailing_metadata() or ()))
            return reply

    def unary_stream(self, method: str, request: bytes, parse: Callable[[bytes], R], call: CallOptions) -> Iterator[R]:
        """Send one request and yield the replies. Raises FaninError."""
        call_method = self._channel.unary_stream(method, request_serializer=_as_is, response_deserializer=parse)
        with self._mapped(call):
            stream = call_method(request, metadata=call.metadata, timeout=call.timeout_s)
            try:
                yield from stream
            finally:
                stream.cancel()

    def stream_unary(self, method: str, requests: Iterator[bytes], parse: Callable[[bytes], R], call: CallOptions) -> R:
        """Send many requests and return one reply. Raises FaninError."""
        call_method = self._channel.stream_unary(method, request_serializer=_as_is, response_deserializer=parse)
        with self._mapped(call):
            return call_method(requests, metadata=call.metadata, timeout=call.timeout_s)

    def stream_stream(
        self, method: str, requests: Iterator[bytes], parse: Callable[[bytes], R], call: CallOptions
    ) -> Generator[R, None, None]:
        """Send requests while yielding replies; closing the iterator ends the call. Raises FaninError."""
        call_method = self._channel.stream_stream(method, request_serializer=_as_is, response_deserializer=parse)
        with self._mapped(call):
            stream = call_method(requests, metadata=call.metadata, timeout=call.timeout_s)
            try:
                yield from stream
            finally:
                stream.cancel()

    def close(self) -> None:
        """Close the channel; calls in progress fail."""
        self._channel.close()

    @contextmanager
    def _mapped(self, call: CallOptions) -> Iterator[None]:
        """Translate gRPC's errors to ours."""
        try:
            yield
        except grpc.RpcError as exc:
            error = _our_error(self.address, exc, call)
            if type(error) is Unavailable and exc.code() is grpc.StatusCode.UNAVAILABLE:
                error = cause_of_failure(self._route, self._ca_certificate) or error
            raise error from exc
        except DecodeError as exc:
            raise InvalidInput(
                f"{self.address}: the reply does not parse ({exc}); compare the releases of fanin on both machines",
                code="FN-0817",
            ) from exc
        except ValueError as exc:
            # gRPC's error for a call on a closed channel.
            raise Conflict(
                f"{self.address}: the connection is closed ({exc}); open another one", code="FN-0818"
            ) from exc


class GrpcTransport:
    """A Transport over a Connection. It signs each call, and adds the context of its work in a trace, if it has one."""

    def __init__(self, connection: Connection, key: SigningKey, wall: Callable[[], float] = time.time) -> None:
        """``wall`` is the device's clock. It may be wrong: the transport corrects it by the coordinator's time."""
        self.traceparent = ""
        self._connection = connection
        self._key = key
        self._wall = wall
        self._device_id = calls.device_id_of(key.public)
        self._clock_offset_s = 0.0
        self._last_time_us = 0
        # Progress is reported on a thread of its own.
        self._timing = threading.Lock()

    def enroll(self, token: str) -> str:
        """See Transport. Raises Unauthenticated for a wrong token."""
        enrollment = m.Enrollment(protocol=m.PROTOCOL, token=token, public_key=self._key.public)
        request = to_proto(enrollment, pb.EnrollRequest).SerializeToString()
        return self._unary("Enroll", request, pb.EnrollReply.FromString, CALL_S).device_id

    def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        """See Transport. The call is a long poll of ``check_in.wait_s`` seconds."""
        request = to_proto(check_in, pb.CheckInRequest).SerializeToString()
        reply = self._unary("CheckIn", request, pb.CheckInReply.FromString, check_in.wait_s + CALL_S)
        return from_proto(m.CheckInReply, reply).answer

    def download(self, download: m.Download) -> Iterator[bytes]:
        """See Transport. Raises NotFound."""
        request = to_proto(download, pb.DownloadRequest).SerializeToString()
        call = self._signed("Download", request)
        with self._correcting_clock():
            for piece in self._connection.unary_stream(f"{FLEET}Download", request, pb.DownloadPiece.FromString, call):
                yield piece.data

    def upload(self, header: m.UpdateHeader, read: ReadPayload) -> m.UploadReply:
        """See Transport. The upload stops at once when a reply reports that the Round is closed.

        Raises:
            Corrupted: ``read`` failed, or returned fewer bytes than the header declares.
        """
        first = to_proto(m.UploadRequest(part=header), pb.UploadRequest).SerializeToString()
        offsets: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        faults: list[Corrupted] = []
        requests = _upload_requests(header, first, offsets, read, faults)
        call = self._signed("Upload", first)
        replies = self._connection.stream_stream(f"{FLEET}Upload", requests, pb.UploadReply.FromString, call)
        last = None
        try:
            with self._correcting_clock():
                for message in replies:
                    reply = from_proto(m.UploadReply, message)
                    if last is None:
                        offsets.put(reply.received_bytes)
                    last = reply
                    if reply.round_state is m.RoundState.CLOSED:
                        break
        except FaninError as exc:
            if not faults:
                raise
            # The payload ended the stream early; the coordinator's error is only a consequence.
            raise faults[0] from exc
        finally:
            offsets.put(None)
            replies.close()
        if faults:
            raise faults[0]
        if last is None:
            raise Unavailable(
                f"{self._connection.address}: the upload ended without a reply; try again later", code="FN-0819"
            )
        return last

    def exchange(self, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        """See Transport. Raises NotFound and Conflict."""
        body, timeout_s = to_proto(request, pb.ExchangeRequest).SerializeToString(), request.wait_s + CALL_S
        return from_proto(
            m.ExchangeReply, self._unary("Exchange", body, pb.ExchangeReply.FromString, timeout_s)
        ).outcome

    def report(self, report: m.Report) -> m.UploadReply:
        """See Transport. Raises NotFound."""
        request = to_proto(report, pb.ReportRequest).SerializeToString()
        return from_proto(m.UploadReply, self._unary("Report", request, pb.ReportReply.FromString, CALL_S))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _unary(self, method: str, request: bytes, parse: Callable[[bytes], R], timeout_s: float) -> R:
        try:
            return self._connection.unary(f"{FLEET}{method}", request, parse, self._signed(method, request, timeout_s))
        except ClockOff as exc:
            self._set_clock(exc.offset_s)
            return self._connection.unary(f"{FLEET}{method}", request, parse, self._signed(method, request, timeout_s))

    @contextmanager
    def _correcting_clock(self) -> Iterator[None]:
        """Correct the clock when a stream is rejected; the caller retries from its offset."""
        try:
            yield
        except ClockOff as exc:
            self._set_clock(exc.offset_s)
            raise Unavailable(
                f"{self._connection.address}: this device's clock was set by {exc.offset_s:.1f} s; call again",
                code="FN-0820",
            ) from exc

    def _now(self) -> float:
        return self._wall() + self._clock_offset_s

    def _set_clock(self, offset_s: float) -> None:
        with self._timing:
            self._clock_offset_s += offset_s
            self._last_time_us = 0

    def _next_time_us(self) -> int:
        """Return a time that no earlier call of this process used: the coordinator serves each time once."""
        with self._timing:
            self._last_time_us = max(int(self._now() * calls.MICROSECONDS), self._last_time_us + 1)
            return self._last_time_us

    def _signed(self, method: str, body: bytes, timeout_s: float | None = None) -> CallOptions:
        digest, time_us = sha256_hex(body), self._next_time_us()
        call = calls.DeviceCall(
            method=f"{FLEET}{method}", device_id=self._device_id, time_us=time_us, body_sha256=digest
        )
        metadata = (
            *((calls.DEVICE, call.device_id), (calls.TIME, str(call.time_us))),
            (calls.SIGNATURE, self._key.sign(CALL_CONTEXT, call.signed_bytes())),
        )
        trace = ((calls.TRACEPARENT, self.traceparent),) if self.traceparent else ()
        options = CallOptions(metadata=(*metadata, *trace), timeout_s=timeout_s, now=self._now)
        return replace(options, on_trailing=self._note_trace) if method == "CheckIn" else options

    def _note_trace(self, trailing: Mapping[str, str | bytes]) -> None:
        self.traceparent = calls.text(trailing.get(calls.TRACEPARENT))


class ClockOff(Untimely):
    """The coordinator rejected the time of a call. ``offset_s`` corrects this device's clock."""

    def __init__(self, message: str, offset_s: float, *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.offset_s = offset_s


def _open_channel(route: Route, ca_certificate: bytes) -> grpc.Channel:
    check_authority(ca_certificate)
    credentials = grpc.ssl_channel_credentials(root_certificates=ca_certificate)
    options = (
        # Reconnect soon after a coordinator restarts; gRPC's default maximum is two minutes.
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.initial_reconnect_backoff_ms", 200),
        # In spite of its name: the time for TCP and TLS.
        ("grpc.min_reconnect_backoff_ms", int(1_000 * CONNECT_S)),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.client_idle_timeout_ms", IDLE_MS),
        # The route decides, so that gRPC does not read the environment a second time.
        ("grpc.enable_http_proxy", 0) if route.proxy is None else ("grpc.http_proxy", route.proxy.url),
    )
    return grpc.secure_channel(str(route.target), credentials, options=options)


def _upload_requests(
    header: m.UpdateHeader,
    first: bytes,
    offsets: queue.SimpleQueue[int | None],
    read: ReadPayload,
    faults: list[Corrupted],
) -> Iterator[bytes]:
    """Yield the header, then the pieces from the offset that the first reply names.

    gRPC iterates on its own thread, where an exception would look like a broken connection. So the error of an
    unreadable payload is appended to ``faults``, and the iteration ends.
    """
    yield first
    offset, size_bytes, what = offsets.get(), header.payload.size_bytes, f"update of {header.assignment_id}"
    while offset is not None and offset < size_bytes:
        try:
            data = read(offset, PIECE_BYTES)
        except (FaninError, OSError, ValueError) as exc:
            faults.append(
                Corrupted(f"{what}: its payload cannot be read at byte {offset} on this device ({exc})", code="FN-0823")
            )
            return
        if not data:
            faults.append(
                Corrupted(
                    f"{what}: its payload on this device ends at byte {offset}, expected {size_bytes} bytes",
                    code="FN-0823",
                )
            )
            return
        yield to_proto(m.UploadRequest(part=m.Piece(offset=offset, data=data)), pb.UploadRequest).SerializeToString()
        offset += len(data)


def _our_error(address: str, exc: grpc.RpcError, call: CallOptions) -> FaninError:
    details = exc.details() or ""
    trailing = {item.key: item.value for item in exc.trailing_metadata() or ()}
    named = error_named(str(trailing.get(calls.ERROR, "")), details, str(trailing.get(calls.CODE, "")))
    if isinstance(named, Untimely):
        server_time = str(trailing.get(calls.SERVER_TIME, ""))
        offset_s = float(server_time) / calls.MICROSECONDS - call.now() if server_time.isdecimal() else 0.0
        return ClockOff(f"{address}: {details}", offset_s, code=named.code)
    if isinstance(named, Unauthenticated):
        # Without a code of its own, the coordinator does not say which check has failed.
        expected = f"; it expects {_CREDENTIAL}" if named.code == Unauthenticated.class_code else ""
        return Unauthenticated(f"{address}: {details}{expected}", code=named.code)
    if named is not None:
        return named
    if exc.code() is grpc.StatusCode.INTERNAL:
        return Unavailable(f"{address}: the coordinator failed ({details}); try again later", code="FN-0821")
    if exc.code() is grpc.StatusCode.UNIMPLEMENTED:
        text = "compare the releases of fanin on both machines"
        return Untrusted(f"{address}: was reached, but does not know this call ({details}); {text}", code="FN-0817")
    return Unavailable(
        f"{address}: cannot be reached ({exc.code().name}: {details}); is the coordinator running?", code="FN-0811"
    )


def _as_is(data: bytes) -> bytes:
    return data

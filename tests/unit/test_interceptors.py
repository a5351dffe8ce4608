"""The gRPC interceptors: silent streams, unknown callers, long texts, and errors that reveal no path."""

import asyncio
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from grpc import aio
from support.errors import raises
from support.peers import sign
from support.values import DEVICE_KEY, STRANGER

from fanin.clients.route import KEEPALIVE_MS
from fanin.protos.calls import AUTHORIZATION, BEARER
from fanin.protos.errors import InvalidInput, Unauthenticated, Unavailable
from fanin.protos.messages import Enrollment, Principal, PrincipalKind, Role
from fanin.protos.wire import to_proto
from fanin.server.access.interceptors import (
    CONTROL,
    ENROLL,
    FLEET,
    LOG,
    MAX_BYTES,
    MAX_TEXT_CHARS,
    Rim,
    Waits,
    newcomer_of,
    principal_of,
)
from fanin.server.access.limited_log import LimitedLog
from fanin.server.access.rates import CallLimits, CallRates, Sources
from fanin.server.access.registry import Registry
from fanin.server.fleet.servicer import FleetService
from fanin.server.folder import open_state
from fanin.server.service import SERVER_OPTIONS
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline
from fanin.server.storage.records import EnrolledDevice
from fanin.v1 import fleet_pb2

UPLOAD, HEALTH = f"{FLEET}Upload", "/grpc.health.v1.Health/Check"
DEVICE = PrincipalKind.DEVICE
T = TypeVar("T")


class Context:
    """A call that records its status code and details."""

    def __init__(self, metadata: tuple[tuple[str, str | bytes], ...] = ()) -> None:
        self.code = grpc.StatusCode.OK
        self.details = ""
        self.metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self.metadata

    def peer(self) -> str:
        return "ipv4:192.0.2.7:4711"

    async def abort(self, code: grpc.StatusCode, details: str, trailing: object = ()) -> None:
        self.code, self.details = code, details
        raise aio.AbortError


def rates() -> CallRates:
    return CallRates(CallLimits(), time.monotonic, Sources(time.monotonic, time.time))


@pytest.fixture
def rim(tmp_path: Path) -> Rim:
    state = open_state(tmp_path, Durability.PROCESS, (inline, inline), time.time)
    return Rim(Registry(state.devices, time.time), Waits(first_request_s=0.05), rates(), LimitedLog(LOG))


async def silent() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def requests(*data: bytes) -> AsyncIterator[bytes]:
    for each in data:
        yield each


class Handler:
    """A servicer that records the caller and the received messages."""

    request_streaming = True

    def __init__(self) -> None:
        self.caller: object = None
        self.received: list[bytes] = []

    @staticmethod
    def request_deserializer(data: bytes) -> BytesValue:
        return BytesValue(value=data)

    async def stream_unary(self, messages: AsyncIterator[BytesValue], caller: object) -> bytes:
        self.caller = caller
        self.received = [message.value async for message in messages]
        return b"reply"

    async def unary_unary(self, message: BytesValue, caller: object) -> bytes:
        self.caller, self.received = caller, [message.value]
        return b"reply"


async def first(rim: Rim, stream: AsyncIterator[bytes]) -> None:
    rim._admit(UPLOAD, await rim._first(UPLOAD, stream), Context())


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_servicer_receives_the_principal_of_its_caller(tmp_path: Path, is_stream: bool) -> None:
    state = open_state(tmp_path, Durability.PROCESS, (inline, inline), time.time)
    registry, body = Registry(state.devices, time.time), (b"first", b"second") if is_stream else (b"first",)
    device, token = EnrolledDevice(public_key=DEVICE_KEY.public), registry.new_token(Role.OPERATOR)
    asyncio.run(state.devices.enroll([device], 0.0))
    rim = Rim(registry, Waits(), rates(), LimitedLog(LOG))
    for method, metadata, principal in (
        (f"{FLEET}Upload", sign(DEVICE_KEY, "Upload", b"first").metadata, Principal(kind=DEVICE, id=device.device_id)),
        (f"{CONTROL}PutChunks", ((AUTHORIZATION, f"{BEARER}{token}"),), registry.bearer(token)[0]),
    ):
        handler = Handler()
        handler.request_streaming = is_stream
        context = Context(metadata)
        assert asyncio.run(rim._one_reply(method, handler, requests(*body), context)) == b"reply"
        assert (handler.caller, tuple(handler.received)) == (principal, body)
        assert principal_of(handler.caller) == principal
        with pytest.raises(AssertionError, match="only Enroll is served before authentication"):
            newcomer_of(handler.caller)


def test_the_servicers_of_grpc_receive_its_context(rim: Rim) -> None:
    handler, context = Handler(), Context()
    asyncio.run(rim._one_reply("/grpc.health.v1.Health/Check", handler, requests(b"first"), context))
    assert handler.caller is context


def test_a_silent_stream_is_ended(rim: Rim) -> None:
    with raises(Unavailable, f"call: {UPLOAD} sent no request for 0.05 s"):
        asyncio.run(first(rim, silent()))


def test_a_stream_without_requests_is_invalid(rim: Rim) -> None:
    with pytest.raises(InvalidInput, match="FN-0126"):
        asyncio.run(first(rim, requests()))


def test_a_stream_without_a_signature_is_unauthenticated(rim: Rim) -> None:
    with pytest.raises(Unauthenticated, match="carries no valid"):
        asyncio.run(first(rim, requests(b"first")))


class Failing(Handler):
    """A servicer that raises this error."""

    request_streaming = False

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def unary_unary(self, message: bytes, caller: object) -> bytes:
        raise self.error


async def fail(rim: Rim, error: Exception, num_calls: int = 1) -> Context:
    """Return the last of some calls that fail with an error."""
    for _ in range(num_calls):
        context = Context()
        with pytest.raises(aio.AbortError):
            await rim._one_reply(HEALTH, Failing(error), requests(b"first"), context)
    return context


def test_long_texts_are_cut_for_the_peer_and_the_log(rim: Rim, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    context = asyncio.run(fail(rim, InvalidInput("x" * 5000)))
    assert context.details == "x" * MAX_TEXT_CHARS
    (record,) = caplog.records
    assert record.getMessage() == f"{HEALTH}: InvalidInput: {'x' * MAX_TEXT_CHARS} [FN-0002]"


@pytest.mark.parametrize("method", MAX_BYTES)
def test_a_request_of_a_device_is_limited_before_it_is_parsed(rim: Rim, method: str) -> None:
    largest = MAX_BYTES[method]
    with pytest.raises(Unauthenticated, match="FN-0672"):
        rim._admit(method, bytes(largest), Context())
    with pytest.raises(InvalidInput, match=f"carries {largest + 1} bytes, expected at most {largest}"):
        rim._admit(method, bytes(largest + 1), Context())


async def kept_bytes(rim: Rim, token: str, error: Exception | None, num_calls: int) -> int:
    """Make calls with a request of 1 MB each. Return the bytes that the server keeps of them."""

    async def put(message: bytes, caller: object) -> bytes:
        if error is not None:
            raise type(error)(*error.args)
        return b""

    handlers = {"PutChunks": grpc.unary_unary_rpc_method_handler(put, bytes, bytes)}
    server = aio.server(interceptors=[rim])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("fanin.v1.Control", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        # The client has one request in all.
        call, request = channel.unary_unary(f"{CONTROL}PutChunks"), bytes(1_000_000)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(num_calls):
            with suppress(aio.AioRpcError):
                await call(request, metadata=((AUTHORIZATION, f"{BEARER}{token}"),))
        after = tracemalloc.get_traced_memory()[0]
    await server.stop(0)
    return after - before


@pytest.mark.parametrize("error", [None, InvalidInput("no such chunk"), OSError(5), KeyError("a bug")])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_call_frees_its_request_without_a_garbage_collection(
    tmp_path: Path, is_known: bool, error: Exception | None
) -> None:
    """Peers could fill the memory otherwise: the collector runs too rarely for requests of megabytes."""
    state = open_state(tmp_path, Durability.PROCESS, (inline, inline), time.time)
    registry = Registry(state.devices, time.time)
    token = registry.new_token(Role.OPERATOR) if is_known else "invented"
    rim = Rim(registry, Waits(), rates(), LimitedLog(LOG))
    gc.disable()
    tracemalloc.start()
    try:
        assert asyncio.run(kept_bytes(rim, token, error, 10)) < 3_000_000
    finally:
        tracemalloc.stop()
        gc.enable()


async def no_lane(work: Callable[[], T]) -> T:
    """A lane to the store that fails if it is used."""
    raise AssertionError("a caller whom nobody knows reached the store")


def test_unknown_callers_never_reach_the_store(tmp_path: Path) -> None:
    state = open_state(tmp_path, Durability.PROCESS, (no_lane, inline), time.time)
    registry = Registry(state.devices, time.time)
    rim = Rim(registry, Waits(), rates(), LimitedLog(LOG))
    stranger = sign(STRANGER, "CheckIn", b"").metadata
    invented = sign(STRANGER, "CheckIn", b"", device_id="0123456789abcdef" * 2).metadata
    for metadata, text in ((stranger, "not enrolled here"), (invented, "not enrolled here"), ((), "carries no valid")):
        with pytest.raises(Unauthenticated, match=text):
            rim._admit(f"{FLEET}CheckIn", b"", Context(metadata))
    with pytest.raises(Unauthenticated, match="FN-0670"):
        rim._admit(f"{CONTROL}ListRuns", b"", Context(((AUTHORIZATION, f"{BEARER}invented"),)))
    enrollment = Enrollment(protocol=1, token="invented", public_key=STRANGER.public)
    body = to_proto(enrollment, fleet_pb2.EnrollRequest)
    signed = sign(STRANGER, "Enroll", body.SerializeToString())
    newcomer, _ = rim._admit(ENROLL, body.SerializeToString(), Context(signed.metadata))
    service = FleetService(None, registry, state.stores)
    with pytest.raises(Unauthenticated, match="FN-0670"):
        asyncio.run(service.Enroll(body, newcomer))


def test_a_disk_error_is_a_temporary_error_that_reveals_no_path(rim: Rim, caplog: pytest.LogCaptureFixture) -> None:
    context = asyncio.run(fail(rim, IsADirectoryError(21, "Is a directory", "/var/fanin/blobs/39"), 100))
    assert (context.code, context.details) == (grpc.StatusCode.UNAVAILABLE, "try again later")
    assert "/var/fanin/blobs/39" in caplog.text and "[FN-0512]" in caplog.text
    assert len(caplog.records) == 1


def test_an_unexpected_error_is_logged_once_for_each_cause(rim: Rim, caplog: pytest.LogCaptureFixture) -> None:
    context = asyncio.run(fail(rim, KeyError("secret"), 100))
    assert context.code is grpc.StatusCode.INTERNAL and "secret" not in context.details
    assert len(caplog.records) == 1


def test_the_server_accepts_pings_as_often_as_clients_send_them() -> None:
    assert dict(SERVER_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"] < KEEPALIVE_MS

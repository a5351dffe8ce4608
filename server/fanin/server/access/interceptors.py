"""The boundary to gRPC: authentication of every call, and the conversion of errors to statuses.

For each call, in this order:

1. The request stays raw bytes, because the signature covers the received bytes and not a re-serialization.
2. The caller is authenticated. Fleet: the device's signature over method, time and body. A device may use each time
   for one call only, and a banned one for none. Control and Access: the token of a person, whose role permits the call
   (``permissions``). All is checked in memory, without the database, because any peer can make a call. gRPC's own
   health and reflection services need no credential, so their requests are small and their calls few.
   The servicer receives the principal in place of gRPC's context. The call ends with a ban, a revocation or the expiry
   of the token (``open_calls``). A device that calls too often waits here (``rates``).
3. The bytes are parsed after the authentication, so no unknown peer reaches the parser. Invalid bytes raise
   InvalidInput. Enroll is the exception: its bytes hold the key that signed them, and are parsed first.
4. An error of the servicer becomes a status by the table in ``protos.errors``. The peer receives the public text. The
   log has the inner text, of a limited number of calls per minute (``refused``). A source of many wrong credentials is
   told to call later (``rates``). A failure of the coordinator itself is logged with its traceback, once a minute.
5. A missing request, or a reply that the caller does not read, ends the call and frees its resources.
6. A call that fails frees its request at once (``_Refusal``), so peers cannot fill the memory with refused requests.
"""

import asyncio
import logging
import math
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable
from types import MappingProxyType
from typing import Final, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from fanin.protos import calls
from fanin.protos.calls import DeviceCall
from fanin.protos.errors import (
    INTERNAL,
    FaninError,
    InvalidInput,
    Unavailable,
    coded,
    kind_name,
    public,
    status_of,
)
from fanin.protos.messages import Principal, PrincipalKind
from fanin.protos.wire import check_numbers
from fanin.server.access.limited_log import LimitedLog
from fanin.server.access.permissions import check_permission
from fanin.server.access.rates import CallRates
from fanin.server.access.registry import Registry

LOG = logging.getLogger("fanin.server.access")
FLEET: Final = "/fanin.v1.Fleet/"
CONTROL: Final = "/fanin.v1.Control/"
ACCESS: Final = "/fanin.v1.Access/"
SERVICES: Final = "/fanin.v1."
ENROLL: Final = f"{FLEET}Enroll"
MAX_OPEN_BYTES: Final = 4096
"""Longest request without a credential. The health service keeps it as long as the caller watches."""
MAX_BYTES: Final = MappingProxyType(
    {
        ENROLL: 4 << 10,  # a token, a key and a signature
        f"{FLEET}CheckIn": 64 << 10,  # at most 112 names of 128 characters, which may have 4 bytes
        f"{FLEET}Download": 16 << 10,  # at most 65 digests
        f"{FLEET}Report": 32 << 10,  # at most 4,096 characters of a failure
        f"{FLEET}Exchange": (1 << 20) + (4 << 10),  # a message of a phase
        f"{FLEET}Upload": 1 << 20,  # the header; 80 bytes for each MiB of the payload
    }
)
"""Longest requests of devices; of an upload, its first message. Parsing millions of entries would block all calls."""
MAX_OPEN_CALLS: Final = 256
"""Calls without a credential at a time: a few for each load balancer, supervisor and engineer."""
MAX_TEXT_CHARS: Final = 500
"""Longest error text for a peer or for the log. It may contain bytes of the peer."""

Context = aio.ServicerContext[Message, Message]
Q = TypeVar("Q")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Longest delays that a caller may cause at the boundary.

    Attributes:
        first_request_s: Seconds until the first request. The caller is unknown until then.
        read_s: Seconds within which the caller must read a reply.
    """

    first_request_s: float = 30.0
    read_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """The caller of Enroll. The servicer checks its token and its signature."""

    call: DeviceCall
    signature: bytes


REPLACED_S: Final = 1.0
"""Seconds that sending the status of a cancelled call may take. The call that replaced it waits for that."""


def principal_of(context: object) -> Principal:
    """Return the principal of a call of Fleet or Control, from the argument ``context`` of its servicer."""
    assert isinstance(context, Principal), "every call but Enroll is served after authentication"
    return context


def newcomer_of(context: object) -> Newcomer:
    """Return the caller of Enroll, from the argument ``context`` of its servicer."""
    assert isinstance(context, Newcomer), "only Enroll is served before authentication"
    return context


Caller = Principal | Newcomer | Context
"""The second argument of a servicer: who calls. The servicers of gRPC's own services receive gRPC's context."""


class _Handler(Protocol):
    """A generated handler with asyncio methods. Exactly one of the four methods is set."""

    request_streaming: bool
    response_streaming: bool
    request_deserializer: Callable[[bytes], Message]
    response_serializer: Callable[[Message], bytes]
    unary_unary: Callable[[Message, Caller], Awaitable[Message]]
    unary_stream: Callable[[Message, Caller], AsyncGenerator[Message, None] | Awaitable[None]]
    stream_unary: Callable[[AsyncIterator[Message], Caller], Awaitable[Message]]
    stream_stream: Callable[[AsyncIterator[Message], Caller], AsyncGenerator[Message, None]]


@dataclass(frozen=True, kw_only=True)
class _Guarded:
    """A handler of raw bytes, with the attributes that gRPC expects.

    Every request is a stream for gRPC, which is the same on the wire. Otherwise gRPC would wait for a single request
    without a limit before it calls us.
    """

    response_streaming: bool
    response_serializer: Callable[[Message], bytes]
    stream_unary: Callable[[AsyncIterator[bytes], Context], Awaitable[Message]]
    stream_stream: Callable[[AsyncIterator[bytes], Context], Awaitable[None]]
    request_streaming: bool = True
    request_deserializer: Callable[[bytes], bytes] = field(default=lambda data: data)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """The status of a call that failed.

    A call keeps the exception of its abort. If the frames of that exception's traceback, or of its cause, refer to the
    call, only the garbage collector frees it and its request. So a frame without it aborts it, after its error is gone.
    """

    status: grpc.StatusCode
    text: str
    trailing: tuple[tuple[str, str], ...]


class Rim(aio.ServerInterceptor):
    """Wraps every handler."""

    def __init__(self, registry: Registry, waits: Waits, rates: CallRates, refused: LimitedLog) -> None:
        self._registry = registry
        self._rates = rates
        self._waits = waits
        self._refused = refused
        self._failure_logger = LimitedLog(LOG, max_lines=1, what="failed calls")
        self._num_open = 0

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Q, R] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Q, R] | None":
        """Return the handler behind the checks of the rim."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        guarded = self._guarded(handler_call_details.method, cast("_Handler", handler))
        return cast("grpc.RpcMethodHandler[Q, R]", guarded)

    def _guarded(self, method: str, handler: _Handler) -> _Guarded:
        return _Guarded(
            response_streaming=handler.response_streaming,
            response_serializer=handler.response_serializer,
            stream_unary=partial(self._one_reply, method, handler),
            stream_stream=partial(self._many_replies, method, handler),
        )

    async def _one_reply(
        self, method: str, handler: _Handler, requests: AsyncIterator[bytes], context: Context
    ) -> Message:
        reply = await self._outcome(method, context, partial(self._reply, method, handler, requests, context))
        if not isinstance(reply, _Refusal):
            return reply
        error = await self._abort(reply, context)
        del requests, context
        raise error

    async def _many_replies(
        self, method: str, handler: _Handler, requests: AsyncIterator[bytes], context: Context
    ) -> None:
        outcome = await self._outcome(method, context, partial(self._replies, method, handler, requests, context))
        if isinstance(outcome, _Refusal):
            error = await self._abort(outcome, context)
            del requests, context
            raise error

    async def _reply(self, method: str, handler: _Handler, requests: AsyncIterator[bytes], context: Context) -> Message:
        async with _closing(requests) as stream:
            first = await self._first(method, stream)
            caller, left_s = self._admit(method, first, context)
            async with self._held(caller, left_s):
                if not handler.request_streaming:
                    return await handler.unary_unary(_parsed(method, handler, first), caller)
                messages = _messages(method, handler, first, stream)
                del first
                return await handler.stream_unary(messages, caller)

    async def _replies(self, method: str, handler: _Handler, requests: AsyncIterator[bytes], context: Context) -> None:
        async with _closing(requests) as stream:
            first = await self._first(method, stream)
            caller, left_s = self._admit(method, first, context)
            async with self._held(caller, left_s):
                if handler.request_streaming:
                    messages = _messages(method, handler, first, stream)
                    del first
                    await self._send(handler.stream_stream(messages, caller), context)
                else:
                    replies = handler.unary_stream(_parsed(method, handler, first), caller)
                    # The health service writes its own replies.
                    await (replies if isawaitable(replies) else self._send(replies, context))

    async def _send(self, replies: AsyncGenerator[Message, None], context: Context) -> None:
        """Send the replies one after the other. Raises Unavailable for a caller that does not read."""
        async with aclosing(replies):
            # Not ``async for``: its loop variable would keep a piece in memory while the next one is awaited.
            while (reply := await anext(replies, None)) is not None:
                try:
                    async with asyncio.timeout(self._waits.read_s):
                        await context.write(reply)
                except TimeoutError as exc:
                    text = f"call: its caller read nothing for {self._waits.read_s:g} s; call again"
                    raise Unavailable(text, code="FN-0678") from exc
                del reply

    async def _first(self, method: str, stream: AsyncIterator[bytes]) -> bytes:
        try:
            async with asyncio.timeout(self._waits.first_request_s):
                return await anext(stream)
        except StopAsyncIteration as exc:
            raise InvalidInput(f"call: {method} carries no request, expected one; send it", code="FN-0126") from exc
        except TimeoutError as exc:
            text = f"call: {method} sent no request for {self._waits.first_request_s:g} s"
            raise Unavailable(text, code="FN-0678") from exc

    @asynccontextmanager
    async def _held(self, caller: Caller, left_s: float) -> AsyncIterator[None]:
        """Serve a call within this context: at the rate of its device, and until its caller is refused."""
        with self._registry.calls.hold(caller, left_s):
            async with self._rates.call_of(caller):
                yield

    def _admit(self, method: str, body: bytes, context: Context) -> tuple[Caller, float]:
        """Return the caller, and the seconds for which it may call. Raises Unauthenticated, PermissionDenied."""
        largest = MAX_OPEN_BYTES if _is_open(method) else MAX_BYTES.get(method, len(body))
        if len(body) > largest:
            raise InvalidInput(f"call: {method} carries {len(body)} bytes, expected at most {largest}", code="FN-0126")
        if _is_open(method):
            return context, math.inf
        metadata = calls.metadata_of(context.invocation_metadata() or ())
        if not method.startswith(FLEET):
            value = calls.text(metadata.get(calls.AUTHORIZATION))
            token = value.removeprefix(calls.BEARER) if value.startswith(calls.BEARER) else ""
            principal, left_s = self._registry.bearer(token)
            check_permission(principal, method.removeprefix(SERVICES))
            return principal, left_s
        call, signature = calls.signed_call(method, metadata, body)
        if method == ENROLL:
            return Newcomer(call=call, signature=signature), math.inf
        device = self._registry.device(call.device_id)
        self._registry.authenticate(device, call, signature)
        self._registry.check_ban(device)
        return Principal(kind=PrincipalKind.DEVICE, id=device.device_id), math.inf

    async def _outcome(self, method: str, context: Context, work: Callable[[], Awaitable[R]]) -> "R | _Refusal":
        """Return the result of a call, or the status of its error."""
        try:
            with self._place(method):
                return await work()
        except FaninError as exc:
            shown, origin = self._rates.sources.refuse(exc, context.peer())
            if exc.code != calls.PROBE:
                kind, text = type(shown).__name__, str(shown)[:MAX_TEXT_CHARS]
                self._refused.log(kind, f"{method}{origin}: {kind}: {text} [{shown.code}]", shown.code)
            return self._refusal(exc, shown)
        except OSError as exc:  # Our disk failed. The caller can only retry later, and must not read a path.
            failure = Unavailable(f"{method}: the coordinator's disk or network failed", code="FN-0512")
            self._failure_logger.exception(coded(failure))
            return self._refusal(exc, failure)
        except (aio.AbortError, aio.UsageError):
            raise
        except aio.InternalError as exc:
            # gRPC cannot send or receive: the peer has disconnected, and the cancellation has not arrived yet.
            raise asyncio.CancelledError from exc
        except asyncio.CancelledError as exc:
            traceback.clear_frames(exc.__traceback__)
            # A newer upload replaced this one, or its connection broke. gRPC does not send a status here.
            with suppress(Exception):
                async with asyncio.timeout(REPLACED_S):
                    text = "call: ended for a newer one; try again later"
                    await context.abort(grpc.StatusCode.UNAVAILABLE, text, self._trailing("Unavailable", "FN-0026"))
            raise
        except Exception as exc:  # The rim: a bug must end one call, never the coordinator, and never leak its text.
            self._failure_logger.exception(f"{method}: unexpected error")
            traceback.clear_frames(exc.__traceback__)
            text = "internal error; the coordinator's log has the details"
            return _Refusal(status=grpc.StatusCode.INTERNAL, text=text, trailing=self._trailing(INTERNAL, "FN-0022"))

    def _refusal(self, error: Exception, shown: FaninError) -> "_Refusal":
        """Return the status of an error, and free the request that its frames hold."""
        traceback.clear_frames(error.__traceback__)
        text, code = public(shown)
        return _Refusal(
            status=grpc.StatusCode[status_of(shown).grpc],
            text=text[:MAX_TEXT_CHARS],
            trailing=self._trailing(kind_name(shown), code),
        )

    @contextmanager
    def _place(self, method: str) -> Iterator[None]:
        """Hold one of the places for calls without a credential. Raises Unavailable if there is none."""
        if not _is_open(method):
            yield
            return
        if self._num_open >= MAX_OPEN_CALLS:
            raise Unavailable(
                f"call: {method}: {MAX_OPEN_CALLS} calls without a credential are open, expected fewer; close some",
                code="FN-0677",
            )
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def _abort(self, refusal: "_Refusal", context: Context) -> BaseException:
        """Send the status of a call. Return the exception that ends its handler."""
        try:
            async with asyncio.timeout(self._waits.read_s):
                await context.abort(refusal.status, refusal.text, refusal.trailing)
        except aio.AbortError as exc:
            return exc.with_traceback(None)
        except (TimeoutError, aio.InternalError):
            pass  # A caller that does not read its replies does not read this status. gRPC keeps it.
        return asyncio.CancelledError()

    def _trailing(self, kind: str, code: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every refusal: kind and code of the error, and this clock in microseconds."""
        return (calls.ERROR, kind), (calls.CODE, code), (calls.SERVER_TIME, str(self._registry.now_us))


def _closing(requests: AsyncIterator[bytes]) -> aclosing[AsyncGenerator[bytes, None]]:
    """Close the generator of a call's requests at the end of the context: it and the call keep each other."""
    return aclosing(cast("AsyncGenerator[bytes, None]", aiter(requests)))


def _is_open(method: str) -> bool:
    """Return whether a call needs no credential."""
    return not method.startswith((FLEET, CONTROL, ACCESS))


async def _messages(
    method: str, handler: _Handler, first: bytes, stream: AsyncIterator[bytes]
) -> AsyncIterator[Message]:
    yield _parsed(method, handler, first)
    del first
    # Not ``async for``: its loop variable would keep a piece in memory for each upload that waits.
    with suppress(StopAsyncIteration):
        while True:
            yield _parsed(method, handler, await anext(stream))


def _parsed(method: str, handler: _Handler, data: bytes) -> Message:
    try:
        message = handler.request_deserializer(data)
    except DecodeError as exc:
        text = f"call: {method}: got {len(data)} bytes that do not parse as its request ({exc})"
        raise InvalidInput(text, code="FN-0126") from exc
    check_numbers(message)
    return message

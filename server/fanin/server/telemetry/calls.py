"""The calls of a coordinator as their callers see them: method, status, code and duration.

This interceptor is the outermost one, so refused and cancelled calls pass it, too. It wraps the handler of each call
and changes no message. A reply may get trailing metadata.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar, cast

import grpc
from google.protobuf.message import Message
from grpc import aio

from fanin.protos import calls

Q = TypeVar("Q")
R = TypeVar("R")
Context = aio.ServicerContext[Message, Message]
Metadata = tuple[tuple[str, str], ...]


class ServedCall(Protocol):
    """The observer of one call."""

    def replied(self, reply: Message) -> Metadata:
        """Return the metadata that follow the only reply of a call."""
        ...

    def ended(self, status: str, code: str, seconds: float) -> None:
        """Note the end of the call: the name of its gRPC status, and the code of an error of fanin or ""."""
        ...


class CallObserver(Protocol):
    """Observes the calls of a coordinator. ``is_tracing`` says whether it uses the context of callers."""

    @property
    def is_tracing(self) -> bool: ...

    def begin(self, method: str, traceparent: str) -> ServedCall:
        """Return the observer of a call that begins. ``traceparent`` is that of its metadata, or ""."""
        ...


class _Handler(Protocol):
    """A handler of raw bytes (``access.interceptors``): every request is a stream."""

    response_streaming: bool
    stream_unary: Callable[[AsyncIterator[bytes], Context], Awaitable[Message]]
    stream_stream: Callable[[AsyncIterator[bytes], Context], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ObservedCalls:
    """The interceptor's work, without gRPC's class."""

    observer: CallObserver

    async def one_reply(
        self, method: str, handler: _Handler, requests: AsyncIterator[bytes], context: Context
    ) -> Message:
        """Serve a call with one reply."""
        call, began_s = self._begin(method, context), time.perf_counter()
        try:
            reply = await handler.stream_unary(requests, context)
            if trailing := call.replied(reply):
                context.set_trailing_metadata(trailing)
        except asyncio.CancelledError:
            # The caller has ended the call, as devices do after the verdict, or it was replaced.
            call.ended(grpc.StatusCode.CANCELLED.name, "", time.perf_counter() - began_s)
            del requests, context
            raise
        except BaseException:
            _end_failed(call, context, began_s)
            # The call keeps this exception, and the frames of its traceback must not keep the call.
            del requests, context
            raise
        call.ended(grpc.StatusCode.OK.name, "", time.perf_counter() - began_s)
        return reply

    async def many_replies(
        self, method: str, handler: _Handler, requests: AsyncIterator[bytes], context: Context
    ) -> None:
        """Serve a call with a stream of replies, which the handler writes itself."""
        call, began_s = self._begin(method, context), time.perf_counter()
        try:
            await handler.stream_stream(requests, context)
        except asyncio.CancelledError:
            # The caller has ended the call, as devices do after the verdict, or it was replaced.
            call.ended(grpc.StatusCode.CANCELLED.name, "", time.perf_counter() - began_s)
            del requests, context
            raise
        except BaseException:
            _end_failed(call, context, began_s)
            # The call keeps this exception, and the frames of its traceback must not keep the call.
            del requests, context
            raise
        call.ended(grpc.StatusCode.OK.name, "", time.perf_counter() - began_s)

    def _begin(self, method: str, context: Context) -> ServedCall:
        metadata = (context.invocation_metadata() or ()) if self.observer.is_tracing else ()
        traceparent = next((value for key, value in metadata if key == calls.TRACEPARENT), "")
        return self.observer.begin(method, calls.text(traceparent))


def _end_failed(call: ServedCall, context: Context, began_s: float) -> None:
    """Report the status that the handler has set, and the code of its error."""
    # At run time it may be the number of a status, 0 for a handler that set none.
    number = context.code()
    status = next((one for one in grpc.StatusCode if number in (one, one.value[0])), grpc.StatusCode.OK)
    name = grpc.StatusCode.UNKNOWN.name if status is grpc.StatusCode.OK else status.name
    code = next((value for key, value in context.trailing_metadata() or () if key == calls.CODE), "")
    call.ended(name, calls.text(code), time.perf_counter() - began_s)


class CallInterceptor(aio.ServerInterceptor):
    """Wraps each handler for an observer."""

    def __init__(self, observer: CallObserver) -> None:
        self._observed = ObservedCalls(observer)

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Q, R] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Q, R] | None":
        """Return the observed handler."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method, guarded = handler_call_details.method, cast("_Handler", handler)
        return cast(
            "grpc.RpcMethodHandler[Q, R]",
            replace(
                guarded,  # type: ignore[type-var]
                stream_unary=partial(self._observed.one_reply, method, guarded),
                stream_stream=partial(self._observed.many_replies, method, guarded),
            ),
        )

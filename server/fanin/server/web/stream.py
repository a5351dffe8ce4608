"""The live stream of the page: the messages of the coordinator's stream (``runs.stream``) as server-sent events.

    event: hello   {"boot": ...}       the life of this coordinator
    event: event   {"run": ..., ...}   an event of a Run; its id continues the stream (Last-Event-ID, or ?after=)
    event: live    {"run": ..., ...}   the Round under way of a Run after a change: ``LiveRound`` of control.proto
    event: reset   {}                  events were skipped: read the page again
    event: over    {}                  the session has ended, or its token is no longer valid: sign in again

A reader that does not read is dropped, and its browser connects again where it was. After a restart of the coordinator
positions may differ, so an id of another life gets ``reset``.

Reference:
    https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Final

from google.protobuf.json_format import MessageToDict
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from fanin.protos.errors import FaninError, Unavailable, coded
from fanin.protos.wire import to_proto
from fanin.server.runs.stream import LiveStream, Streamed, StreamReader
from fanin.server.storage.protocols.history import HistoryStore
from fanin.server.storage.records import FeedEntry
from fanin.server.web.rendering import clean
from fanin.server.web.texts import event_kind, event_text, is_bad
from fanin.v1 import control_pb2

MAX_READERS: Final = 64
MAX_RESUMED: Final = 500
"""Events that a reader receives after a break. With more it reads its page again."""
CHECK_S: Final = 2.0
"""Seconds between two checks whether the session is still valid."""
HEARTBEAT_S: Final = 15.0
SEND_S: Final = 20.0
"""Time in which a browser must read what it was sent."""
RETRY_MS: Final = 1000
Hold = Callable[[], AbstractContextManager[None]]


class OpenPages:
    """The open pages that follow the stream.

    Args:
        stream: The stream.
        history: The events of all Runs.
    """

    def __init__(self, stream: LiveStream, history: HistoryStore) -> None:
        self._stream = stream
        self._history = history
        self._boot = secrets.token_hex(4)
        self._num_open = 0

    def open(self, last_id: str, may_read: Callable[[], bool], hold: Hold) -> "Response | StreamResponse":
        """Return the response of a page that continues after an event, or an error if there are too many.

        Args:
            last_id: The id of the event; "" for a new page.
            may_read: Returns whether its session still permits it.
            hold: The context in which a revocation of its token raises an error.
        """
        if self._num_open >= MAX_READERS:
            text = f"stream: {MAX_READERS} pages read it, expected fewer; close some, and connect again"
            return PlainTextResponse(coded(Unavailable(text, code="FN-1428")), status_code=503)
        # Counted here and not when the first message is sent: many may open at once.
        self._num_open += 1

        @contextmanager
        def place() -> Iterator[None]:
            try:
                with hold():
                    yield
            finally:
                self._num_open -= 1

        return StreamResponse(lambda: self._messages(last_id, may_read), place, may_read)

    async def _messages(self, last_id: str, may_read: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield the messages of a page until it lags, may no longer read, or the coordinator ends."""
        async with self._stream.reader() as reader:
            yield _message("hello", {"boot": self._boot}, head=f"retry: {RETRY_MS}\n")
            for text in await self._missed(last_id, reader):
                yield text
            async with aclosing(self._following(reader, may_read)) as texts:
                async for text in texts:
                    yield text

    async def _following(self, reader: StreamReader, may_read: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        check_at, beat_at = 0.0, loop.time() + HEARTBEAT_S
        while True:
            if loop.time() >= check_at:
                check_at = loop.time() + CHECK_S
                if not may_read():
                    yield _message("over", {})
                    return
            try:
                async with asyncio.timeout_at(check_at):
                    message = await reader.next()
            except TimeoutError:
                if loop.time() >= beat_at:
                    beat_at = loop.time() + HEARTBEAT_S
                    yield b": \n\n"
                continue
            if message is None:
                return
            yield self._text(message)

    async def _missed(self, last_id: str, reader: StreamReader) -> tuple[bytes, ...]:
        """Return the messages since an event of the page."""
        if not last_id:
            return ()
        boot, _, position = last_id.partition("-")
        is_ours = boot == self._boot and position.isdecimal() and position.isascii()
        missed = await self._history.feed_after(int(position), MAX_RESUMED + 1) if is_ours else ()
        if not is_ours or len(missed) > MAX_RESUMED:
            return (_message("reset", {}),)
        return tuple(self._text(entry) for entry in missed if entry.position <= reader.begin)

    def _text(self, message: Streamed) -> bytes:
        if not isinstance(message, FeedEntry):
            live = MessageToDict(to_proto(message.round, control_pb2.LiveRound), preserving_proto_field_name=True)
            return _message("live", {"run": message.run_id, **live})
        event = message.logged.event
        data = {
            "run": message.run_id,
            "sequence": message.logged.sequence,
            "time": message.logged.time,
            "kind": event_kind(event),
            "text": clean(event_text(event)),
            "bad": is_bad(event),
        }
        return _message("event", data, head=f"id: {self._boot}-{message.position}\n")


class StreamResponse:
    """The response of a stream. It ends when the browser leaves or does not read.

    Args:
        messages: Returns the messages. They are closed with the response.
        place: The context in which they are sent. It may raise a FaninError: the token was revoked.
        may_read: Returns whether the browser may still read, then without a session.
    """

    def __init__(
        self, messages: Callable[[], AsyncGenerator[bytes, None]], place: Hold, may_read: Callable[[], bool]
    ) -> None:
        self._messages = messages
        self._place = place
        self._may_read = may_read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send messages until the end."""
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            sending.cancel()
            await asyncio.wait((sending, gone))
        if not sending.cancelled() and (error := sending.exception()) is not None:
            raise error

    async def _send(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        try:
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            last = b""
            try:
                await self._follow(send)
            except FaninError:
                last = b"" if self._may_read() else _message("over", {})
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            # It reads nothing. The server closes its connection, and the browser connects again.
            pass

    async def _follow(self, send: Send) -> None:
        with self._place():
            async with aclosing(self._messages()) as messages:
                async for message in messages:
                    async with asyncio.timeout(SEND_S):
                        await send({"type": "http.response.body", "body": message, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _message(kind: str, data: Mapping[str, object], head: str = "") -> bytes:
    return f"{head}event: {kind}\ndata: {json.dumps(data)}\n\n".encode()

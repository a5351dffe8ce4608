"""The live stream of the page: server-sent events, from the same record as ``Control.Watch``.

    event: hello   {"boot": ...}       the life of this coordinator
    event: event   {"run": ..., ...}   an event of a Run; its id continues the stream (Last-Event-ID)
    event: live    {"runs": ...}       the open Rounds, when they have changed
    event: reset   {}                  events were skipped: read the page again

The coordinator reads new events once for all readers. A reader has a bounded queue; one that does not read is dropped,
and its browser connects again where it was. After a restart of the coordinator positions may differ, so an id of
another life gets ``reset``.

Reference:
    https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from starlette.types import Receive, Scope, Send

from fanin.protos.errors import FaninError, Unavailable, coded
from fanin.server.runs.catalog import Runs
from fanin.server.storage.protocols.history import HistoryStore
from fanin.server.storage.records import FeedEntry
from fanin.server.web.rendering import clean
from fanin.server.web.texts import event_kind, event_text, is_bad

LOG = logging.getLogger("fanin.server.web.stream")
MAX_READERS: Final = 64
MAX_QUEUED: Final = 256
MAX_RESUMED: Final = 500
"""Events that a reader receives after a break. With more it reads its page again."""
GATHER_S: Final = 0.2
"""Shortest time between two reads of new events."""
LIVE_S: Final = 2.0
"""Seconds between two looks at the open Rounds."""
HEARTBEAT_S: Final = 15.0
SEND_S: Final = 20.0
"""Time in which a browser must read what it was sent."""
RETRY_MS: Final = 1000
_END: Final = b""


class Hub:
    """The readers of the stream, and the task that reads for them.

    Args:
        runs: The Runs.
        history: The events of all Runs.
        uploading: Returns the Updates of a Run that are being uploaded.
    """

    def __init__(
        self, runs: Runs, history: HistoryStore, uploading: Callable[[str], Mapping[str, tuple[int, int]]]
    ) -> None:
        self._runs = runs
        self._history = history
        self._uploading = uploading
        self.boot = secrets.token_hex(4)
        self._readers: set[StreamReader] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._position = 0
        self._live: dict[str, object] = {}
        self._is_closed = False
        runs.subscribe(self._changed.set)

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        for reader in tuple(self._readers):
            reader.end()
        if self._task is not None:
            self._task.cancel()

    async def join(self, last_id: str) -> "StreamReader":
        """Return a new reader that continues after an event. Raises Unavailable if there are too many."""
        if len(self._readers) >= MAX_READERS or self._is_closed:
            raise Unavailable(
                f"stream: {MAX_READERS} pages read it, expected fewer; close some, and connect again", code="FN-1428"
            )
        reader = StreamReader()
        reader.send(_message("hello", {"boot": self.boot}, head=f"retry: {RETRY_MS}\n"))
        if not self._readers:
            self._position = await self._newest()
        self._readers.add(reader)
        boot, _, position = last_id.partition("-")
        if last_id:
            is_ours = boot == self.boot and position.isdecimal()
            missed = await self._history.feed_after(int(position), MAX_RESUMED + 1) if is_ours else ()
            if not is_ours or len(missed) > MAX_RESUMED:
                reader.send(_message("reset", {}))
            else:
                for entry in missed:
                    if entry.position <= self._position:
                        reader.send(self._event(entry))
        if self._live:
            reader.send(_message("live", {"runs": self._live}))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow(), name="stream")
        return reader

    def leave(self, reader: "StreamReader") -> None:
        """Forget a reader."""
        self._readers.discard(reader)

    async def _newest(self) -> int:
        newest = await self._history.feed(None, 1)
        return newest[0].position if newest else 0

    async def _follow(self) -> None:
        """Read for the readers, as long as there are some."""
        while self._readers:
            self._changed.clear()
            try:
                while entries := await self._history.feed_after(self._position, MAX_QUEUED // 4):
                    self._position = entries[-1].position
                    for entry in entries:
                        self._publish(self._event(entry))
                live = self._look()
            except FaninError as exc:
                LOG.warning("the stream of the page waits: %s", coded(exc))
                await asyncio.sleep(LIVE_S)
                continue
            if live != self._live:
                self._live = live
                self._publish(_message("live", {"runs": live}))
            await asyncio.sleep(GATHER_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LIVE_S):
                    await self._changed.wait()
        self._live = {}

    def _look(self) -> dict[str, object]:
        """Return what changes in the open Rounds without an event."""
        rounds: dict[str, object] = {}
        for driver in self._runs.running():
            live = driver.live
            if live.phase is None:
                continue
            progress = [one for device in live.at_work if (one := live.progress(device)) is not None]
            sent = self._uploading(driver.run_id)
            rounds[driver.run_id] = {
                "phase": live.phase.value,
                "at_work": len(live.at_work),
                "waiting": live.num_waiting,
                "steps": sum(each.step for each in progress),
                "sent": sum(received for received, _ in sent.values()),
                "uploads": len(sent),
                "failed": live.num_gave_up + live.num_refused,
            }
        return rounds

    def _event(self, entry: FeedEntry) -> bytes:
        event = entry.logged.event
        data = {
            "run": entry.run_id,
            "sequence": entry.logged.sequence,
            "time": entry.logged.time,
            "kind": event_kind(event),
            "text": clean(event_text(event)),
            "bad": is_bad(event),
        }
        return _message("event", data, head=f"id: {self.boot}-{entry.position}\n")

    def _publish(self, message: bytes) -> None:
        for reader in tuple(self._readers):
            reader.send(message)


class StreamReader:
    """One reader: its messages until it has read them."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(MAX_QUEUED)
        self._has_ended = False

    def send(self, message: bytes) -> None:
        """Queue a message. A reader whose queue is full ends."""
        if self._has_ended:
            return
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """End the stream, without what it has not read."""
        self._has_ended = True
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(_END)

    async def next(self) -> bytes:
        """Return the next message; empty at the end, a comment if there is none for a while."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                return await self._queue.get()
        except TimeoutError:
            return b": \n\n"


class StreamResponse:
    """The response of a stream. It ends when the browser leaves, does not read, or may no longer read.

    Args:
        hub: The hub.
        reader: A reader of it.
        may_read: Whether the session is still valid.
    """

    def __init__(self, hub: Hub, reader: StreamReader, may_read: Callable[[], bool]) -> None:
        self._hub = hub
        self._reader = reader
        self._may_read = may_read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send messages until the end."""
        gone = asyncio.create_task(_until_gone(receive))
        gone.add_done_callback(lambda _: self._reader.end())
        headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        try:
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            while (message := await self._reader.next()) and self._may_read():
                async with asyncio.timeout(SEND_S):
                    await send({"type": "http.response.body", "body": message, "more_body": True})
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            # It reads nothing. The server closes its connection, and the browser connects again.
            pass
        finally:
            self._hub.leave(self._reader)
            gone.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _message(kind: str, data: Mapping[str, object], head: str = "") -> bytes:
    return f"{head}event: {kind}\ndata: {json.dumps(data)}\n\n".encode()

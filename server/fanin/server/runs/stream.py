"""The stream of a coordinator: the events of its Runs, and their Rounds under way when they have changed.

``Control.Watch`` and the page send its messages. One task reads them from the record and from the drivers for all
readers, while there are some::

    record, drivers ─► LiveStream ─┬─► watch:  Control.Watch, of one Run
                                   └─► reader: the page, of all Runs

A reader has a bounded queue. One that lags reads the record again from its last event, so memory does not grow with
events or with slow readers.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from fanin.protos.errors import FaninError, Unavailable, coded
from fanin.protos.messages import LiveRound, LoggedEvent
from fanin.server.runs.catalog import Runs
from fanin.server.storage.protocols.history import HistoryStore
from fanin.server.storage.records import FeedEntry

LOG = logging.getLogger("fanin.server.runs.stream")
MAX_QUEUED: Final = 256
READ_EVENTS: Final = 64
"""Events of one read."""
GATHER_S: Final = 0.2
"""Shortest time between two reads of new events."""
LIVE_S: Final = 2.0
"""Seconds between two looks at the Rounds under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveChange:
    """The Round under way of a Run has changed."""

    run_id: str
    round: LiveRound


Streamed = FeedEntry | LiveChange


class StreamReader:
    """A reader: its messages until it has read them.

    Args:
        run_id: The Run whose messages it gets; "" for all Runs.
        begin: The position in the record after which its events begin.
    """

    def __init__(self, run_id: str = "", begin: int = 0) -> None:
        self.run_id = run_id
        self.begin = begin
        self.is_closed = False
        self.is_over = False
        self._queue: asyncio.Queue[Streamed | None] = asyncio.Queue(MAX_QUEUED)
        self._lags = False

    def send(self, message: Streamed) -> None:
        """Queue a message. If there is no room, the reader lags."""
        if self.run_id not in ("", message.run_id) or self._lags or self.is_closed:
            return
        if self._queue.full():
            self._interrupt()
        else:
            self._queue.put_nowait(message)

    def finish(self) -> None:
        """Note that the Run has ended: the record has its last events."""
        self.is_over = True
        self._interrupt()

    def close(self) -> None:
        """End it, without what it has not read."""
        self.is_closed = True
        self._interrupt()

    async def next(self) -> Streamed | None:
        """Return the next message. None: read the record instead, because the reader lags, or is at its end."""
        message = await self._queue.get()
        if message is None:
            self._lags = False
        return message

    def _interrupt(self) -> None:
        self._lags = True
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)


class LiveStream:
    """The readers of the stream, and the task that reads for them.

    Args:
        runs: The Runs.
        history: The events of all Runs.
    """

    def __init__(self, runs: Runs, history: HistoryStore) -> None:
        self._runs = runs
        self._history = history
        self._readers: set[StreamReader] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._position = 0
        self._live: dict[str, LiveRound] = {}
        self._is_closed = False
        runs.subscribe(self._changed.set)

    def close(self) -> None:
        """End all readers."""
        self._is_closed = True
        for reader in self._readers:
            reader.close()
        if self._task is not None:
            self._task.cancel()

    async def watch(
        self, run_id: str, from_sequence: int, *, has_live: bool
    ) -> AsyncGenerator[LoggedEvent | LiveRound, None]:
        """Yield the events of a Run, past and future, until the Run has ended.

        Args:
            run_id: The Run.
            from_sequence: The number of the first event.
            has_live: Whether the Round under way is yielded too, at first and after each change.

        Raises:
            NotFound: There is no such Run.
            Unavailable: The coordinator ends.
        """
        await self._runs.view(run_id)
        sequence = from_sequence
        async with self.reader(run_id) as reader:
            while not reader.is_closed:
                is_over = reader.is_over
                while page := await self._runs.event_page(run_id, sequence):
                    for entry in page:
                        sequence = entry.sequence + 1
                        yield entry
                if is_over:
                    return
                while (message := await reader.next()) is not None:
                    match message:
                        case FeedEntry(logged=logged) if logged.sequence >= sequence:
                            sequence = logged.sequence + 1
                            yield logged
                        case LiveChange(round=live) if has_live:
                            yield live
        raise Unavailable("watch: the coordinator ends; connect again once it runs", code="FN-1429")

    @asynccontextmanager
    async def reader(self, run_id: str = "") -> AsyncIterator[StreamReader]:
        """Yield a new reader, of one Run or of all."""
        if not self._readers:
            newest = await self._history.feed(None, 1)
            self._position = newest[0].position if newest else 0
        reader = StreamReader(run_id, self._position)
        if self._is_closed:
            reader.close()
        self._readers.add(reader)
        for each, live in self._live.items():
            reader.send(LiveChange(run_id=each, round=live))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read(), name="stream")
        else:
            self._changed.set()
        try:
            yield reader
        finally:
            self._readers.discard(reader)

    async def _read(self) -> None:
        """Read for the readers, as long as there are some."""
        while self._readers and not self._is_closed:
            self._changed.clear()
            try:
                watched = {reader.run_id for reader in self._readers} - {""}
                ended = {run_id for run_id in watched if await self._runs.has_ended(run_id)}
                while entries := await self._history.feed_after(self._position, READ_EVENTS):
                    self._position = entries[-1].position
                    for entry in entries:
                        self._publish(entry)
                self._look()
            except FaninError as exc:
                LOG.warning("the stream of events waits: %s", coded(exc))
                await asyncio.sleep(LIVE_S)
                continue
            for reader in self._readers:
                if reader.run_id in ended:
                    reader.finish()
            await asyncio.sleep(GATHER_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LIVE_S):
                    await self._changed.wait()
        self._live = {}

    def _look(self) -> None:
        """Publish the Rounds under way that have changed. The time that passes is no change."""
        rounds = {driver.run_id: self._runs.drivers.live(driver.run_id).round for driver in self._runs.running()}
        for run_id in self._live.keys() - rounds.keys():
            rounds[run_id] = LiveRound()
        for run_id, live in rounds.items():
            if _timeless(live) != _timeless(self._live.get(run_id, LiveRound())):
                self._publish(LiveChange(run_id=run_id, round=live))
        self._live = {run_id: live for run_id, live in rounds.items() if live.round}

    def _publish(self, message: Streamed) -> None:
        for reader in self._readers:
            reader.send(message)


def _timeless(live: LiveRound) -> LiveRound:
    return replace(live, deadline_s=float(live.deadline_s > 0.0))

"""The calls of a device to a coordinator in the same process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from fanin.protos import messages as m
from fanin.protos.errors import Unavailable

T = TypeVar("T")
PIECE_BYTES: Final = 4096
"""Bytes of a piece of an upload. Small, so that a test's Update has a middle to be cut in."""


class Fleet(Protocol):
    """The methods of a coordinator for devices. ``fanin.server.fleet.coordinator.Coordinator`` implements them."""

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        """Answer a check-in with an Assignment or a retry window."""
        ...

    def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        """Stream a Chunk from an offset."""
        ...

    def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """Receive an Update."""
        ...

    async def exchange(self, device: str, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        """Record the message of a phase, and return the coordinator's message."""
        ...

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """Return the state of an Update, or record that its Assignment was given up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackTransport:
    """The calls of one device. ``latency_s`` seconds pass before each call, on the event loop's clock.

    An upload is sent in pieces of ``piece_bytes``.
    """

    fleet: Fleet
    device: str
    latency_s: float = 0.0
    piece_bytes: int = PIECE_BYTES

    async def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        """See Transport."""
        await asyncio.sleep(self.latency_s)
        return await self.fleet.check_in(self.device, check_in)

    async def download(self, assignment_id: str, sha256: str) -> bytes:
        """Download a complete Chunk."""
        await asyncio.sleep(self.latency_s)
        request = m.Download(assignment_id=assignment_id, sha256=sha256, offset=0)
        return b"".join([data async for data in self.fleet.download(self.device, request)])

    async def upload(self, header: m.UpdateHeader, read: Callable[[int, int], bytes]) -> m.UploadReply:
        """See Transport."""
        await asyncio.sleep(self.latency_s)
        offset: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def pieces() -> AsyncIterator[m.Piece]:
            for start in range(await offset, header.payload.size_bytes, self.piece_bytes):
                yield m.Piece(offset=start, data=read(start, self.piece_bytes))

        last = None
        async for reply in self.fleet.upload(self.device, header, pieces()):
            if last is None:
                offset.set_result(reply.received_bytes)
            last = reply
        if last is None:
            raise Unavailable("loopback: the upload ended without a reply", code="FN-0819")
        return last

    async def exchange(self, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        """See Transport."""
        await asyncio.sleep(self.latency_s)
        return await self.fleet.exchange(self.device, request)

    async def report(self, report: m.Report) -> m.UploadReply:
        """See Transport."""
        await asyncio.sleep(self.latency_s)
        return await self.fleet.report(self.device, report)


class InterruptibleFleet:
    """A coordinator that serves each call in its own task, like a server. ``hang_up`` ends all calls."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tasks: dict[asyncio.Task[object], None] = {}  # ordered, so that the log is reproducible
        self._is_up = True

    async def hang_up(self) -> None:
        """Break all connections, and return when no call is in progress."""
        self._is_up = False
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        """See Fleet."""
        return await self.call(self._fleet.check_in(device, check_in))

    def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        """See Fleet."""
        return self.stream(self._fleet.download(device, download))

    def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """See Fleet."""
        return self.stream(self._fleet.upload(device, header, pieces))

    async def exchange(self, device: str, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        """See Fleet."""
        return await self.call(self._fleet.exchange(device, request))

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """See Fleet."""
        return await self.call(self._fleet.report(device, report))

    async def call(self, work: Coroutine[object, object, T]) -> T:
        """Run a call and return its result. Raises Unavailable if the connection breaks first."""
        task = self._begin(work)
        try:
            await asyncio.wait({task})
            return self._outcome(task)
        finally:
            await _end(task)

    async def stream(self, items: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yield the items of a streaming call. Raises Unavailable if the connection breaks first."""
        queue: asyncio.Queue[T | None] = asyncio.Queue()

        async def serve() -> None:
            async for item in items:
                queue.put_nowait(item)

        task = self._begin(serve())
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (item := await queue.get()) is not None:
                yield item
            self._outcome(task)
        finally:
            await _end(task)

    def _begin(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        if not self._is_up:
            work.close()
            raise Unavailable("the simulated coordinator is down", code="FN-0848")
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def _outcome(self, task: asyncio.Task[T]) -> T:
        if task.cancelled():
            raise Unavailable("the simulated connection broke", code="FN-0848")
        return task.result()


async def _end(task: asyncio.Task[T]) -> None:
    if task.done():
        return
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

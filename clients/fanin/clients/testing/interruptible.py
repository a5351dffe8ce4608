"""A coordinator whose connections can all break at once, as those of a process that ends."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import TypeVar

from fanin.clients.testing.loopback import Fleet
from fanin.protos import messages as m
from fanin.protos.errors import Unavailable

T = TypeVar("T")


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

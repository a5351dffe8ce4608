"""A coordinator as an unreliable device meets it, and as one that ends meets its callers."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from fanin.clients.testing.habits import Habits, Said, tell
from fanin.clients.testing.loopback import Fleet
from fanin.protos import messages as m
from fanin.protos.errors import Conflict, InvalidInput, NotFound, Unavailable

T = TypeVar("T")
Note = Callable[[str, str], None]
"""Takes who, and what became of it."""


class Served:
    """A coordinator's calls, each served by a task of its own, as a server does: they all end with ``hang_up``, each
    with its caller."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tasks: dict[asyncio.Task[object], None] = {}  # in their order, for the same log each time
        self._is_up = True

    async def hang_up(self) -> None:
        """Break all lines, and return when nothing is under way."""
        self._is_up = False
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        """See Fleet."""
        return await self.call(self._fleet.check_in(device, check_in))

    async def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        """See Fleet."""
        async for data in self.stream(self._fleet.download(device, download)):
            yield data

    async def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """See Fleet."""
        async for reply in self.stream(self._fleet.upload(device, header, pieces)):
            yield reply

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """See Fleet."""
        return await self.call(self._fleet.report(device, report))

    async def call(self, work: Coroutine[object, object, T]) -> T:
        """The outcome of a call. Raises Unavailable if the line breaks first."""
        task = self._begin(work)
        try:
            await asyncio.wait({task})
            return self._outcome(task)
        finally:
            await _end(task)

    async def stream(self, found: AsyncIterator[T]) -> AsyncIterator[T]:
        """What a call streams. Raises Unavailable if the line breaks first."""
        queue: asyncio.Queue[T | None] = asyncio.Queue()

        async def serve() -> None:
            async for one in found:
                queue.put_nowait(one)

        task = self._begin(serve())
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (one := await queue.get()) is not None:
                yield one
            self._outcome(task)
        finally:
            await _end(task)

    def _begin(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        if not self._is_up:
            work.close()
            raise Unavailable("nobody serves")
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def _outcome(self, task: asyncio.Task[T]) -> T:
        if task.cancelled():
            raise Unavailable("the line broke")
        return task.result()


@asynccontextmanager
async def _closed_after(stream: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """A stream that does not outlive its reader, whatever becomes of that."""
    try:
        yield stream
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


async def _end(task: asyncio.Task[T]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@dataclass(slots=True, kw_only=True)
class UnreliableLine:
    """The coordinator that one device with these habits meets: calls break, and Updates are lied about.

    ``overheard`` has the newest Assignment of each device that shares it.
    """

    fleet: Fleet
    habits: Habits
    rng: random.Random
    overheard: dict[str, str] = field(default_factory=dict)
    note: Note = lambda who, what: None
    _earlier: m.UpdateHeader | None = None

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        """See Fleet."""
        cut = self._cut()
        self._break(device, "check-in", cut, "before")
        answer = await self.fleet.check_in(device, check_in)
        if isinstance(answer, m.Assigned):
            self.overheard[device] = answer.assignment.assignment_id
        self._break(device, "check-in", cut, "after")
        return answer

    async def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        """See Fleet."""
        cut = self._cut()
        self._break(device, "download", cut, "before")
        async with _closed_after(self.fleet.download(device, download)) as stream:
            async for data in stream:
                self._break(device, "download", cut, "within")
                yield data
        self._break(device, "download", cut, "after")

    async def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """See Fleet."""
        said = self._say(device, header)
        cut = self._cut()
        self._break(device, "upload", cut, "before")
        end = self.rng.randrange(header.payload.size_bytes + 1) if cut == "within" else header.payload.size_bytes
        try:
            sent = self._sent(device, said, pieces, end)
            async with _closed_after(self.fleet.upload(device, said.header, sent)) as replies:
                async for reply in replies:
                    if reply.update_state is m.UpdateState.ACCEPTED:
                        self._earlier = said.header
                        self._break(device, "upload", cut, "after")
                    yield reply
        except (InvalidInput, NotFound, Conflict) as exc:
            self.note(device, f"is refused: {type(exc).__name__}: {exc}")
            raise

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """See Fleet."""
        cut = self._cut()
        self._break(device, "report", cut, "before")
        reply = await self.fleet.report(device, report)
        self._break(device, "report", cut, "after")
        return reply

    async def _sent(self, device: str, said: Said, pieces: AsyncIterator[m.Piece], end: int) -> AsyncIterator[m.Piece]:
        async for piece in pieces:
            await asyncio.sleep(self.rng.uniform(0.0, self.habits.piece_s))
            if piece.offset + len(piece.data) > end:
                self._break(device, "upload", "within", "within")
            yield said.piece(piece)

    def _say(self, device: str, header: m.UpdateHeader) -> Said:
        if self.rng.random() >= self.habits.lie:
            return Said(header=header)
        lie = self.rng.choice(self.habits.lies)
        others = [found for name, found in self.overheard.items() if name != device]
        self.note(device, f"lies: {lie.value}")
        return tell(lie, header, self._earlier, self.rng.choice(others) if others else "")

    def _cut(self) -> str:
        return self.rng.choice(("before", "within", "after")) if self.rng.random() < self.habits.cut else ""

    def _break(self, device: str, what: str, cut: str, when: str) -> None:
        if cut == when:
            self.note(device, f"the line broke: {what}, {when}")
            raise Unavailable(f"the line broke: {what}, {when}")

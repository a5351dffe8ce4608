"""A coordinator from the view of an unreliable device: calls break, and Updates are false."""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from fanin.protos import messages as m
from fanin.protos.errors import Conflict, InvalidInput, NotFound, Unavailable
from fanin.simulation.devices.availability import Rate, seconds_of
from fanin.simulation.devices.habits import FalseUpdate, Habits, falsify
from fanin.simulation.federation.loopback import Fleet

T = TypeVar("T")
Note = Callable[[str, str], None]
"""Logs an event: (who, text)."""


@dataclass(slots=True, kw_only=True)
class UnreliableFleet:
    """The coordinator of one device with these habits: its calls break, and its Updates may be false.

    ``overheard`` maps each device that shares it to the id of its newest Assignment.
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
                if isinstance(rate := self.habits.bytes_down_per_s, Rate) or math.isfinite(rate):
                    await asyncio.sleep(seconds_of(len(data), rate, asyncio.get_running_loop().time()))
                yield data
        self._break(device, "download", cut, "after")

    async def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """See Fleet."""
        if self.habits.attack is not None:
            header = self.habits.attack.header(header)
        update = self._update(device, header)
        cut = self._cut()
        self._break(device, "upload", cut, "before")
        end = self.rng.randrange(header.payload.size_bytes + 1) if cut == "within" else header.payload.size_bytes
        try:
            sent_pieces = self._sent_pieces(device, update, pieces, end)
            async with _closed_after(self.fleet.upload(device, update.header, sent_pieces)) as replies:
                async for reply in replies:
                    if reply.update_state is m.UpdateState.ACCEPTED:
                        self._earlier = update.header
                        self._break(device, "upload", cut, "after")
                    yield reply
        except (InvalidInput, NotFound, Conflict) as exc:
            self.note(device, f"is refused: {type(exc).__name__}: {exc}")
            raise

    async def exchange(self, device: str, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        """See Fleet."""
        cut = self._cut()
        self._break(device, "exchange", cut, "before")
        outcome = await self.fleet.exchange(device, request)
        self._break(device, "exchange", cut, "after")
        return outcome

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """See Fleet. Reports of progress do not break: their number depends on the durations of the trainings."""
        if report.progress is not None:
            return await self.fleet.report(device, report)
        cut = self._cut()
        self._break(device, "report", cut, "before")
        reply = await self.fleet.report(device, report)
        self._break(device, "report", cut, "after")
        return reply

    async def _sent_pieces(
        self, device: str, update: FalseUpdate, pieces: AsyncIterator[m.Piece], end: int
    ) -> AsyncIterator[m.Piece]:
        async for piece in pieces:
            now_s = asyncio.get_running_loop().time()
            sent_s = seconds_of(len(piece.data), self.habits.bytes_up_per_s, now_s)
            await asyncio.sleep(self.rng.uniform(0.0, self.habits.piece_s) + sent_s)
            if piece.offset + len(piece.data) > end:
                self._break(device, "upload", "within", "within")
            yield update.piece(piece)

    def _update(self, device: str, header: m.UpdateHeader) -> FalseUpdate:
        if self.rng.random() >= self.habits.lie:
            return FalseUpdate(header=header)
        lie = self.rng.choice(self.habits.lies)
        others = [assignment_id for name, assignment_id in self.overheard.items() if name != device]
        self.note(device, f"lies: {lie.value}")
        return falsify(lie, header, self._earlier, self.rng.choice(others) if others else "")

    def _cut(self) -> str:
        return self.rng.choice(("before", "within", "after")) if self.rng.random() < self.habits.cut else ""

    def _break(self, device: str, what: str, cut: str, when: str) -> None:
        if cut == when:
            self.note(device, f"connection broke: {what}, {when}")
            raise Unavailable(f"the simulated connection broke: {what}, {when}", code="FN-0848")


@asynccontextmanager
async def _closed_after(stream: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close a stream when its reader ends, even by an exception."""
    try:
        yield stream
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()

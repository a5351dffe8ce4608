"""A device's line to a coordinator in the same process."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Protocol

from fanin.protos import messages as m
from fanin.protos.errors import Unavailable

PIECE_BYTES: Final = 4096


class Fleet(Protocol):
    """What a coordinator does for devices; ``fanin.server.fleet.coordinator.Coordinator`` is one."""

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        """Answer with work, or when to come back."""
        ...

    def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        """A Chunk from an offset on."""
        ...

    def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """Take an Update."""
        ...

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """What became of an Update."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackTransport:
    """One device's line to a coordinator in the same process.

    ``latency_s`` passes before each call, on the event loop's clock.
    """

    fleet: Fleet
    device: str
    latency_s: float = 0.0

    async def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        """Ask for work."""
        await asyncio.sleep(self.latency_s)
        return await self.fleet.check_in(self.device, check_in)

    async def download(self, assignment_id: str, sha256: str) -> bytes:
        """A whole Chunk."""
        await asyncio.sleep(self.latency_s)
        wanted = m.Download(assignment_id=assignment_id, sha256=sha256, offset=0)
        return b"".join([data async for data in self.fleet.download(self.device, wanted)])

    async def upload(self, header: m.UpdateHeader, payload: bytes) -> m.UploadReply:
        """Send an Update from where the coordinator wants it; the last reply."""
        await asyncio.sleep(self.latency_s)
        offset: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def pieces() -> AsyncIterator[m.Piece]:
            for start in range(await offset, len(payload), PIECE_BYTES):
                yield m.Piece(offset=start, data=payload[start : start + PIECE_BYTES])

        last = None
        async for reply in self.fleet.upload(self.device, header, pieces()):
            if last is None:
                offset.set_result(reply.received_bytes)
            last = reply
        if last is None:
            raise Unavailable("loopback: the upload ended without a reply")
        return last

    async def report(self, report: m.Report) -> m.UploadReply:
        """Give up an Assignment, or ask."""
        await asyncio.sleep(self.latency_s)
        return await self.fleet.report(self.device, report)

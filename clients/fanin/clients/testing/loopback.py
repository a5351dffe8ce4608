"""The calls of a device to a coordinator in the same process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from fanin.protos import messages as m
from fanin.protos.errors import Unavailable

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

    async def report(self, report: m.Report) -> m.UploadReply:
        """See Transport."""
        await asyncio.sleep(self.latency_s)
        return await self.fleet.report(self.device, report)

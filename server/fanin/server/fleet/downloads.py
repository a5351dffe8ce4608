"""Downloads: the bytes of Chunks, in pieces.

A device may download the Chunks of its Assignment, or those of a Publication. This is checked before every Chunk,
because the Round of the Assignment may have ended in the meantime.
"""

from collections.abc import AsyncIterator
from typing import Final

from fanin.protos import messages as m
from fanin.protos.chunks import MAX_CHUNK_BYTES
from fanin.protos.errors import Corrupted, NotFound
from fanin.server.access.delay_budget import DelayBudget
from fanin.server.access.limits import Limits
from fanin.server.access.permits import Permits
from fanin.server.fleet.observer import FleetObserver, Unobserved
from fanin.server.runs.driving.drivers import Drivers, run_of
from fanin.server.storage.stores import Files

PIECE_BYTES: Final = 256 << 10
"""Bytes of one DownloadPiece: small enough that a broken connection loses little, large enough for full speed."""


class Downloads:
    """The downloads of all devices."""

    def __init__(self, drivers: Drivers, files: Files, limits: Limits) -> None:
        self._drivers = drivers
        self.observer: FleetObserver = Unobserved()
        self._files = files
        self._stall_s = limits.stall_s
        self._permits = Permits()

    async def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        """Yield the bytes of a Chunk from an offset on, then those of further Chunks, with an empty piece between two.

        Args:
            device: The device's id.
            download: The digests, the offset, and the id of the Assignment or Publication that permits them.

        Raises:
            NotFound: The device may not download a Chunk.
            Corrupted: A Chunk is damaged or missing here.
            Unavailable: The device reads too slowly, or the Run waits for its operator.
        """
        budget, offset = DelayBudget(self._stall_s), download.offset
        with self._permits.one() as permit:
            for number, sha256 in enumerate((download.sha256, *download.more_sha256)):
                if number:
                    # The empty piece marks the end of a Chunk, so that a Chunk cut short on disk is noticed.
                    yield b""
                await permit.get()
                await self._check(device, download.assignment_id, sha256)
                size_bytes, data = 0, b""
                while len(data) == size_bytes:
                    # A complete Chunk takes one thread switch. Without a permit there may be many: then only a piece.
                    size_bytes = MAX_CHUNK_BYTES if permit.is_held else PIECE_BYTES
                    data = await self._read(sha256, offset, size_bytes)
                    for start in range(0, len(data), PIECE_BYTES):
                        # Before the yield: a device may end the call once it has the last piece.
                        self.observer.sent(min(PIECE_BYTES, len(data) - start))
                        with permit.lent(), budget.writing():
                            yield data[start : start + PIECE_BYTES]
                        budget.gain(PIECE_BYTES)
                    offset += len(data)
                offset = 0

    async def _check(self, device: str, download_id: str, sha256: str) -> None:
        publications = self._drivers.find_publications(run_of(download_id))
        published = None if publications is None else await publications.chunks(download_id, device)
        if published is None:
            driver, _ = self._drivers.of_assignment(download_id, device)
            is_permitted = driver.intake.may_fetch(sha256)
        else:
            is_permitted = sha256 in published
        if not is_permitted:
            raise NotFound(f"chunk {sha256[:16]!r}: not one that this assignment needs; check in again", code="FN-0613")

    async def _read(self, sha256: str, offset: int, size_bytes: int) -> bytes:
        try:
            return await self._files.run(self._files.blobs.read, sha256, offset, size_bytes)
        except NotFound as exc:
            # Not NotFound: the device would check in, receive the same Assignment and download again, without end.
            raise Corrupted(
                f"{exc}, but an assignment needs it; publish its bundle or version again", code="FN-0520"
            ) from exc

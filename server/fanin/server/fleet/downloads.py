"""What a device downloads: the bytes of Chunks, in pieces.

A device may download the Chunks of its Assignment, or those of a Publication. This is checked before every Chunk: the
Assignment may have come to nothing in the meantime.
"""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

from fanin.protos import messages as m
from fanin.protos.errors import Corrupted, NotFound
from fanin.server.access.patience import Patience
from fanin.server.rounds.effects import Tools
from fanin.server.runs.driver import RunDriver

PIECE_BYTES: Final = 256 << 10
"""Bytes of one DownloadPiece: small enough that a broken line loses little, large enough for full speed."""


async def pieces_of(
    device: str, download: m.Download, driver_of: Callable[[str], RunDriver], tools: Tools, stall_s: float
) -> AsyncIterator[bytes]:
    """Yield the bytes of a Chunk from an offset on, then those of more Chunks, with an empty piece between two.

    Args:
        device: The device that downloads.
        download: What it requests.
        driver_of: The Run of an Assignment's or a Publication's id; raises NotFound.
        tools: The coordinator's blobs and lanes.
        stall_s: Seconds without progress after which the transfer ends.

    Raises:
        NotFound: The device may not download a Chunk.
        Corrupted: A Chunk is damaged or missing here.
    """
    patience, offset = Patience(stall_s), download.offset
    for number, sha256 in enumerate((download.sha256, *download.more_sha256)):
        if number:
            # Where one ends and the next begins: a Chunk that was cut on disk must not run into its neighbour.
            yield b""
        await _check(device, download.assignment_id, sha256, driver_of)
        data = await _chunk(sha256, offset, tools)
        offset = 0
        for start in range(0, len(data), PIECE_BYTES):
            with patience.writing():
                yield data[start : start + PIECE_BYTES]
            patience.gain(PIECE_BYTES)


async def _check(device: str, download_id: str, sha256: str, driver_of: Callable[[str], RunDriver]) -> None:
    intake = driver_of(download_id).intake
    published = await intake.publications.chunks(download_id, device)
    if published is None:
        intake.check_assignment(download_id, device)
    if not (intake.may_fetch(sha256) if published is None else sha256 in published):
        raise NotFound(f"chunk {sha256[:16]!r}: not one that this assignment needs; check in again")


async def _chunk(sha256: str, offset: int, tools: Tools) -> bytes:
    try:
        return await tools.disk_lane(partial(tools.blobs.read, sha256, offset))
    except NotFound as exc:
        # A device that receives "not found" checks in, gets the same Assignment and downloads again, without end.
        raise Corrupted(f"{exc}, but an assignment needs it; publish its bundle or version again") from exc

"""The device side of the coordinator: check in, download, upload, report.

Each method belongs to one of the modules of this folder. None of them uses gRPC. ``service`` maps calls to these
methods, and tests and simulations call them directly.
"""

import random
from collections.abc import AsyncIterator

from fanin.protos import messages as m
from fanin.server.access.limits import Limits
from fanin.server.fleet.checkins import CheckIns
from fanin.server.fleet.downloads import Downloads
from fanin.server.fleet.uploads import Uploads
from fanin.server.runs.catalog import Runs
from fanin.server.storage.stores import Files, Stores


class Coordinator:
    """The device side of a coordinator.

    All methods may be repeated after any failure, over restarts of both sides.

    Args:
        runs: The Runs of the coordinator.
        stores: The record. Its number of enrolled devices determines how check-ins are spread over time.
        files: Blobs to download, and the spool for uploads.
        limits: The largest load to accept.
        rng: Chooses among devices when there are fewer places than devices.
    """

    def __init__(self, runs: Runs, stores: Stores, files: Files, limits: Limits, rng: random.Random) -> None:
        self._checkins = CheckIns(runs, stores.devices, limits, rng)
        self._downloads = Downloads(runs, files, limits)
        self._uploads = Uploads(runs, files, limits)
        runs.subscribe(self._checkins.on_change)
        runs.subscribe(self._uploads.on_change)

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        """Wait until there is work for a device, and return its Assignment.

        Args:
            device: The device's id.
            check_in: Its capabilities, the Version that it serves, and the seconds that it is willing to wait.

        Returns:
            Assigned with an Assignment, Wait with a retry window, or Rejected with a reason. Wait and Rejected carry
            the newest Version if the device serves an older one.
        """
        return await self._checkins.check_in(device, check_in)

    def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        """Yield the bytes of a Chunk from an offset on, then those of further Chunks.

        Args:
            device: The device's id.
            download: The digests, the offset, and the id of the Assignment or Publication that permits them.

        Raises:
            NotFound: The device may not download a Chunk.
            Corrupted: A Chunk is damaged or missing here.
            Unavailable: The device reads too slowly, or the Run waits for its operator.
        """
        return self._downloads.download(device, download)

    def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """Receive a device's Update and commit it to the open Round.

        The first reply reports how many bytes the coordinator has already, so send pieces from that offset on. One
        reply follows each stored Chunk. The last reply reports ACCEPTED or DISCARDED. An ACCEPTED Update is durable
        and in exactly one Round; repeating its upload returns ACCEPTED again.

        A second upload of the same device ends the first one.

        Args:
            device: The device's id.
            header: The Update's header, with the size and the digests of the payload.
            pieces: The payload from the reported offset on. Each piece starts where the one before it ended.

        Yields:
            The state of the Round, the state of the Update, and the number of bytes received.

        Raises:
            InvalidUpdate: The header does not match its Assignment, or bytes do not match the header. Nothing is kept.
            NotFound: The Assignment was not issued to this device.
            StorageFull: The disk is full. The bytes stored so far are kept.
            Unavailable: Too many uploads are under way, this one is too slow, or the Run is paused. The bytes stored so
                far are kept; upload again later.
        """
        return self._uploads.upload(device, header, pieces)

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """Return the state of a device's Update.

        A report of a failure frees the device's place for another one. A report of progress keeps it; of its reply only
        the state of the Round counts.

        Raises:
            NotFound: The Assignment was not issued to this device.
            Unavailable: The Run is paused between two Rounds, or waits for its operator.
        """
        return await self._uploads.report(device, report)

    def refuse(self, device: str, reason: str) -> None:
        """Free the place of a device that sent something else than an Update, with the error of its upload."""
        self._uploads.refuse(device, reason)

    async def stop(self) -> None:
        """Answer all waiting check-ins. The devices come back when a coordinator serves again."""
        self._checkins.stop()

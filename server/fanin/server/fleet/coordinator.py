"""The device side of the coordinator: check in, exchange messages, download, upload, report.

Each call is a method of one of the modules of this folder. None of them uses gRPC. ``service`` maps calls to these
methods, and tests and simulations call them directly.
"""

import random

from fanin.protos.errors import FaninError, coded
from fanin.server.access.limits import Limits
from fanin.server.fleet.activity import Activity
from fanin.server.fleet.checkins import CheckIns
from fanin.server.fleet.downloads import Downloads
from fanin.server.fleet.exchanges import Exchanges
from fanin.server.fleet.observer import FleetObserver
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

    Attributes:
        check_in: ``CheckIns.check_in``.
        stop: ``CheckIns.stop``.
        download: ``Downloads.download``.
        upload: ``Uploads.upload``.
        report: ``Uploads.report``.
        refuse: ``Uploads.refuse``.
        exchange: ``Exchanges.exchange``.
        uploads: The uploads under way.
        activity: The last check-ins of devices.
    """

    def __init__(self, runs: Runs, stores: Stores, files: Files, limits: Limits, rng: random.Random) -> None:
        self.activity = Activity(stores.devices, stores.wall)
        checkins = CheckIns(runs, stores.devices, limits, rng, self.activity)
        downloads = Downloads(runs.drivers, files, limits)
        self.uploads = uploads = Uploads(runs.drivers, files, limits, self.activity)
        exchanges = Exchanges(runs.drivers, limits, self.activity)
        self._observed = checkins, downloads, uploads, exchanges
        self.check_in, self.stop = checkins.check_in, checkins.stop
        self.download = downloads.download
        self.upload, self.report, self.refuse = uploads.upload, uploads.report, uploads.refuse
        runs.drivers.uploading = uploads.progress
        self.exchange = exchanges.exchange
        self._end_wait, self._runs = checkins.end, runs
        runs.subscribe(checkins.on_change)
        runs.subscribe(uploads.on_change)

    def observe(self, observer: FleetObserver) -> None:
        """Let an observer see the outcome of each call. Call it before the coordinator serves."""
        for part in self._observed:
            part.observer = observer

    def exclude(self, device: str, error: FaninError) -> None:
        """End the wait of a device for work, and free the place of its Assignment. Its other calls are the caller's.

        Args:
            device: The device, whose later calls are refused already.
            error: The error of its check-in.
        """
        self._end_wait(device, error)
        # No rejection of the device: it would remain its last one after a ban is lifted.
        for driver in self._runs.running():
            driver.updates.refuse_any(device, coded(error))

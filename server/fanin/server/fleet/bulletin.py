"""The announcement of newer Versions to devices without work.

Every answer without work names the newest Version of the Run that the device serves, if the device has an older one.
While the Run opens Rounds this is soon enough, because the next Version follows anyway. When the Run rests, no work
will end the wait. So a device with an older Version is answered at once, and parked check-ins are answered when the
last Version is published. These devices download within a window that is as long as all their downloads take. A device
that awaits the end of its Run hears of it in the same way.
"""

from typing import Final

from fanin.protos import messages as m
from fanin.server.fleet.retries import MAX_WINDOW_S, MIN_WINDOW_S, RETRY_PER_S
from fanin.server.runs.catalog import Runs
from fanin.server.runs.publications import Publications

REFRESH_BYTES_PER_S: Final = 100e6
"""Bandwidth for the downloads of a new Version by all devices together: most of a gigabit per second."""


def refresh_window(num_devices: int, size_bytes: int) -> float:
    """Return the seconds over which the downloads of ``num_devices`` devices, ``size_bytes`` each, are spread."""
    longest = num_devices * max(1.0 / RETRY_PER_S, size_bytes / REFRESH_BYTES_PER_S)
    return min(max(longest, MIN_WINDOW_S), MAX_WINDOW_S)


class Bulletin:
    """The newest Versions of all Runs, as devices hear of them."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        # By Run that rests: the number of the newest Version that was announced to parked check-ins.
        self._announced: dict[str, int] = {}

    def newer(self, device: str, check_in: m.CheckIn) -> m.Publication | None:
        """Return the newest Version for a device, or None if the device has it or serves no Version."""
        publications = self._behind(check_in)
        return None if publications is None else publications.publish(device)

    def finished(self, check_in: m.CheckIn) -> m.Training | None:
        """Return the settings of training of the Run whose last Version a device serves, if the device awaits them.

        None while the Run may publish another Version, and for a device that has an older one.
        """
        served = check_in.served
        if served is None or not check_in.awaits_end:
            return None
        publications = self._runs.find_publications(served.run_id)
        if publications is None or publications.is_newer(served):
            return None
        return publications.training if publications.view.state is m.RunState.FINISHED else None

    def due(self, check_in: m.CheckIn, num_devices: int) -> m.Wait | None:
        """Return the answer for a device that hears of a Run that rests, or None to let it wait for work.

        That is a device with an older Version, or one that awaits the end of the Run.

        The caller adds the Version and the settings. About ``num_devices`` devices are answered at the same time.
        """
        if self.finished(check_in) is not None:
            return m.Wait(retry_min_s=0.0, retry_max_s=refresh_window(num_devices, 0))
        publications = self._behind(check_in)
        if publications is None or publications.view.state is m.RunState.RUNNING:
            return None
        size_bytes = publications.newest.parameters.size_bytes
        return m.Wait(retry_min_s=0.0, retry_max_s=refresh_window(num_devices, size_bytes))

    def has_changed(self) -> bool:
        """Return whether a Run rests with a Version that parked check-ins have not heard of. True once for each."""
        resting = {
            publications.view.run_id: publications.newest.number
            for publications in self._runs.publications()
            if publications.view.state is not m.RunState.RUNNING
        }
        has_changed = any(self._announced.get(run_id, -1) < number for run_id, number in resting.items())
        self._announced = resting
        return has_changed

    def _behind(self, check_in: m.CheckIn) -> Publications | None:
        """Return the Versions of the Run whose newest one is newer than the device's, or None without such a Run.

        That is the Run that the device serves. If that Run is unknown here, it is the last Run that suits the device.
        """
        served = check_in.served
        if served is None:
            return None
        known = self._runs.find_publications(served.run_id)
        suitable = (
            publications
            for publications in ((known,) if known else reversed(self._runs.publications()))
            if not publications.refusal(check_in.capabilities)
        )
        publications = next(suitable, None)
        return publications if publications is not None and publications.is_newer(served) else None

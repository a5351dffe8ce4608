"""Which devices without work hear of a newer Version, and when.

Every answer without work names the newest Version of the Run that the device serves, if the device has an older one.
While the Run opens Rounds, that is soon enough: the next Version follows anyway. When it rests, no work will end the
wait, so a device that is behind is answered at once, and those that wait are answered when the last Version is there.
They refresh within a window that is as long as the downloads of all of them take.
"""

from typing import Final

from fanin.protos import messages as m
from fanin.protos.control import RunState
from fanin.server.fleet.selection import MAX_WINDOW_S, MIN_WINDOW_S, RETRY_PER_S
from fanin.server.runs.catalog import Runs
from fanin.server.runs.driver import RunDriver

REFRESH_BYTES_PER_S: Final = 100e6
"""What refreshing devices may download together: a line of a gigabit a second, and not all of it."""


def refresh_window(num_devices: int, size_bytes: int) -> float:
    """Seconds within which ``num_devices`` devices download ``size_bytes`` each, without coming all at once."""
    longest = num_devices * max(1.0 / RETRY_PER_S, size_bytes / REFRESH_BYTES_PER_S)
    return min(max(longest, MIN_WINDOW_S), MAX_WINDOW_S)


class Bulletin:
    """What devices are told of the newest Versions of all Runs."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        # The newest Version of each Run that rests, once those that wait were told.
        self._told: dict[str, int] = {}

    def newer(self, device: str, check_in: m.CheckIn) -> m.Publication | None:
        """The newest Version for a device, None if it has that or serves none."""
        driver = self._behind(check_in)
        return None if driver is None else driver.intake.publications.publish(device)

    def due(self, check_in: m.CheckIn, num_devices: int) -> m.Wait | None:
        """The answer for a device that is behind a Run that rests, but for the Version; None: let it wait for work.

        ``num_devices`` may be told at about the same time.
        """
        driver = self._behind(check_in)
        if driver is None or driver.run.state is RunState.RUNNING:
            return None
        size_bytes = driver.intake.publications.newest.parameters.size_bytes
        return m.Wait(retry_min_s=0.0, retry_max_s=refresh_window(num_devices, size_bytes))

    def has_changed(self) -> bool:
        """Whether a Run has come to rest with a Version that those who wait were not told of; True once for each."""
        resting = {
            driver.run_id: driver.intake.publications.newest.number
            for driver in self._runs.drivers()
            if driver.run.state is not RunState.RUNNING
        }
        has_changed = any(self._told.get(run_id, -1) < number for run_id, number in resting.items())
        self._told = resting
        return has_changed

    def _behind(self, check_in: m.CheckIn) -> RunDriver | None:
        """The Run whose newest Version is news for a device; None if there is none.

        That is the Run that the device serves. For a device without a Version it is the last one that suits it.
        """
        served = check_in.served
        if served is None:
            return None
        known = self._runs.find(served.run_id)
        suitable = (
            driver
            for driver in ((known,) if known else reversed(self._runs.drivers()))
            if not driver.intake.refusal(check_in.capabilities)
        )
        driver = next(suitable, None)
        return driver if driver is not None and driver.intake.publications.is_newer(served) else None

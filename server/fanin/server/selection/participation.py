"""The last Round in which each device took part, in memory, for selection policies."""

from collections import OrderedDict
from typing import Final

MAX_DEVICES: Final = 100_000
"""Devices in the table, about 20 MB. A device that leaves it took part longer ago than all others in it."""


class Participation:
    """The last Rounds of the devices of one Run.

    Devices that took part longer ago than the last ``max_devices`` devices count as new ones. A policy that orders
    devices by their last Round therefore orders them as before.
    """

    def __init__(self, max_devices: int = MAX_DEVICES) -> None:
        self._max_devices = max_devices
        self._last: OrderedDict[str, int] = OrderedDict()

    @property
    def is_full(self) -> bool:
        """Whether a further device removes the one that took part longest ago."""
        return len(self._last) >= self._max_devices

    def note(self, device: str, round_number: int) -> None:
        """Note that a device takes part in a Round."""
        self._last[device] = max(round_number, self.last_round(device))
        self._last.move_to_end(device)
        if len(self._last) > self._max_devices:
            self._last.popitem(last=False)

    def recall(self, device: str, round_number: int) -> None:
        """Add a device that took part before all others of the table. It changes nothing in a full table."""
        if device not in self._last and not self.is_full:
            self._last[device] = round_number
            self._last.move_to_end(device, last=False)

    def last_round(self, device: str) -> int:
        """Return the number of the last Round in which a device took part, 0 for none."""
        return self._last.get(device, 0)

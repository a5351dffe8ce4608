"""Devices that are online twice: two processes have one key, as after a copy of a state folder.

A device has one check-in at a time, and a second one ends the first. A device that lost its connection does this once.
Two processes do it again and again, because each comes back after a few seconds. Pure: the caller passes the time.
"""

from collections import OrderedDict
from typing import Final

MIN_REPLACED: Final = 3
"""Check-ins of a device within ``WINDOW_S`` that another one of it ended. A bad network hardly breaks so often."""
WINDOW_S: Final = 60.0
MAX_DEVICES: Final = 10_000
"""Devices in the table. A device that leaves it had its first such check-in before all others."""


class Doubles:
    """The check-ins that another one of the same device ended."""

    def __init__(self) -> None:
        # By device: the time of the first such check-in of a window, and their number in it.
        self._replaced: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def note(self, device: str, now: float) -> bool:
        """Note that a check-in ended an earlier one of its device. Return whether the device is online twice."""
        since, num = self._replaced.get(device, (now, 0))
        if now - since > WINDOW_S:
            self._replaced.pop(device)
            since, num = now, 0
        self._replaced[device] = since, num + 1
        if len(self._replaced) > MAX_DEVICES:
            self._replaced.popitem(last=False)
        return num + 1 >= MIN_REPLACED

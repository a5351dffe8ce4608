"""The standing of devices in one Run: pauses after give-ups and refused Updates, and who is selected last.

The table is in memory: a restart forgets it, which costs at most the Rounds that taught it. An accepted Update clears a
device. Pure: the caller passes the time.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

FREE_GIVE_UPS: Final = 2
"""Number of times that a device may give up in a row and return at once. The cause may have been temporary."""
FIRST_PAUSE_S: Final = 10.0
"""Seconds until a device receives an Assignment again after the first fault that is not free. Each further one doubles
them."""
MAX_PAUSE_S: Final = 300.0
"""Longest pause in seconds. A Round with a long deadline may need this device, and its trouble may be over."""
FIRST_LAST_S: Final = 600.0
"""Seconds for which a device is selected last after its first fault that is not free. Each further one doubles them."""
MAX_LAST_S: Final = 86_400.0
MAX_DEVICES: Final = 100_000
"""Devices in the table, about 20 MB. A device that leaves it had its last fault longer ago than all others in it."""


@dataclass(frozen=True, slots=True)
class _Faults:
    """The consecutive faults of a device, and until when it pauses and is selected last."""

    count: int
    returns_at: float
    last_until: float


class Standing:
    """The faults of the devices of one Run, since the last accepted Update of each.

    Args:
        longest_pause_s: No pause is longer than this, the deadline of a Round.
        max_devices: Size of the table.
    """

    def __init__(self, longest_pause_s: float, max_devices: int = MAX_DEVICES) -> None:
        self._max_pause_s = min(longest_pause_s, MAX_PAUSE_S)
        self._max_devices = max_devices
        self._faults: OrderedDict[str, _Faults] = OrderedDict()

    def give_up(self, device: str, now: float) -> None:
        """Note that a device gave up its Assignment. The first times are free."""
        self._add(device, self._count(device) + 1, now, pauses=True)

    def refuse(self, device: str, now: float) -> None:
        """Note that an Update of a device was refused. It would be refused again, so no time is free."""
        self._add(device, max(self._count(device), FREE_GIVE_UPS) + 1, now, pauses=True)

    def miss(self, device: str, now: float) -> None:
        """Note that a device was silent, or had sent no Update at the deadline. It is selected last, and may return."""
        self._add(device, max(self._count(device), FREE_GIVE_UPS) + 1, now, pauses=False)

    def be_late(self, device: str, now: float) -> None:
        """Note that a Round closed with a quorum and without a device at work. The first times in a row are free."""
        self._add(device, self._count(device) + 1, now, pauses=False)

    def clear(self, device: str) -> None:
        """Forget the faults of a device, because its Update was accepted."""
        self._faults.pop(device, None)

    def returns_at(self, device: str) -> float:
        """Return when a device may receive an Assignment again, minus infinity for a device without a pause."""
        faults = self._faults.get(device)
        return -math.inf if faults is None else faults.returns_at

    def is_last(self, device: str, now: float) -> bool:
        """Return whether a device is selected after all others."""
        faults = self._faults.get(device)
        return faults is not None and now < faults.last_until

    def has_cost(self, device: str) -> bool:
        """Return whether a device has a fault that is not free. Time does not change it: only an accepted Update does.

        So a Run whose devices all fail runs out of devices without such a fault.
        """
        return self._count(device) > FREE_GIVE_UPS

    def _count(self, device: str) -> int:
        faults = self._faults.get(device)
        return 0 if faults is None else faults.count

    def _add(self, device: str, count: int, now: float, *, pauses: bool) -> None:
        doublings = min(count - FREE_GIVE_UPS - 1, 30)
        pause_s = last_s = 0.0
        if doublings >= 0:
            pause_s = min(FIRST_PAUSE_S * 2.0**doublings, self._max_pause_s) if pauses else 0.0
            last_s = min(FIRST_LAST_S * 2.0**doublings, MAX_LAST_S)
        self._faults[device] = _Faults(count, now + pause_s, now + last_s)
        self._faults.move_to_end(device)
        if len(self._faults) > self._max_devices:
            self._faults.popitem(last=False)

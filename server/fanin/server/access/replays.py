"""Replay protection: each signed call is served once.

A device signs a time with each call and uses each time once. The table keeps the last few times of each device. The
oldest of them is the device's floor. A call is refused if its time is in the table or is not above the floor. Calls
that overtake each other on the way are served, and each call costs one look-up. This is the anti-replay window of
IPsec (RFC 4303, section 3.4.3), with times in place of sequence numbers.

Memory is bounded. When the table is full, the device with the oldest call leaves it. The last time of that device
raises the common floor. Devices outside of the table must have a time above the common floor. A device whose clock is
slow is refused there once: it sets its clock and signs again, which the sender of a replay cannot do.

The common floor begins at the start of the process, so a restart refuses the calls of the process before it. One hole
remains: a time may be up to ``MAX_EARLY_S`` ahead of the coordinator's clock. Such a call from the last moments of
the old process can be served a second time by the new one.
"""

from collections import OrderedDict
from typing import Final

from fanin.protos.calls import MICROSECONDS
from fanin.protos.errors import Untimely

MAX_DEVICES: Final = 100_000
"""Devices in the table, about 40 MB."""
NUM_TIMES: Final = 4
"""Times remembered for each device. So many concurrent calls of a device may overtake each other."""

Used = tuple[int, ...]
"""The last times of a device, in ascending order. With ``NUM_TIMES`` of them, the first is the device's floor."""


class CallTimes:
    """The times, in microseconds since the Unix epoch, that devices have used."""

    def __init__(self, start_us: int, max_devices: int = MAX_DEVICES) -> None:
        self._floor_us = start_us
        self._max_devices = max_devices
        self._used: OrderedDict[str, Used] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def use(self, device_id: str, time_us: int) -> None:
        """Use a time of a device whose signature was checked. Raises Untimely, and then changes nothing."""
        used = self._used.get(device_id, ())
        floor_us = used[0] if len(used) == NUM_TIMES else self._floor_us
        if time_us <= floor_us or time_us in used:
            behind_s = (max(used, default=floor_us) - time_us) / MICROSECONDS
            raise Untimely(
                f"call: device {device_id} used this time before, or is {behind_s:.1f} s behind its last calls, or "
                "signed it before this coordinator began; expected a later time: a replay, or a clock that was set "
                "back",
                code="FN-0674",
            )
        self._used[device_id] = tuple(sorted((*used, time_us))[-NUM_TIMES:])
        self._used.move_to_end(device_id)
        if len(self._used) > self._max_devices:
            _, evicted = self._used.popitem(last=False)
            self._floor_us = max(self._floor_us, evicted[-1])

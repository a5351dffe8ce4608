"""Which devices at work still answer: the time and the content of the last report of progress of each.

It is kept in memory only. A device that was silent for ``GONE_INTERVALS`` intervals is gone: it was killed, or has lost
its network. All devices of a Run have one interval, so the order of their last reports is the order in which they
become silent, and a report costs O(1). Pure: the caller passes the time.
"""

import math
from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from fanin.protos.messages import TrainingProgress
from fanin.protos.plans import CohortPlan

CALLS_PER_S: Final = 200.0
"""Reports of progress per second that all devices of a Round make together: a fifth of a coordinator's budget."""
INTERVALS_PER_DEADLINE: Final = 60
"""Intervals in a deadline, unless the cohort or the shortest interval needs fewer: a device that dies then costs a
twentieth of the deadline."""
MIN_INTERVAL_S: Final = 1.0
GONE_INTERVALS: Final = 3
"""Silent intervals after which a device is gone. One lost call, or a slow network, is not the end."""


def interval_of(cohort: CohortPlan) -> float:
    """Return the seconds between two reports of progress of a device."""
    return max(cohort.concurrency / CALLS_PER_S, cohort.deadline_s / INTERVALS_PER_DEADLINE, MIN_INTERVAL_S)


class Presence:
    """The devices at work that report progress.

    Args:
        interval_s: Seconds between two reports of a device.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        # By device, in the order of the times: the time of its last report, and the report.
        self._last: OrderedDict[str, tuple[float, TrainingProgress]] = OrderedDict()
        # By device: when its step rose last.
        self._rose_at: dict[str, float] = {}

    def note(self, device: str, now: float, progress: TrainingProgress) -> None:
        """Note a report of a device, or its Assignment."""
        last = self.of(device)
        if last is not None and progress.step > last.step:
            self._rose_at[device] = now
        self._last[device] = now, progress
        self._last.move_to_end(device)

    def end(self, device: str) -> None:
        """Watch a device no longer."""
        self._last.pop(device, None)
        self._rose_at.pop(device, None)

    def progressing(self, now: float) -> tuple[str, ...]:
        """Return the devices whose step has risen lately, or whose training has ended: their Update is on its way."""
        since = now - GONE_INTERVALS * self.interval_s
        return tuple(
            device
            for device, (_, last) in self._last.items()
            if self._rose_at.get(device, -math.inf) >= since or (last.num_steps and last.step == last.num_steps)
        )

    def keep(self, devices: Collection[str]) -> None:
        """Watch only those of these devices that were watched."""
        self._last = OrderedDict((device, last) for device, last in self._last.items() if device in devices)
        self._rose_at = {device: at for device, at in self._rose_at.items() if device in devices}

    def of(self, device: str) -> TrainingProgress | None:
        """Return the last report of a device, None without one."""
        last = self._last.get(device)
        return None if last is None else last[1]

    @property
    def gone_at(self) -> float | None:
        """When the next device is gone, unless it reports before; None without devices."""
        first = next(iter(self._last.values()), None)
        return None if first is None else first[0] + GONE_INTERVALS * self.interval_s

    def pop_gone(self, now: float) -> tuple[str, ...]:
        """Return the devices that were silent for too long, and watch them no longer."""
        gone = []
        while self.gone_at is not None and now >= self.gone_at:
            device, _ = self._last.popitem(last=False)
            self._rose_at.pop(device, None)
            gone.append(device)
        return tuple(gone)

"""The rate of calls of each device: a device that calls too often waits, and slows no other.

Generic cell rate algorithm (ITU-T I.371, annex A): one number a device, the time at which its calls so far would have
been made at the allowed rate. A call that is ahead of it by more than the burst is delayed until it is not. A device
has one delayed call at a time; its other calls are refused, so a device cannot fill the memory with calls that wait.

A call that fails by the device's own error counts as many, so a device that repeats a wrong call is soon slow. A
signature was checked before a call counts, so no peer can slow another device.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import InvalidInput, NotFound, Throttled
from fanin.protos.messages import Principal, PrincipalKind

MAX_DEVICES: Final = 100_000
"""Devices in the table, about 15 MB. A device that leaves it called longer ago than all others in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The calls that a device may make.

    Attributes:
        calls_per_s: Calls a second in the long run. A device that trains for 10 ms a Round needs some 50.
        burst: Calls at once, beyond the rate.
        error_calls: Calls that a call counts as if it ends with InvalidInput or NotFound.
    """

    calls_per_s: float = 100.0
    burst: int = 1_000
    error_calls: int = 50


class CallRates:
    """The calls of all devices.

    Args:
        limits: The limits of each device.
        now: A monotonic clock, in seconds.
        max_devices: Size of the table.
    """

    def __init__(self, limits: CallLimits, now: Callable[[], float], max_devices: int = MAX_DEVICES) -> None:
        self._limits = limits
        self._now = now
        self._max_devices = max_devices
        self._due: OrderedDict[str, float] = OrderedDict()
        self._delayed: set[str] = set()

    @asynccontextmanager
    async def call_of(self, caller: object) -> AsyncIterator[None]:
        """Serve a call within this context: it begins late if its device calls too often.

        Raises:
            Throttled: Another call of the device is delayed already.
        """
        if not isinstance(caller, Principal) or caller.kind is not PrincipalKind.DEVICE:
            yield
            return
        device = caller.id
        if delay_s := self.count(device):
            if device in self._delayed:
                raise Throttled(
                    f"device: it calls more than {self._limits.calls_per_s:g} times a second, or its calls are "
                    f"refused; call again in {delay_s:.1f} s",
                    code="FN-0676",
                )
            self._delayed.add(device)
            try:
                await asyncio.sleep(delay_s)
            finally:
                self._delayed.discard(device)
        try:
            yield
        except (InvalidInput, NotFound):
            self.count(device, self._limits.error_calls - 1)
            raise

    def count(self, device: str, num_calls: int = 1) -> float:
        """Count calls of a device. Return the seconds until it may make them."""
        limits, now = self._limits, self._now()
        due = max(self._due.get(device, now), now) + num_calls / limits.calls_per_s
        self._due[device] = due
        self._due.move_to_end(device)
        if len(self._due) > self._max_devices:
            self._due.popitem(last=False)
        return max(due - now - limits.burst / limits.calls_per_s, 0.0)

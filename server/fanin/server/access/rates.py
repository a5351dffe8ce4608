"""The rate of calls of each device: a device that calls too often waits, and slows no other.

Generic cell rate algorithm (ITU-T I.371, annex A): one number a device, the time at which its calls so far would have
been made at the allowed rate. A call that is ahead of it by more than the burst is delayed until it is not. A device
has one delayed call at a time; its other calls are refused, so a device cannot fill the memory with calls that wait.

A call that fails by the device's own error counts as many, so a device that repeats a wrong call is soon slow. A
signature was checked before a call counts, so no peer can slow another device.

Callers without a valid credential have no identity but the address that they call from (``Sources``). Their refused
calls count by this address alone, after the check of the credential: valid calls from the same address always pass.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final
from urllib.parse import unquote

from fanin.protos.errors import FaninError, InvalidInput, NotFound, Throttled, Unauthenticated
from fanin.protos.messages import Principal, PrincipalKind

LOG = logging.getLogger("fanin.server.access.sources")
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


WRONG_PER_S: Final = 1.0
"""Calls with wrong credentials that one address may make in a second, in the long run."""
WRONG_BURST: Final = 100
"""And at once: a site behind one address whose devices were all removed."""
MAX_SOURCES: Final = 10_000
"""Addresses in the table, about 4 MB."""
MAX_LOGGED: Final = 100
"""Addresses with a line in the log a minute."""
WINDOW_S: Final = 60.0


@dataclass(slots=True)
class RefusedSource:
    """The calls with wrong credentials from one address.

    Attributes:
        source: The address; of IPv6 its network of 64 bits, which is that of one site.
        num_calls: Their number since it is in the table.
        num_slowed: Those that were told to call later.
        last_s: Wall time of the last one.
        code: The code of its error.
    """

    source: str
    num_calls: int = 0
    num_slowed: int = 0
    last_s: float = 0.0
    code: str = ""
    due_s: float = 0.0
    num_in_window: int = 0


class Sources:
    """The addresses that send wrong credentials. The table is bounded: the one that called longest ago leaves it.

    Args:
        now: A monotonic clock, in seconds.
        wall: The clock of the record, in seconds.
        burst: Calls with wrong credentials that an address may make at once.
    """

    def __init__(self, now: Callable[[], float], wall: Callable[[], float], burst: int = WRONG_BURST) -> None:
        self._burst_s = burst / WRONG_PER_S
        self._now = now
        self._wall = wall
        self._sources: OrderedDict[str, RefusedSource] = OrderedDict()
        self._logged: set[str] = set()

    def count(self, source: str, code: str) -> float:
        """Count a call with a wrong credential. Return the seconds until the source may make another, 0 for now."""
        now = self._now()
        one = self._sources.setdefault(source, RefusedSource(source))
        self._sources.move_to_end(source)
        if len(self._sources) > MAX_SOURCES:
            self._sources.popitem(last=False)
        one.due_s = min(max(one.due_s, now) + 1 / WRONG_PER_S, now + self._burst_s + 1 / WRONG_PER_S)
        delay_s = max(one.due_s - now - self._burst_s, 0.0)
        one.num_calls, one.num_slowed = one.num_calls + 1, one.num_slowed + bool(delay_s)
        one.last_s, one.code = self._wall(), code
        one.num_in_window += 1
        if source not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(source)
            # In a context of its own: the line is about no device.
            asyncio.get_running_loop().call_later(WINDOW_S, self._report, one, context=Context())
        return delay_s

    def refuse(self, error: FaninError, peer: str) -> tuple[FaninError, str]:
        """Return what a peer of gRPC is told instead of an error, and where it calls from; "" for a known caller."""
        if not isinstance(error, Unauthenticated):
            return error, ""
        source = source_of(peer)
        delay_s = self.count(source, error.code)
        return wrong_too_often("call", delay_s) if delay_s else error, f" from {source}"

    def newest(self, number: int) -> tuple[RefusedSource, ...]:
        """Return the sources that called last, newest first."""
        return tuple(reversed(self._sources.values()))[:number]

    def _report(self, one: RefusedSource) -> None:
        self._logged.discard(one.source)
        LOG.info(
            "%s: %d calls with wrong credentials within %g s, the last with %s",
            *(one.source, one.num_in_window, WINDOW_S, one.code),
        )
        one.num_in_window = 0


def wrong_too_often(what: str, delay_s: float) -> Throttled:
    """Return the error of a source that sends wrong credentials too often."""
    return Throttled(
        f"{what}: this address sent too many wrong credentials; call again in {math.ceil(delay_s)} s, with a valid one",
        code="FN-1476",
    )


def source_of(peer: str) -> str:
    """Return the address of a peer of gRPC, such as ``ipv4:192.0.2.7:4711`` or ``ipv6:%5B2001:db8::1%5D:4711``."""
    kind, _, rest = peer.partition(":")
    return network_of(unquote(rest).rpartition(":")[0].strip("[]")) if kind in ("ipv4", "ipv6") else kind[:16]


def network_of(host: str) -> str:
    """Return an address, or of IPv6 its network of 64 bits: one site has as many addresses as it wants there."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(address, IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped or ip_network((address, 64), strict=False))
    return str(address)


class CallRates:
    """The calls of all devices.

    Args:
        limits: The limits of each device.
        now: A monotonic clock, in seconds.
        sources: The addresses that send wrong credentials.
        max_devices: Size of the table.
    """

    def __init__(
        self, limits: CallLimits, now: Callable[[], float], sources: Sources, max_devices: int = MAX_DEVICES
    ) -> None:
        self.sources = sources
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

"""What a coordinator notices of devices: their last check-ins and rejections.

Noticing costs no database access. It is kept in memory and recorded in batches, so a coordinator that is killed loses
at most the last ``FLUSH_S`` seconds of it. Memory holds what was noticed since the last batch: one entry a device.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Final

from fanin.protos.errors import FaninError
from fanin.protos.messages import CheckIn
from fanin.server.storage.protocols.devices import DeviceStore
from fanin.server.storage.records import Sighting

LOG: Final = logging.getLogger("fanin.server.fleet.activity")
FLUSH_S: Final = 30.0
BATCH_DEVICES: Final = 1_000
"""Devices in a transaction, some 10 ms: Rounds are recorded between two of them."""
MAX_REJECTION_CHARS: Final = 500
_NOTHING: Final = Sighting()


class Activity:
    """The devices since the last batch.

    Args:
        devices: The record.
        wall: The clock, in seconds since the Unix epoch.
    """

    def __init__(self, devices: DeviceStore, wall: Callable[[], float]) -> None:
        self._devices = devices
        self._wall = wall
        self._noticed: dict[str, Sighting] = {}
        self._task: asyncio.Task[None] | None = None

    def see(self, device: str, check_in: CheckIn) -> None:
        """Notice a check-in."""
        before = self._noticed.get(device, _NOTHING)
        self._noticed[device] = Sighting(
            seen_at=self._wall(),
            runtimes=check_in.capabilities.runtimes,
            fanin_version=check_in.fanin_version,
            condition=check_in.condition,
            rejection=before.rejection,
            rejected_at=before.rejected_at,
        )

    def reject(self, device: str, reason: str) -> None:
        """Notice the rejection of a check-in or an Update."""
        before = self._noticed.get(device, _NOTHING)
        text = reason[:MAX_REJECTION_CHARS]
        self._noticed[device] = replace(before, rejection=text, rejected_at=self._wall())

    async def flush(self) -> None:
        """Record what was noticed. Raises the errors of a store; what was not recorded is tried again."""
        # This many batches: devices that call meanwhile must not keep the loop going.
        for _ in range(math.ceil(len(self._noticed) / BATCH_DEVICES)):
            batch = dict(islice(self._noticed.items(), BATCH_DEVICES))
            await self._devices.note(batch)
            for device, sighting in batch.items():
                latest = self._noticed.pop(device, sighting)
                if latest is not sighting:
                    # It called again meanwhile: to the end, for the next batch.
                    self._noticed[device] = latest

    def start(self) -> None:
        """Start to record."""
        self._task = asyncio.create_task(self._repeat(), name="activity")

    async def stop(self) -> None:
        """Record the rest, and no more after that."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            await self._try()

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self._try()

    async def _try(self) -> None:
        try:
            await self.flush()
        except (FaninError, OSError) as exc:
            LOG.warning("the last check-ins of devices were not recorded, and are tried again: %s", exc)

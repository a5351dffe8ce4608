"""Delay budget: how long a peer may delay a transfer.

A peer that sends or reads almost nothing must not hold its place.

A transfer starts with ``stall_s`` seconds. The time that the peer delays us is subtracted. Each ``LEAST_BYTES_PER_S``
transferred bytes add one second, up to ``stall_s``. So a connection may be silent for ``stall_s`` and must carry that
many bytes per second on average. The time of our own disk does not count: only ``reading`` and ``writing`` measure
time. After a TimeoutError, ``is_spent`` is True if the peer was too slow.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from fanin.protos.errors import Unavailable

LEAST_BYTES_PER_S: Final = 4096
"""One piece of 256 KiB per minute: a tenth of the rate of the slowest mobile connection."""


class DelayBudget:
    """The seconds for which the peer may still delay one transfer. Only the task that serves the transfer uses it."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._remaining_s = stall_s
        self._waiting: asyncio.Timeout | None = None
        self._is_woken = False

    @property
    def is_spent(self) -> bool:
        """Whether the peer delayed the transfer for too long."""
        return self._remaining_s <= 0.0

    def gain(self, num_bytes: int) -> None:
        """Add the time for ``num_bytes`` transferred bytes."""
        self._remaining_s = min(self._remaining_s + num_bytes / LEAST_BYTES_PER_S, self._stall_s)

    def wake(self) -> None:
        """End the current or the next ``reading`` or ``waiting``, because its bytes may no longer be needed."""
        self._is_woken = True
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Limit a wait for the peer's bytes. Raises TimeoutError if the budget is spent, or on ``wake``."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with self._until(max(self._remaining_s, 0.0)):
                yield
        finally:
            self._remaining_s -= clock() - began

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Wait for something that the peer does not control. Raises TimeoutError on ``wake``."""
        async with self._until(None):
            yield

    @asynccontextmanager
    async def _until(self, seconds: float | None) -> AsyncIterator[None]:
        if self._is_woken:
            self._is_woken = False
            raise TimeoutError
        try:
            async with asyncio.timeout(seconds) as self._waiting:
                yield
        except TimeoutError:
            self._is_woken = False
            raise
        finally:
            self._waiting = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Measure a ``yield`` to the peer. The rim ends a call whose peer does not read at all.

        Raises:
            Unavailable: The budget is spent.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        yield
        self._remaining_s -= clock() - began
        if self._remaining_s <= 0.0:
            raise Unavailable(
                f"transfer: the peer read less than 4 KiB/s on average, or nothing for {self._stall_s:g} s; resume the "
                "transfer",
                code="FN-0678",
            )

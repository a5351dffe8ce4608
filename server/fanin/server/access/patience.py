"""How long a peer may keep a transfer waiting: one that sends or reads next to nothing must not hold a place for ever.

A transfer begins with ``stall_s`` seconds. The time that its peer keeps us waiting is taken from them; each
``LEAST_BYTES_PER_S`` that get through give one second back, up to what there was at first. So a line may fall silent
for ``stall_s``, and must on the whole carry so many bytes a second. Our own disk's time is nobody's fault: only
what happens within ``reading`` and ``writing`` counts. Whoever hears a TimeoutError asks ``is_over`` whose it is.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from fanin.protos.errors import Unavailable

LEAST_BYTES_PER_S: Final = 4096
"""A device sends pieces of 256 KiB, so one within a minute: a tenth of what the slowest phone line carries."""


class Patience:
    """One transfer's, for the one task that serves it."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._left_s = stall_s
        self._waiting: asyncio.Timeout | None = None
        self._is_woken = False

    @property
    def is_over(self) -> bool:
        """Whether the peer kept us waiting for too long."""
        return self._left_s <= 0.0

    def gain(self, num_bytes: int) -> None:
        """So many bytes got through."""
        self._left_s = min(self._left_s + num_bytes / LEAST_BYTES_PER_S, self._stall_s)

    def wake(self) -> None:
        """End ``reading`` and ``waiting`` at once, or the next one: what is being read may no longer be needed."""
        self._is_woken = True
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Wait for the peer's bytes. Raises TimeoutError when there is no patience left, or on ``wake``."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with self._until(max(self._left_s, 0.0)):
                yield
        finally:
            self._left_s -= clock() - began

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Wait for what is not the peer's to give. Raises TimeoutError on ``wake``."""
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
        """For a ``yield`` to the peer; the rim ends a call whose peer does not read at all. Raises Unavailable when
        there is no patience left."""
        clock = asyncio.get_running_loop().time
        began = clock()
        yield
        self._left_s -= clock() - began
        if self._left_s <= 0.0:
            raise Unavailable(f"transfer: next to nothing was read for {self._stall_s:g} s; go on later")

"""How long a peer may keep a transfer waiting: one that sends or reads next to nothing must not hold a place for ever.

A transfer begins with ``stall_s`` seconds. The time that its peer keeps us waiting is taken from them; each
``LEAST_BYTES_PER_S`` that get through give one second back, up to what there was at first. So a line may fall silent
for ``stall_s``, and must on the whole carry so many bytes a second. Our own disk's time is nobody's fault: only
what happens within ``reading`` and ``writing`` counts.
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
        self._reading: asyncio.Timeout | None = None
        self._is_woken = False

    def gain(self, num_bytes: int) -> None:
        """So many bytes got through."""
        self._left_s = min(self._left_s + num_bytes / LEAST_BYTES_PER_S, self._stall_s)

    def wake(self) -> None:
        """End ``reading`` at once, or the next one: what is being read is no longer needed."""
        self._is_woken = True
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Wait for the peer's bytes. Raises TimeoutError when there is no patience left, or none is needed."""
        if self._is_woken:
            self._is_woken = False
            raise TimeoutError
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(max(self._left_s, 0.0)) as self._reading:
                yield
        finally:
            self._reading, self._is_woken = None, False
            self._left_s -= clock() - began

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

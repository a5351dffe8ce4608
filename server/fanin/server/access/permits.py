"""How many uploads come in at full speed at a time.

A device sends when its upload is answered, so what waits here is on the device, and not in gRPC's buffers; those who
have a permit are soon done, and are folded while others come. A slow line must not hold up the quick ones: a permit
waits ``LENT_S`` for a piece, and ``CHUNK_S`` for all of a Chunk's; then it goes to the next, and the upload comes on
without one until it has become quick.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NUM_PERMITS: Final = 8
"""Enough for the disk's threads and the processors: these many Chunks of 1 MiB wait for them."""
LENT_S: Final = 0.1
"""How long an answer, and then each piece, may take."""
CHUNK_S: Final = 2.5 * LENT_S
"""How long all of a Chunk's may: a line of 4 MB a second is quick, who sends a byte now and then is not. Chunks have
one size, so nobody has many of these times for a few bytes."""
WAIT_S: Final = 45.0
"""No upload waits longer in all: proxies cut a line that is silent for a minute, and lines that are hardly quick must
not keep the others for ever."""


class Permits:
    """Given in the order in which they are asked for."""

    def __init__(self, num_permits: int = NUM_PERMITS) -> None:
        self._free = asyncio.Semaphore(num_permits)

    @contextmanager
    def one(self) -> Iterator["Permit"]:
        """For one upload, until its bytes are here."""
        permit = Permit(self._free)
        try:
            yield permit
        finally:
            permit.give_back()


class Permit:
    """One upload's, which it may have and lose many times."""

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free = free
        self._has = False
        self._is_quick = True
        self._left_s = CHUNK_S
        self._wait_s = WAIT_S

    async def get(self) -> None:
        """Before a Chunk is asked for or read: wait for a permit, unless the last one came too slowly to need any, or
        this upload has waited for long enough."""
        if self._is_quick and not self._has:
            await self._wait()
        self._is_quick = True
        self._left_s = CHUNK_S

    async def _wait(self) -> None:
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
            self._has = True
        except TimeoutError:
            pass
        finally:
            self._wait_s = max(self._wait_s - (clock() - begun_s), 0.0)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While a piece is awaited; a slow disk, of which this is none, must not let ever more Chunks into memory."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        timer = loop.call_later(min(LENT_S, self._left_s), self._pass_on)
        try:
            yield
        finally:
            timer.cancel()
            self._left_s = max(self._left_s - (loop.time() - begun_s), 0.0)

    def give_back(self) -> None:
        """Let the next one have it."""
        if self._has:
            self._has = False
            self._free.release()

    def _pass_on(self) -> None:
        self._is_quick = False
        self.give_back()

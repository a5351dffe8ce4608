"""Permits: how many transfers of one kind run at full speed at a time.

A device sends only after a reply. So bytes that wait are on the device and not in gRPC's buffers. Uploads with a permit
end soon and are folded while others arrive. Downloads with a permit end soon, too, and those that wait hold no piece in
memory. A slow connection must not delay fast ones: a permit waits ``LENT_S`` for a piece, and ``CHUNK_S`` for all
pieces of a Chunk. Then it passes to the next transfer. The slow transfer continues without a permit until it is fast
again.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NUM_PERMITS: Final = 4
"""Chunks in progress: one for each disk thread. Each takes some 2 MB with its pieces."""
LENT_S: Final = 0.1
"""Seconds that a reply, and each piece, may take."""
CHUNK_S: Final = 2.5 * LENT_S
"""Seconds that a Chunk may take. A connection of 4 MB/s is fast, a device that sends a byte now and then is not. All
Chunks have one size, so no device gets this time repeatedly for a few bytes."""
PERMIT_WAIT_S: Final = 45.0
"""Longest total wait of a transfer, in seconds. Proxies close a connection that is silent for a minute, and connections
that are barely fast must not delay the others without end."""


class Permits:
    """The permits, granted in the order of the requests."""

    def __init__(self, num_permits: int = NUM_PERMITS) -> None:
        self._free = asyncio.Semaphore(num_permits)

    @contextmanager
    def one(self) -> Iterator["Permit"]:
        """Yield a permit for one transfer, and release it at the end of the context."""
        permit = Permit(self._free)
        try:
            yield permit
        finally:
            permit.give_back()


class Permit:
    """The permit of one transfer, which may acquire and lose it many times."""

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free = free
        self._has = False
        self._is_quick = True
        self._remaining_s = CHUNK_S
        self._wait_s = PERMIT_WAIT_S

    @property
    def is_held(self) -> bool:
        """Whether the transfer has the permit now."""
        return self._has

    async def get(self) -> None:
        """Wait for the permit before a Chunk is requested, read or sent.

        A transfer whose last Chunk was slow needs none, and so does one that has waited ``PERMIT_WAIT_S`` in total.
        """
        if self._is_quick and not self._has:
            await self._wait()
        self._is_quick = True
        self._remaining_s = CHUNK_S

    async def _wait(self) -> None:
        clock = asyncio.get_running_loop().time
        start_s = clock()
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
            self._has = True
        except TimeoutError:
            pass
        finally:
            self._wait_s = max(self._wait_s - (clock() - start_s), 0.0)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Limit the time in this context, in which a piece is awaited or sent. After it, the permit passes on.

        The time of our own disk is not counted: a slow disk must not let more and more Chunks into memory.
        """
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        timer = loop.call_later(min(LENT_S, self._remaining_s), self._pass_on)
        try:
            yield
        finally:
            timer.cancel()
            self._remaining_s = max(self._remaining_s - (loop.time() - start_s), 0.0)

    def give_back(self) -> None:
        """Release the permit for the next transfer."""
        if self._has:
            self._has = False
            self._free.release()

    def _pass_on(self) -> None:
        self._is_quick = False
        self.give_back()

"""How many Chunks are gathered in memory at a time, over all uploads.

An upload asks for a permit before it reads a Chunk's first piece, and gives it back when the Chunk is on disk. Until
then its bytes stay with their device: gRPC takes no more of them than fit a stream's window. A slow line must not hold
up the others, so a permit is lent for ``LENT_S`` and goes to the next after that, while the Chunk comes on without one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

NUM_PERMITS: Final = 16
"""Enough for the disk's threads and the processors: these many Chunks of 1 MiB wait for them."""
LENT_S: Final = 0.25


class Permits:
    """Given in the order in which they are asked for."""

    def __init__(self, num_permits: int = NUM_PERMITS) -> None:
        self._free = asyncio.Semaphore(num_permits)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Callable[[], None]]:
        """While a Chunk is gathered and stored. Call what it gives once the Chunk is gathered: from then on the permit
        is kept, for a slow disk must not let ever more Chunks into memory."""
        await self._free.acquire()
        is_lent = True

        def give_back() -> None:
            nonlocal is_lent
            if is_lent:
                is_lent = False
                self._free.release()

        timer = asyncio.get_running_loop().call_later(LENT_S, give_back)
        try:
            yield timer.cancel
        finally:
            timer.cancel()
            give_back()

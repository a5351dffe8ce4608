"""A transfer's patience, on a virtual clock."""

import asyncio

import pytest

from fanin.clients.testing import run_virtual
from fanin.server.access.patience import Patience


def test_what_is_woken_between_two_reads_ends_the_next_at_once() -> None:
    async def main() -> float:
        patience = Patience(60.0)
        # While it waits for a permit, say: nobody is reading.
        patience.wake()
        with pytest.raises(TimeoutError):
            async with patience.reading():
                await asyncio.sleep(10.0)
        # Only that one: it may count again.
        async with patience.reading():
            await asyncio.sleep(1.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 1.0


def test_what_is_woken_while_it_reads_ends_then() -> None:
    async def main() -> float:
        patience = Patience(60.0)
        asyncio.get_running_loop().call_later(2.0, patience.wake)
        with pytest.raises(TimeoutError):
            async with patience.reading():
                await asyncio.sleep(10.0)
        async with patience.reading():
            await asyncio.sleep(1.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 3.0


def test_only_the_peers_time_is_taken_and_waking_takes_none() -> None:
    async def main() -> list[bool]:
        patience, over = Patience(60.0), []
        asyncio.get_running_loop().call_later(100.0, patience.wake)
        with pytest.raises(TimeoutError):
            async with patience.waiting():
                await asyncio.sleep(1000.0)
        over.append(patience.is_over)
        with pytest.raises(TimeoutError):
            async with patience.reading():
                await asyncio.sleep(1000.0)
        return [*over, patience.is_over]

    assert run_virtual(main()) == [False, True]


def test_what_is_woken_as_the_last_bytes_come_is_heard_before_the_next() -> None:
    async def main() -> float:
        patience, clock = Patience(60.0), asyncio.get_running_loop().time
        async with patience.reading():
            await asyncio.sleep(1.0)
            patience.wake()
        with pytest.raises(TimeoutError):
            async with patience.reading():
                await asyncio.sleep(10.0)
        return clock()

    assert run_virtual(main()) == 1.0

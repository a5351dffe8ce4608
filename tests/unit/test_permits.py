"""Permits to gather a Chunk: so many at a time, and nobody who is slow keeps one."""

import asyncio

from fanin.clients.testing import run_virtual
from fanin.server.permits import LENT_S, Permits


def test_the_quick_wait_for_each_other_and_go_in_turn() -> None:
    async def main() -> tuple[int, list[int]]:
        permits, under_way, most, order = Permits(2), 0, 0, list[int]()

        async def gather(number: int) -> None:
            nonlocal under_way, most
            async with permits.one():
                order.append(number)
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(LENT_S / 2)
                under_way -= 1

        await asyncio.gather(*(gather(number) for number in range(6)))
        return most, order

    assert run_virtual(main()) == (2, [0, 1, 2, 3, 4, 5])


def test_the_slow_lend_theirs_and_give_back_no_more_than_they_took() -> None:
    async def main() -> list[float]:
        loop, permits, begun_s = asyncio.get_running_loop(), Permits(1), list[float]()

        async def gather(seconds: float) -> None:
            async with permits.one():
                begun_s.append(loop.time())
                await asyncio.sleep(seconds)

        # Nobody sends anything for an hour, and the third still has its turn after twice the time of a loan.
        slow = [asyncio.create_task(gather(3600.0)) for _ in range(2)]
        await asyncio.create_task(gather(0.0))
        await asyncio.gather(*slow)
        # Were a permit given back twice, these would not wait for each other.
        await asyncio.gather(*(gather(LENT_S / 2) for _ in range(2)))
        return begun_s

    assert run_virtual(main()) == [0.0, LENT_S, 2 * LENT_S, 3600.0 + LENT_S, 3600.0 + 1.5 * LENT_S]


def test_who_fails_or_is_cancelled_gives_back() -> None:
    async def main() -> float:
        permits = Permits(1)

        async def cut() -> None:
            async with permits.one():
                await asyncio.sleep(3600.0)

        for _ in range(3):
            task = asyncio.create_task(cut())
            await asyncio.sleep(LENT_S / 4)
            task.cancel()
            await asyncio.wait({task})
        async with permits.one():
            return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 3 * LENT_S / 4


def test_what_waits_for_the_disk_keeps_its_permit() -> None:
    async def main() -> float:
        permits = Permits(1)

        async def store() -> None:
            async with permits.one() as keep:
                keep()
                await asyncio.sleep(10.0)

        storing = asyncio.create_task(store())
        await asyncio.sleep(0.0)
        async with permits.one():
            begun_s = asyncio.get_running_loop().time()
        await storing
        return begun_s

    assert run_virtual(main()) == 10.0

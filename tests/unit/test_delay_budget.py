"""The delay budget of a transfer, on a virtual clock."""

import asyncio

import pytest

from fanin.server.access.delay_budget import DelayBudget
from fanin.simulation import run_virtual


def test_a_wake_between_two_reads_ends_the_next_at_once() -> None:
    async def main() -> float:
        budget = DelayBudget(60.0)
        # No read is in progress, as while the transfer waits for a permit.
        budget.wake()
        with pytest.raises(TimeoutError):
            async with budget.reading():
                await asyncio.sleep(10.0)
        # Only that read is cancelled: the next one may wait.
        async with budget.reading():
            await asyncio.sleep(1.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 1.0


def test_a_wake_during_a_read_ends_it_at_once() -> None:
    async def main() -> float:
        budget = DelayBudget(60.0)
        asyncio.get_running_loop().call_later(2.0, budget.wake)
        with pytest.raises(TimeoutError):
            async with budget.reading():
                await asyncio.sleep(10.0)
        async with budget.reading():
            await asyncio.sleep(1.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 3.0


def test_only_the_peers_delay_is_charged_and_a_wake_costs_nothing() -> None:
    async def main() -> list[bool]:
        budget, states = DelayBudget(60.0), []
        asyncio.get_running_loop().call_later(100.0, budget.wake)
        with pytest.raises(TimeoutError):
            async with budget.waiting():
                await asyncio.sleep(1000.0)
        states.append(budget.is_spent)
        with pytest.raises(TimeoutError):
            async with budget.reading():
                await asyncio.sleep(1000.0)
        return [*states, budget.is_spent]

    assert run_virtual(main()) == [False, True]


def test_a_wake_after_the_last_bytes_of_a_read_ends_the_next() -> None:
    async def main() -> float:
        budget, clock = DelayBudget(60.0), asyncio.get_running_loop().time
        async with budget.reading():
            await asyncio.sleep(1.0)
            budget.wake()
        with pytest.raises(TimeoutError):
            async with budget.reading():
                await asyncio.sleep(10.0)
        return clock()

    assert run_virtual(main()) == 1.0

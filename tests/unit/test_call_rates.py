"""The rate of calls: a device that calls too often waits, its parallel calls are refused, and no other is slowed."""

import asyncio

import pytest
from support.errors import raises

from fanin.protos.errors import InvalidUpdate, NotFound, Throttled, Unavailable
from fanin.protos.messages import Principal, PrincipalKind
from fanin.server.access.rates import CallLimits, CallRates, Sources
from fanin.simulation import run_virtual

LIMITS = CallLimits(calls_per_s=8.0, burst=16, error_calls=8)


def device(name: str) -> Principal:
    return Principal(kind=PrincipalKind.DEVICE, id=name)


async def call(rates: CallRates, name: str = "a", error: Exception | None = None) -> float:
    """Make a call. Return the time at which it was served."""
    async with rates.call_of(device(name)):
        if error is not None:
            raise error
        return now()


def now() -> float:
    return asyncio.get_running_loop().time()


def test_calls_beyond_the_burst_are_served_at_the_rate() -> None:
    async def main() -> None:
        rates, started_s = CallRates(LIMITS, now, Sources(now, now)), now()
        times_s = [await call(rates) - started_s for _ in range(32)]
        assert times_s == [0.0] * 16 + [index / 8.0 for index in range(1, 17)]
        # Another device is not slowed, nor is an operator.
        assert await call(rates, "b") - now() == 0.0
        async with rates.call_of(Principal(kind=PrincipalKind.OPERATOR, id="a")):
            pass
        # After a pause, the device has its burst again.
        await asyncio.sleep(10.0)
        before_s = now()
        assert [await call(rates) for _ in range(16)] == [before_s] * 16

    run_virtual(main())


@pytest.mark.parametrize("error", [InvalidUpdate("wrong"), NotFound("unknown")])
def test_refused_calls_count_as_many(error: Exception) -> None:
    async def main() -> None:
        rates, started_s = CallRates(LIMITS, now, Sources(now, now)), now()
        for _ in range(12):
            with raises(type(error), str(error)):
                await call(rates, error=error)
        # Two bursts are free, and each of the others takes a second.
        assert 9.0 <= now() - started_s <= 11.0

    run_virtual(main())


def test_the_coordinators_own_errors_count_once() -> None:
    async def main() -> None:
        rates, started_s = CallRates(LIMITS, now, Sources(now, now)), now()
        for _ in range(16):
            with raises(Unavailable, "later"):
                await call(rates, error=Unavailable("later"))
        assert now() == started_s

    run_virtual(main())


def test_a_device_has_one_delayed_call() -> None:
    async def main() -> None:
        rates = CallRates(LIMITS, now, Sources(now, now))
        outcomes = await asyncio.gather(*(call(rates) for _ in range(100)), return_exceptions=True)
        assert sum(isinstance(each, Throttled) for each in outcomes) == 83
        text = "device: it calls more than 8 times a second, or its calls are refused; call again in 0.2 s"
        assert str(outcomes[17]) == text
        # The place of the delayed call is free again, also after a call that was cancelled.
        waiting = asyncio.create_task(call(rates))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await call(rates)

    run_virtual(main())


def test_the_table_has_a_limit() -> None:
    async def main() -> None:
        rates = CallRates(LIMITS, now, Sources(now, now), max_devices=2)
        for _ in range(25):
            rates.count("a")
        assert rates.count("a") > 0.0
        rates.count("b")
        rates.count("c")
        assert rates.count("a") == 0.0

    run_virtual(main())

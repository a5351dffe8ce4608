"""Permits for uploads at full speed: their number is limited, and a slow upload keeps none."""

import asyncio

from fanin.server.access.permits import CHUNK_S, LENT_S, PERMIT_WAIT_S, Permit, Permits
from fanin.simulation import run_virtual


async def chunk(permit: Permit, *waits: float) -> float:
    """Receive a Chunk whose pieces arrive after these waits. Return its start. Times are in units of ``LENT_S``."""
    await permit.get()
    start = asyncio.get_running_loop().time() / LENT_S
    for wait in waits:
        with permit.lent():
            await asyncio.sleep(wait * LENT_S)
    return round(start, 6)


async def upload(permits: Permits, *chunks: tuple[float, ...]) -> list[float]:
    """Upload the Chunks. Return the start of each."""
    with permits.one() as permit:
        return [await chunk(permit, *waits) for waits in chunks]


def test_fast_uploads_wait_for_each_other_and_keep_their_permits_to_the_end() -> None:
    async def main() -> list[list[float]]:
        permits = Permits(2)
        # Each Chunk takes longer than ``LENT_S``, but each piece is fast.
        quick = (0.5,) * 4
        return await asyncio.gather(*(upload(permits, quick, quick) for _ in range(6)))

    assert run_virtual(main()) == [[0, 2], [0, 2], [4, 6], [4, 6], [8, 10], [8, 10]]


def test_slow_uploads_lend_their_permits_and_free_each_only_once() -> None:
    async def main() -> list[list[float]]:
        permits = Permits(1)
        # Both slow uploads are silent for long. The third still starts after twice ``LENT_S``.
        slow = [asyncio.create_task(upload(permits, (1000.0,))) for _ in range(2)]
        third = await asyncio.create_task(upload(permits, (0.0,)))
        starts = [*await asyncio.gather(*slow), third]
        # If a permit were released twice, these two would not wait for each other.
        return [*starts, *await asyncio.gather(*(upload(permits, (0.5,)) for _ in range(2)))]

    assert run_virtual(main()) == [[0], [1], [2], [1001], [1001.5]]


def test_slow_uploads_need_no_permit_until_they_are_fast() -> None:
    async def main() -> tuple[list[float], list[float]]:
        permits = Permits(1)
        slow = asyncio.create_task(upload(permits, (2.0,), (0.0,), (0.0,)))
        await asyncio.sleep(0.0)
        quick = await upload(permits, (0.5,) * 4, (0.5,) * 4)
        return await slow, quick

    slow, quick = run_virtual(main())
    assert quick == [1, 3]
    # The second Chunk does not wait for the other, which has the permit; the third does.
    assert slow == [0, 2, 5]


def test_an_upload_that_trickles_is_slow() -> None:
    async def main() -> list[float]:
        permits = Permits(1)
        trickling = asyncio.create_task(upload(permits, (0.9,) * 100))
        await asyncio.sleep(0.0)
        quick = await upload(permits, (0.5,) * 5, (0.0,))
        await trickling
        return quick

    assert run_virtual(main()) == [CHUNK_S / LENT_S, CHUNK_S / LENT_S + 2.5]


def test_no_upload_waits_longer_in_total_than_a_proxy_does() -> None:
    async def main() -> tuple[list[float], list[float]]:
        permits = Permits(1)
        # Fast Chunks for more than a minute and a half.
        long = asyncio.create_task(upload(permits, *[(0.75, 0.75)] * 640))
        await asyncio.sleep(0.0)
        waiting = await upload(permits, (0.25,), (0.25,))
        starts = await long
        return waiting, starts

    waiting, starts = run_virtual(main())
    # The upload continues without a permit, and does not wait for one again.
    assert waiting == [PERMIT_WAIT_S / LENT_S, PERMIT_WAIT_S / LENT_S + 0.25]
    assert starts[-1] == 639 * 1.5


def test_a_failed_or_cancelled_upload_frees_its_permit() -> None:
    async def main() -> list[float]:
        permits = Permits(1)
        for _ in range(3):
            task = asyncio.create_task(upload(permits, (1000.0,)))
            await asyncio.sleep(LENT_S / 4)
            task.cancel()
            await asyncio.wait({task})
        return await upload(permits, (0.0,))

    assert run_virtual(main()) == [0.75]


def test_an_upload_that_waits_for_the_disk_keeps_its_permit() -> None:
    async def main() -> list[float]:
        permits = Permits(1)

        async def store() -> None:
            with permits.one() as permit:
                await permit.get()
                await asyncio.sleep(10.0)

        storing = asyncio.create_task(store())
        await asyncio.sleep(0.0)
        starts = await upload(permits, (0.0,))
        await storing
        return starts

    assert run_virtual(main()) == [10.0 / LENT_S]

"""Uploads at a coordinator, on a virtual clock: so many at full speed, and the others wait before their first byte."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from support.staleness import assignment, update
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.clients.testing import run_virtual
from fanin.protos import messages as m
from fanin.protos.runs import Command, Stop
from fanin.server.permits import LENT_S, NUM_PERMITS

Told = tuple[float, m.UploadReply]
SOON_S = LENT_S / 10


async def silent(seconds: float) -> AsyncIterator[m.Piece]:
    """A device that sends nothing, and hangs up."""
    await asyncio.sleep(seconds)
    for piece in ():
        yield piece


async def told(place: Place, device: str, work: m.Assignment, pieces: AsyncIterator[m.Piece]) -> list[Told]:
    """What an upload is answered, and when."""
    header, _ = update(work)
    clock = asyncio.get_running_loop().time
    return [(clock(), reply) async for reply in place.coordinator.upload(device, header, pieces)]


async def begun(folder: Path) -> tuple[Place, dict[str, m.Assignment]]:
    """A Round with one device more at work than may send at full speed."""
    place = open_place(folder)
    most = NUM_PERMITS + 1
    await start(place.runs, bundle_in(folder), plan(concurrency=most, buffer=most, quorum=most))
    await asyncio.sleep(1.0)
    names = [f"device-{index}" for index in range(most)]
    return place, {name: await assignment(place, name) for name in names}


def test_one_more_than_may_send_at_full_speed_is_answered_when_another_turns_out_slow(tmp_path: Path) -> None:
    async def main() -> list[float]:
        place, works = await begun(tmp_path)
        began = asyncio.get_running_loop().time()
        uploads = [told(place, device, work, silent(5.0)) for device, work in works.items()]
        found = await asyncio.gather(*uploads)
        await place.runs.stop()
        return [round(first[0] - began, 6) for first, *_ in found]

    *quick, last = run_virtual(main())
    assert max(quick) == 0.0
    assert last == LENT_S


def test_a_round_that_ends_while_one_waits_is_its_first_answer(tmp_path: Path) -> None:
    async def main() -> tuple[float, list[Told]]:
        place, works = await begun(tmp_path)
        uploads = [asyncio.create_task(told(place, device, work, silent(5.0))) for device, work in works.items()]
        await asyncio.sleep(SOON_S)
        ended = asyncio.get_running_loop().time()
        await place.runs.command(Command(command_id="stop", run_id="run", what=Stop()))
        found = await asyncio.gather(*uploads)
        await place.runs.stop()
        return ended, found[-1]

    ended, [(when, reply), *more] = run_virtual(main())
    assert (reply.round_state, reply.update_state) == (m.RoundState.CLOSED, m.UpdateState.DISCARDED)
    assert not more
    assert when - ended < SOON_S, "those who had the permits were told, too, and gave them back"

"""Uploads on a virtual clock: a limited number runs at full speed, and the others wait before their first byte."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from support.staleness import assignment, update
from support.virtual import PUBLISHER, Place, bundle_in, open_place, plan, start

from fanin.clients.testing import run_virtual, synthetic_bundle
from fanin.edge.tensors import TensorTable
from fanin.protos import messages as m
from fanin.protos.chunks import CHUNK_BYTES
from fanin.protos.control import Command, Stop
from fanin.server.access.permits import CHUNK_S, LENT_S, NUM_PERMITS

Told = tuple[float, m.UploadReply]
SOON_S = LENT_S / 10
PIECE_BYTES = CHUNK_BYTES // 4
NUM_CHUNKS = 4


async def silent(seconds: float) -> AsyncIterator[m.Piece]:
    """Send nothing for this time, then hang up."""
    await asyncio.sleep(seconds)
    for piece in ():
        yield piece


async def told(place: Place, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]) -> list[Told]:
    """Upload the pieces. Return each reply with its time."""
    clock = asyncio.get_running_loop().time
    return [(clock(), reply) async for reply in place.coordinator.upload(device, header, pieces)]


async def begun(folder: Path) -> tuple[Place, dict[str, m.Assignment]]:
    """Start a Round whose devices outnumber the upload permits by one."""
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
        uploads = [told(place, device, update(work)[0], silent(5.0)) for device, work in works.items()]
        found = await asyncio.gather(*uploads)
        await place.runs.stop()
        return [round(first[0] - began, 6) for first, *_ in found]

    *quick, last = run_virtual(main())
    assert max(quick) == 0.0
    assert last == LENT_S


def test_a_round_that_ends_while_one_waits_is_its_first_answer(tmp_path: Path) -> None:
    async def main() -> tuple[float, list[Told]]:
        place, works = await begun(tmp_path)
        uploads = [
            asyncio.create_task(told(place, device, update(work)[0], silent(5.0))) for device, work in works.items()
        ]
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


async def steady(payload: bytes) -> AsyncIterator[m.Piece]:
    """Send the payload just fast enough to keep a permit."""
    for at in range(0, len(payload), PIECE_BYTES):
        await asyncio.sleep(CHUNK_S * 0.9 * PIECE_BYTES / CHUNK_BYTES)
        yield m.Piece(offset=at, data=payload[at : at + PIECE_BYTES])


def test_a_run_that_ends_is_heard_though_nobody_gives_a_permit_back(tmp_path: Path) -> None:
    async def main() -> tuple[float, list[Told], list[Told]]:
        place, shapes = open_place(tmp_path), {"a": (NUM_CHUNKS * CHUNK_BYTES // 4,)}
        large = synthetic_bundle(tmp_path / "large", PUBLISHER, shapes)
        await start(place.runs, large, plan(concurrency=NUM_PERMITS, buffer=NUM_PERMITS, quorum=1), "large")
        await asyncio.sleep(1.0)
        names = [f"device-{index}" for index in range(NUM_PERMITS)]
        sent = [(name, update(await assignment(place, name), table=TensorTable.of(shapes))) for name in names]
        await start(place.runs, bundle_in(tmp_path), plan(concurrency=1, buffer=1, quorum=1), "small")
        await asyncio.sleep(1.0)
        header, _ = update(await assignment(place, "last"))
        busy = [asyncio.create_task(told(place, name, first, steady(data))) for name, (first, data) in sent]
        await asyncio.sleep(SOON_S)
        waits = asyncio.create_task(told(place, "last", header, silent(5.0)))
        await asyncio.sleep(CHUNK_S)
        ended = asyncio.get_running_loop().time()
        await place.runs.command(Command(command_id="stop", run_id="small", what=Stop()))
        found, others = await waits, await asyncio.gather(*busy)
        await place.runs.stop()
        return ended, found, [replies[-1] for replies in others]

    ended, [(when, reply), *more], others = run_virtual(main())
    assert (reply.round_state, reply.update_state) == (m.RoundState.CLOSED, m.UpdateState.DISCARDED)
    assert not more
    assert when - ended < SOON_S
    # No device was slow: all of them kept their permits.
    assert {last.update_state for _, last in others} == {m.UpdateState.ACCEPTED}
    assert min(at for at, _ in others) > ended + CHUNK_S


def test_a_device_with_many_assignments_uploads_once_at_a_time(tmp_path: Path) -> None:
    async def main() -> tuple[bool, Told]:
        place = open_place(tmp_path)
        works = []
        for run_id in ("one", "two"):
            await start(place.runs, bundle_in(tmp_path), plan(concurrency=1, buffer=1, quorum=1), run_id)
            await asyncio.sleep(1.0)
            works.append(update(await assignment(place, "device"))[0])
        earlier = asyncio.create_task(told(place, "device", works[0], silent(5.0)))
        await asyncio.sleep(SOON_S)
        later = asyncio.create_task(told(place, "device", works[1], silent(0.0)))
        await asyncio.wait({earlier, later})
        await place.runs.stop()
        return earlier.cancelled(), later.result()[0]

    was_ended, (_, reply) = run_virtual(main())
    assert was_ended
    assert reply.update_state is m.UpdateState.RECEIVING

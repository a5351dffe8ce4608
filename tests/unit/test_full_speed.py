"""Transfers on a virtual clock: a limited number runs at full speed, and the others wait before their first byte."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.staleness import assignment, update
from support.virtual import PUBLISHER, Place, bundle_in, open_place, plan, start

from fanin.edge.tensors import TensorTable
from fanin.protos import messages as m
from fanin.protos.chunks import CHUNK_BYTES
from fanin.protos.messages import Command, Stop
from fanin.server.access.permits import CHUNK_S, LENT_S, NUM_PERMITS
from fanin.simulation import run_virtual, synthetic_bundle

TimedReply = tuple[float, m.UploadReply]
SOON_S = LENT_S / 10
PIECE_BYTES = CHUNK_BYTES // 4
NUM_CHUNKS = 4


async def silent(seconds: float) -> AsyncIterator[m.Piece]:
    """Send nothing for this time, then hang up."""
    await asyncio.sleep(seconds)
    for piece in ():
        yield piece


async def timed_replies(
    place: Place, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
) -> list[TimedReply]:
    """Upload the pieces. Return each reply with its time."""
    clock = asyncio.get_running_loop().time
    return [(clock(), reply) async for reply in place.coordinator.upload(device, header, pieces)]


async def open_round(folder: Path) -> tuple[Place, dict[str, m.Assignment]]:
    """Start a Round whose devices outnumber the upload permits by one."""
    place = open_place(folder)
    num_devices = NUM_PERMITS + 1
    await start(place.runs, bundle_in(folder), plan(concurrency=num_devices, buffer=num_devices, quorum=num_devices))
    await asyncio.sleep(1.0)
    names = [f"device-{index}" for index in range(num_devices)]
    return place, {name: await assignment(place, name) for name in names}


def test_a_device_without_a_permit_is_answered_when_a_slow_device_loses_its_permit(tmp_path: Path) -> None:
    async def main() -> list[float]:
        place, works = await open_round(tmp_path)
        start_s = asyncio.get_running_loop().time()
        uploads = [timed_replies(place, device, update(work)[0], silent(5.0)) for device, work in works.items()]
        replies = await asyncio.gather(*uploads)
        await place.runs.stop()
        return [round(first[0] - start_s, 6) for first, *_ in replies]

    *quick, last = run_virtual(main())
    assert max(quick) == 0.0
    assert last == LENT_S


def test_a_waiting_upload_is_answered_when_its_round_ends(tmp_path: Path) -> None:
    async def main() -> tuple[float, list[TimedReply]]:
        place, works = await open_round(tmp_path)
        uploads = [
            asyncio.create_task(timed_replies(place, device, update(work)[0], silent(5.0)))
            for device, work in works.items()
        ]
        await asyncio.sleep(SOON_S)
        end_s = asyncio.get_running_loop().time()
        await place.runs.command(Command(command_id="stop", run_id="run", what=Stop()))
        replies = await asyncio.gather(*uploads)
        await place.runs.stop()
        return end_s, replies[-1]

    end_s, [(answer_s, reply), *more] = run_virtual(main())
    assert (reply.round_state, reply.update_state) == (m.RoundState.CLOSED, m.UpdateState.DISCARDED)
    assert not more
    assert answer_s - end_s < SOON_S, "those who had the permits were told, too, and gave them back"


async def steady(payload: bytes) -> AsyncIterator[m.Piece]:
    """Send the payload just fast enough to keep a permit."""
    for offset in range(0, len(payload), PIECE_BYTES):
        await asyncio.sleep(CHUNK_S * 0.9 * PIECE_BYTES / CHUNK_BYTES)
        yield m.Piece(offset=offset, data=payload[offset : offset + PIECE_BYTES])


def test_the_end_of_a_run_is_reported_while_all_permits_are_in_use(tmp_path: Path) -> None:
    async def main() -> tuple[float, list[TimedReply], list[TimedReply]]:
        place, shapes = open_place(tmp_path), {"a": (NUM_CHUNKS * CHUNK_BYTES // 4,)}
        large = synthetic_bundle(tmp_path / "large", PUBLISHER, shapes)
        await start(place.runs, large, plan(concurrency=NUM_PERMITS, buffer=NUM_PERMITS, quorum=1), "large")
        await asyncio.sleep(1.0)
        names = [f"device-{index}" for index in range(NUM_PERMITS)]
        updates = [(name, update(await assignment(place, name), table=TensorTable.of(shapes))) for name in names]
        await start(place.runs, bundle_in(tmp_path), plan(concurrency=1, buffer=1, quorum=1), "small")
        await asyncio.sleep(1.0)
        header, _ = update(await assignment(place, "last"))
        uploads = [
            asyncio.create_task(timed_replies(place, name, first, steady(data))) for name, (first, data) in updates
        ]
        await asyncio.sleep(SOON_S)
        last_upload = asyncio.create_task(timed_replies(place, "last", header, silent(5.0)))
        await asyncio.sleep(CHUNK_S)
        end_s = asyncio.get_running_loop().time()
        await place.runs.command(Command(command_id="stop", run_id="small", what=Stop()))
        last_replies, others = await last_upload, await asyncio.gather(*uploads)
        await place.runs.stop()
        return end_s, last_replies, [replies[-1] for replies in others]

    end_s, [(answer_s, reply), *more], others = run_virtual(main())
    assert (reply.round_state, reply.update_state) == (m.RoundState.CLOSED, m.UpdateState.DISCARDED)
    assert not more
    assert answer_s - end_s < SOON_S
    # No device was slow: all of them kept their permits.
    assert {last.update_state for _, last in others} == {m.UpdateState.ACCEPTED}
    assert min(reply_s for reply_s, _ in others) > end_s + CHUNK_S


def test_a_device_with_many_assignments_uploads_once_at_a_time(tmp_path: Path) -> None:
    async def main() -> tuple[bool, TimedReply]:
        place = open_place(tmp_path)
        works = []
        for run_id in ("one", "two"):
            await start(place.runs, bundle_in(tmp_path), plan(concurrency=1, buffer=1, quorum=1), run_id)
            await asyncio.sleep(1.0)
            works.append(update(await assignment(place, "device"))[0])
        earlier = asyncio.create_task(timed_replies(place, "device", works[0], silent(5.0)))
        await asyncio.sleep(SOON_S)
        later = asyncio.create_task(timed_replies(place, "device", works[1], silent(0.0)))
        await asyncio.wait({earlier, later})
        await place.runs.stop()
        return earlier.cancelled(), later.result()[0]

    was_ended, (_, reply) = run_virtual(main())
    assert was_ended
    assert reply.update_state is m.UpdateState.RECEIVING


def test_a_download_without_a_permit_begins_when_a_slow_device_loses_its_permit(tmp_path: Path) -> None:
    async def first_piece_s(place: Place, device: str, work: m.Assignment) -> float:
        """Read one piece, and no more for a while. Return the time of the piece."""
        (chunk, *_) = work.version.parameters.chunks
        request = m.Download(assignment_id=work.assignment_id, sha256=chunk.sha256, offset=0)
        pieces = place.coordinator.download(device, request)
        await anext(pieces)
        piece_s = asyncio.get_running_loop().time()
        await asyncio.sleep(5.0)
        return piece_s

    async def main() -> list[float]:
        place, works = await open_round(tmp_path)
        start_s = asyncio.get_running_loop().time()
        times_s = await asyncio.gather(*(first_piece_s(place, device, work) for device, work in works.items()))
        await place.runs.stop()
        return [round(piece_s - start_s, 6) for piece_s in times_s]

    *quick, last = run_virtual(main())
    assert max(quick) == 0.0
    assert last == LENT_S


@pytest.mark.parametrize(("delay_s", "stored_bytes"), [(0.0, 0), (2 * LENT_S, PIECE_BYTES)], ids=["fast", "slow"])
def test_only_an_upload_without_a_permit_stores_each_piece_at_once(
    tmp_path: Path, delay_s: float, stored_bytes: int
) -> None:
    async def pieces(payload: bytes) -> AsyncIterator[m.Piece]:
        await asyncio.sleep(delay_s)
        yield m.Piece(offset=0, data=payload[:PIECE_BYTES])
        await asyncio.sleep(5.0)

    async def main() -> int:
        place, shapes = open_place(tmp_path), {"a": (CHUNK_BYTES // 4,)}
        large = synthetic_bundle(tmp_path / "large", PUBLISHER, shapes)
        await start(place.runs, large, plan(concurrency=1, buffer=1, quorum=1))
        await asyncio.sleep(1.0)
        header, payload = update(await assignment(place, "device"), table=TensorTable.of(shapes))
        upload = asyncio.create_task(timed_replies(place, "device", header, pieces(payload)))
        await asyncio.sleep(delay_s + SOON_S)
        (part,) = (tmp_path / "state" / "spool").glob("*.part")
        size_bytes = part.stat().st_size
        await upload
        await place.runs.stop()
        return size_bytes

    assert run_virtual(main()) == stored_bytes

"""Devices without work learn of newer Versions: at once when the Run rests, otherwise with their next answer."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from support.rounds import finish_round
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.errors import NotFound
from fanin.protos.messages import RunState
from fanin.server.fleet.bulletin import REFRESH_BYTES_PER_S, refresh_window
from fanin.server.fleet.retries import MAX_WINDOW_S, MIN_WINDOW_S, RETRY_PER_S
from fanin.simulation import LoopbackTransport, run_virtual

T = TypeVar("T")
CAPABILITIES = m.Capabilities(codecs=("fixed32",), runtimes=("synthetic 1",), graph_formats=("onnx",))
NO_VERSION = m.ServedVersion()
ONE_DEVICE = {"concurrency": 1, "buffer": 1, "quorum": 1}


def served_version(number: int) -> m.ServedVersion:
    """Return the Run's Version of this number as the one that a device serves."""
    return m.ServedVersion(run_id="run", epoch=1, number=number)


async def poll(place: Place, device: str, version: m.ServedVersion | None, wait_s: float = 40.0) -> m.CheckInAnswer:
    """Check in once."""
    check_in = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=wait_s, served=version)
    return await place.coordinator.check_in(device, check_in)


def newest_publication(answer: m.CheckInAnswer) -> m.Publication | None:
    """Return the Version that an answer without work names."""
    assert not isinstance(answer, m.Assigned), answer
    return answer.newest


def test_the_last_version_of_a_run_reaches_devices_that_wait(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(**ONE_DEVICE, max_rounds=1))
        await asyncio.sleep(1.0)
        transport = LoopbackTransport(fleet=place.coordinator, device="worker")
        work = await poll(place, "worker", None)
        tasks = {
            device: asyncio.create_task(poll(place, device, version))
            for device, version in (("old", served_version(0)), ("none", NO_VERSION), ("plain", None))
        }
        await asyncio.sleep(5.0)
        assert not any(task.done() for task in tasks.values())
        assert isinstance(work, m.Assigned)
        await finish_round(transport, work.assignment)
        await asyncio.sleep(0.1)
        assert place.runs.driver("run").run.state is RunState.FINISHED
        for device in ("old", "none"):
            answer = await asyncio.wait_for(tasks[device], 0.1)
            publication = newest_publication(answer)
            assert publication is not None and publication.version.number == 1
            assert isinstance(answer, m.Wait)
            assert (answer.retry_min_s, answer.retry_max_s) == (0.0, MIN_WINDOW_S)
        # A device that serves no Version still waits for work.
        await asyncio.sleep(1.0)
        assert not tasks["plain"].done()
        assert newest_publication(await tasks["plain"]) is None
        # A device that checks in later is answered at once. A device that serves the Version waits.
        began_s = asyncio.get_running_loop().time()
        assert newest_publication(await poll(place, "late", served_version(0))) is not None
        assert asyncio.get_running_loop().time() == began_s
        assert newest_publication(await poll(place, "old", served_version(1))) is None
        assert asyncio.get_running_loop().time() == began_s + 40.0
        await place.runs.stop()

    run_virtual(main())


def test_during_a_run_a_device_learns_of_a_version_with_its_next_answer(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(**ONE_DEVICE, max_rounds=2))
        await asyncio.sleep(1.0)
        transport = LoopbackTransport(fleet=place.coordinator, device="worker")
        work = await poll(place, "worker", None)
        assert isinstance(work, m.Assigned)
        await finish_round(transport, work.assignment)
        # Another device is assigned to the second Round at once.
        await asyncio.sleep(0.1)
        assert isinstance(await poll(place, "other", None), m.Assigned)
        began_s = asyncio.get_running_loop().time()
        publication = newest_publication(await poll(place, "old", served_version(0)))
        assert asyncio.get_running_loop().time() == began_s + 40.0
        assert publication is not None and publication.version.number == 1
        await place.runs.stop()

    run_virtual(main())


def test_a_device_that_no_run_suits_learns_of_the_run_that_it_serves(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        bundle = bundle_in(tmp_path)
        await start(place.runs, bundle, plan(**ONE_DEVICE, max_rounds=1))
        await asyncio.sleep(1.0)
        work = await poll(place, "worker", None)
        assert isinstance(work, m.Assigned)
        await finish_round(LoopbackTransport(fleet=place.coordinator, device="worker"), work.assignment)
        await asyncio.sleep(0.1)
        await start(place.runs, bundle, plan(codec=m.CodecSpec(name="int8", max_shift=0)), "other")
        answer = await poll(place, "old", served_version(0))
        assert isinstance(answer, m.Rejected)
        publication = newest_publication(answer)
        assert publication is not None and (publication.run_id, publication.version.number) == ("run", 1)
        await place.runs.stop()

    run_virtual(main())


def test_a_check_in_without_work_never_queries_the_database(tmp_path: Path) -> None:
    calls: list[object] = []

    async def counting_lane(work: Callable[[], T]) -> T:
        calls.append(work)
        return work()

    async def main() -> None:
        place = open_place(tmp_path, store_lane=counting_lane)
        await start(place.runs, bundle_in(tmp_path), plan(**ONE_DEVICE, max_rounds=1))
        await asyncio.sleep(1.0)
        assert isinstance(await poll(place, "worker", None), m.Assigned)
        await asyncio.sleep(1.0)
        calls.clear()
        for version in (None, NO_VERSION, served_version(0), m.ServedVersion(run_id="gone", number=3)):
            assert isinstance(await poll(place, "idle", version), m.Wait)
        assert calls == []
        await place.runs.stop()

    run_virtual(main())


def test_a_publication_permits_one_device_to_download_its_version_and_bundle_only(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(**ONE_DEVICE, max_rounds=2))
        await asyncio.sleep(1.0)
        transport = LoopbackTransport(fleet=place.coordinator, device="worker")
        work = await poll(place, "worker", None)
        assert isinstance(work, m.Assigned)
        before = newest_publication(await poll(place, "idle", NO_VERSION))
        assert before is not None and before.version.number == 0
        await finish_round(transport, work.assignment)
        await asyncio.sleep(0.1)
        assert isinstance(await poll(place, "worker", None), m.Assigned)
        after = newest_publication(await poll(place, "idle", served_version(0), wait_s=0.1))
        assert after is not None and after.version.number == 1
        idle = LoopbackTransport(fleet=place.coordinator, device="idle")
        # A slow device can still download the Version that its answer named.
        for publication in (before, after):
            for ref in (*publication.bundle.manifest.chunks, *publication.version.parameters.chunks):
                assert len(await idle.download(publication.download_id, ref.sha256)) == ref.size_bytes
        digest = after.version.parameters.chunks[0].sha256
        with pytest.raises(NotFound, match="FN-0613"):
            await idle.download(before.download_id, digest)
        other_id = after.download_id.replace("v1", "v2")
        for device, download_id in (("other", after.download_id), ("idle", other_id)):
            with pytest.raises(NotFound, match=f"not made for device {device}"):
                await LoopbackTransport(fleet=place.coordinator, device=device).download(download_id, digest)
        # The download id is not an Assignment.
        with pytest.raises(NotFound, match="FN-0613"):
            await place.coordinator.report("idle", m.Report(assignment_id=after.download_id))
        await place.runs.stop()

    run_virtual(main())


def test_after_a_restart_a_run_that_rests_still_names_its_last_version(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(**ONE_DEVICE, max_rounds=1))
        await asyncio.sleep(1.0)
        work = await poll(place, "worker", None)
        assert isinstance(work, m.Assigned)
        await finish_round(LoopbackTransport(fleet=place.coordinator, device="worker"), work.assignment)
        await asyncio.sleep(0.1)
        first = newest_publication(await poll(place, "old", served_version(0)))
        await place.runs.stop()
        restarted = open_place(tmp_path)
        await restarted.runs.start()
        assert first is not None and newest_publication(await poll(restarted, "old", served_version(0))) == first
        await restarted.runs.stop()

    run_virtual(main())


def test_downloads_are_spread_by_their_number_and_size() -> None:
    assert refresh_window(1, 1 << 20) == MIN_WINDOW_S
    assert refresh_window(10_000, 100) == 10_000 / RETRY_PER_S
    assert refresh_window(100, 64 << 20) == 100 * (64 << 20) / REFRESH_BYTES_PER_S
    assert refresh_window(1_000_000, 1 << 30) == MAX_WINDOW_S


def test_all_waiting_devices_get_one_window_that_grows_with_their_number(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(**ONE_DEVICE, max_rounds=1))
        await asyncio.sleep(1.0)
        work = await poll(place, "worker", None)
        assert isinstance(work, m.Assigned)
        tasks = [asyncio.create_task(poll(place, f"idle-{number}", served_version(0))) for number in range(1000)]
        await asyncio.sleep(1.0)
        await finish_round(LoopbackTransport(fleet=place.coordinator, device="worker"), work.assignment)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), 1.0)
        assert {replace(answer, newest=None) for answer in answers} == {
            m.Wait(retry_min_s=0.0, retry_max_s=1000 / RETRY_PER_S)
        }
        await place.runs.stop()

    run_virtual(main())

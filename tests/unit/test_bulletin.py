"""Devices without work learn of newer Versions: at once when the Run rests, otherwise with their next answer."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from support.rounds import finish_round
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.clients.testing import LoopbackTransport, run_virtual
from fanin.protos import messages as m
from fanin.protos.control import RunState
from fanin.protos.errors import NotFound
from fanin.server.fleet.bulletin import REFRESH_BYTES_PER_S, refresh_window
from fanin.server.fleet.retries import MAX_WINDOW_S, MIN_WINDOW_S, RETRY_PER_S

T = TypeVar("T")
CAN = m.Capabilities(codecs=("fixed32",), runtimes=("synthetic 1",), graph_formats=("onnx",))
NONE_YET = m.ServedVersion()
ONE = {"concurrency": 1, "buffer": 1, "quorum": 1}


def served(number: int) -> m.ServedVersion:
    """Return the Run's Version of this number as the one that a device serves."""
    return m.ServedVersion(run_id="run", number=number)


async def ask(place: Place, device: str, has: m.ServedVersion | None, wait_s: float = 40.0) -> m.CheckInAnswer:
    """Check in once."""
    check_in = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAN, wait_s=wait_s, served=has)
    return await place.coordinator.check_in(device, check_in)


def newest(answer: m.CheckInAnswer) -> m.Publication | None:
    """Return the Version that an answer without work names."""
    assert not isinstance(answer, m.Assigned), answer
    return answer.newest


def test_the_last_version_of_a_run_reaches_devices_that_wait(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(**ONE, max_rounds=1))
        await asyncio.sleep(1.0)
        line = LoopbackTransport(fleet=place.coordinator, device="worker")
        work = await ask(place, "worker", None)
        waiting = {
            device: asyncio.create_task(ask(place, device, has))
            for device, has in (("old", served(0)), ("none", NONE_YET), ("plain", None))
        }
        await asyncio.sleep(5.0)
        assert not any(task.done() for task in waiting.values())
        assert isinstance(work, m.Assigned)
        await finish_round(line, work.assignment)
        await asyncio.sleep(0.1)
        assert place.runs.driver("run").run.state is RunState.FINISHED
        for device in ("old", "none"):
            answer = await asyncio.wait_for(waiting[device], 0.1)
            found = newest(answer)
            assert found is not None and found.version.number == 1
            assert isinstance(answer, m.Wait)
            assert (answer.retry_min_s, answer.retry_max_s) == (0.0, MIN_WINDOW_S)
        # A device that serves no Version still waits for work.
        await asyncio.sleep(1.0)
        assert not waiting["plain"].done()
        assert newest(await waiting["plain"]) is None
        # A device that checks in later is answered at once. A device that serves the Version waits.
        began_s = asyncio.get_running_loop().time()
        assert newest(await ask(place, "late", served(0))) is not None
        assert asyncio.get_running_loop().time() == began_s
        assert newest(await ask(place, "old", served(1))) is None
        assert asyncio.get_running_loop().time() == began_s + 40.0
        await place.runs.stop()

    run_virtual(main())


def test_while_rounds_follow_a_device_hears_of_it_with_its_next_answer(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(**ONE, max_rounds=2))
        await asyncio.sleep(1.0)
        line = LoopbackTransport(fleet=place.coordinator, device="worker")
        work = await ask(place, "worker", None)
        assert isinstance(work, m.Assigned)
        await finish_round(line, work.assignment)
        # Another device is assigned to the second Round at once.
        await asyncio.sleep(0.1)
        assert isinstance(await ask(place, "other", None), m.Assigned)
        began_s = asyncio.get_running_loop().time()
        found = newest(await ask(place, "old", served(0)))
        assert asyncio.get_running_loop().time() == began_s + 40.0
        assert found is not None and found.version.number == 1
        await place.runs.stop()

    run_virtual(main())


def test_a_device_that_no_run_suits_hears_of_the_run_that_it_serves(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        bundle = bundle_in(tmp_path)
        await start(place.runs, bundle, plan(**ONE, max_rounds=1))
        await asyncio.sleep(1.0)
        work = await ask(place, "worker", None)
        assert isinstance(work, m.Assigned)
        await finish_round(LoopbackTransport(fleet=place.coordinator, device="worker"), work.assignment)
        await asyncio.sleep(0.1)
        await start(place.runs, bundle, plan(codec=m.CodecSpec(name="int8", max_shift=0)), "other")
        answer = await ask(place, "old", served(0))
        assert isinstance(answer, m.Rejected)
        found = newest(answer)
        assert found is not None and (found.run_id, found.version.number) == ("run", 1)
        await place.runs.stop()

    run_virtual(main())


def test_a_check_in_without_work_never_asks_the_database(tmp_path: Path) -> None:
    calls: list[object] = []

    async def counted(work: Callable[[], T]) -> T:
        calls.append(work)
        return work()

    async def main() -> None:
        place = open_place(tmp_path, store_lane=counted)
        await start(place.runs, bundle_in(tmp_path), plan(**ONE, max_rounds=1))
        await asyncio.sleep(1.0)
        assert isinstance(await ask(place, "worker", None), m.Assigned)
        await asyncio.sleep(1.0)
        calls.clear()
        for has in (None, NONE_YET, served(0), m.ServedVersion(run_id="gone", number=3)):
            assert isinstance(await ask(place, "idle", has), m.Wait)
        assert calls == []
        await place.runs.stop()

    run_virtual(main())


def test_a_publication_lets_one_device_download_its_version_and_bundle_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(**ONE, max_rounds=2))
        await asyncio.sleep(1.0)
        line = LoopbackTransport(fleet=place.coordinator, device="worker")
        work = await ask(place, "worker", None)
        assert isinstance(work, m.Assigned)
        before = newest(await ask(place, "idle", NONE_YET))
        assert before is not None and before.version.number == 0
        await finish_round(line, work.assignment)
        await asyncio.sleep(0.1)
        assert isinstance(await ask(place, "worker", None), m.Assigned)
        after = newest(await ask(place, "idle", served(0), wait_s=0.1))
        assert after is not None and after.version.number == 1
        idle = LoopbackTransport(fleet=place.coordinator, device="idle")
        # A slow device can still download the Version that its answer named.
        for publication in (before, after):
            for ref in (*publication.bundle.manifest.chunks, *publication.version.parameters.chunks):
                assert len(await idle.download(publication.download_id, ref.sha256)) == ref.size_bytes
        foreign = after.version.parameters.chunks[0].sha256
        with pytest.raises(NotFound, match="not one that this assignment needs"):
            await idle.download(before.download_id, foreign)
        made_up = after.download_id.replace("v1", "v2")
        for device, download_id in (("other", after.download_id), ("idle", made_up)):
            with pytest.raises(NotFound, match=f"not made for device {device}"):
                await LoopbackTransport(fleet=place.coordinator, device=device).download(download_id, foreign)
        # The download id is not an Assignment.
        with pytest.raises(NotFound, match="not made for device idle"):
            await place.coordinator.report("idle", m.Report(assignment_id=after.download_id))
        await place.runs.stop()

    run_virtual(main())


def test_after_a_restart_a_run_that_rests_still_names_its_last_version(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(**ONE, max_rounds=1))
        await asyncio.sleep(1.0)
        work = await ask(place, "worker", None)
        assert isinstance(work, m.Assigned)
        await finish_round(LoopbackTransport(fleet=place.coordinator, device="worker"), work.assignment)
        await asyncio.sleep(0.1)
        first = newest(await ask(place, "old", served(0)))
        await place.runs.stop()
        again = open_place(tmp_path)
        await again.runs.start()
        assert first is not None and newest(await ask(again, "old", served(0))) == first
        await again.runs.stop()

    run_virtual(main())


def test_downloads_are_spread_by_their_number_and_size() -> None:
    assert refresh_window(1, 1 << 20) == MIN_WINDOW_S
    assert refresh_window(10_000, 100) == 10_000 / RETRY_PER_S
    assert refresh_window(100, 64 << 20) == 100 * (64 << 20) / REFRESH_BYTES_PER_S
    assert refresh_window(1_000_000, 1 << 30) == MAX_WINDOW_S


def test_all_who_wait_get_one_window_that_grows_with_their_number(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(**ONE, max_rounds=1))
        await asyncio.sleep(1.0)
        work = await ask(place, "worker", None)
        assert isinstance(work, m.Assigned)
        waiting = [asyncio.create_task(ask(place, f"idle-{number}", served(0))) for number in range(1000)]
        await asyncio.sleep(1.0)
        await finish_round(LoopbackTransport(fleet=place.coordinator, device="worker"), work.assignment)
        answers = await asyncio.wait_for(asyncio.gather(*waiting), 1.0)
        assert {replace(answer, newest=None) for answer in answers} == {
            m.Wait(retry_min_s=0.0, retry_max_s=1000 / RETRY_PER_S)
        }
        await place.runs.stop()

    run_virtual(main())

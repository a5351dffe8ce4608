"""Runs that a coordinator does not drive: it lists, describes and watches them, and devices download their Versions."""

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from support.errors import raises
from support.snapshot import snapshot
from support.staleness import CAPABILITIES, assignment, send, settle
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.errors import NotFound, Unavailable
from fanin.protos.messages import (
    MAX_PAGE_BYTES,
    MAX_PAGE_RUNS,
    ListedRuns,
    RoundInfo,
    RunInfo,
    RunQuery,
    RunState,
    VersionPublished,
)
from fanin.server.service import page_of_runs
from fanin.server.storage.contracts import values
from fanin.simulation import run_virtual

ALONE = plan(concurrency=1, buffer=1, quorum=1, max_rounds=2, deadline_s=600.0)


async def take_over(folder: Path) -> tuple[Place, Place]:
    """Return a coordinator that drove a Run, and the one that has taken it. The first one has noticed the takeover."""
    older = open_place(folder)
    await start(older.runs, bundle_in(folder), ALONE)
    await settle()
    work = await assignment(older, "a")
    newer = open_place(folder)
    await newer.runs.start()
    await settle()
    with pytest.raises(Unavailable, match="FN-0615"):
        await send(older, "a", work)
    return older, newer


async def stop(*places: Place) -> None:
    for place in places:
        await place.runs.stop()
    assert len(asyncio.all_tasks()) == 1


def test_a_run_that_another_coordinator_drives_is_described_from_its_record(tmp_path: Path) -> None:
    async def main() -> None:
        older, newer = await take_over(tmp_path)
        await send(newer, "a")
        await settle()
        await assignment(newer, "b")
        await settle()
        rows = snapshot(tmp_path / "state").rows
        (info,) = (await older.runs.listed()).runs
        assert (info.state, info.version, info.num_rounds) == (RunState.RUNNING, 1, 1)
        assert info.reason == "run run: another coordinator drives this run now"
        description = await older.runs.describe("run", 9)
        live_description = await newer.runs.describe("run", 9)
        assert description.run == info
        assert (description.grid, description.num_devices) == (live_description.grid, live_description.num_devices)
        open_round, published_round = description.rounds
        # Only the driver knows that all places are taken, and which devices hold them.
        assert (open_round.phase, live_description.rounds[0].phase) == ("selecting", "training")
        assert (description.live.num_at_work, live_description.live.at_work) == (0, ("b",))
        assert published_round == live_description.rounds[1]
        assert isinstance(published_round, RoundInfo)
        assert description.live.deadline_s == pytest.approx(live_description.live.deadline_s, abs=0.1)
        assert 590.0 < description.live.deadline_s < 600.0
        # Reading does not change the database.
        assert snapshot(tmp_path / "state").rows == rows
        await stop(older, newer)

    run_virtual(main())


def test_a_run_that_another_coordinator_drives_is_watched_to_its_end(tmp_path: Path) -> None:
    async def main() -> None:
        older, newer = await take_over(tmp_path)
        task = asyncio.create_task(watch_to_its_end(older))
        for device in "ab":
            await send(newer, device)
            await settle()
        assert await task == [1, 2]
        assert await watch_to_its_end(newer) == [1, 2]
        assert (await older.runs.accepted_devices("run", 1, 0)).device_ids == ("a",)
        version = await older.runs.version("run", 2)
        assert version == await newer.runs.version("run", None)
        await stop(older, newer)

    run_virtual(main())


async def watch_to_its_end(place: Place) -> list[int]:
    """Watch the Run to its end. Return the numbers of its Versions."""
    events = [entry.event async for entry in place.runs.watch("run", 0)]
    return [event.number for event in events if isinstance(event, VersionPublished)]


def test_a_device_downloads_a_version_from_a_coordinator_that_does_not_drive_its_run(tmp_path: Path) -> None:
    async def main() -> None:
        older, newer = await take_over(tmp_path)
        served_version = m.ServedVersion(run_id="run", epoch=1, number=1)
        check_in = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=40.0, served=served_version)
        task = asyncio.create_task(older.coordinator.check_in("c", check_in))
        for device in "ab":
            await send(newer, device)
            await settle()
        # The Run rests after its second Round. The device learns of it, though it waits elsewhere.
        answer = await task
        assert isinstance(answer, m.Wait)
        assert answer.newest is not None
        assert answer.newest.version == (await newer.runs.version("run", 2)).version
        for chunk in answer.newest.version.parameters.chunks:
            download = m.Download(assignment_id=answer.newest.download_id, sha256=chunk.sha256, offset=0)
            data = b"".join([piece async for piece in older.coordinator.download("c", download)])
            assert data == newer.state.blobs.read(chunk.sha256)
            with pytest.raises(NotFound, match="FN-0613"):
                await anext(older.coordinator.download("d", download))
        await stop(older, newer)

    run_virtual(main())


def test_a_run_that_another_coordinator_started_is_listed(tmp_path: Path) -> None:
    async def main() -> None:
        older, newer = open_place(tmp_path), open_place(tmp_path)
        await older.runs.start()
        await newer.runs.start()
        await start(newer.runs, bundle_in(tmp_path), ALONE)
        await settle()
        assert (await older.runs.listed()).runs == (await newer.runs.listed()).runs
        assert (await older.runs.describe("run", 1)).rounds[0].round == 1
        with raises(NotFound, "run 'none': not found on this coordinator; fanin runs lists its runs"):
            await older.runs.describe("none", 1)
        with raises(NotFound, "run 'none': not found on this coordinator; fanin runs lists its runs"):
            await anext(older.runs.watch("none", 0))
        await stop(older, newer)

    run_virtual(main())


def test_a_run_that_cannot_be_continued_is_read_from_its_record(tmp_path: Path) -> None:
    async def main() -> None:
        before, bundle = open_place(tmp_path), bundle_in(tmp_path)
        await start(before.runs, bundle, ALONE)
        await settle()
        await send(before, "a")
        await settle()
        await before.runs.stop()
        (tmp_path / "state" / "blobs" / bundle.sha256[:2] / bundle.sha256).unlink()
        place = open_place(tmp_path)
        await place.runs.start()
        assert place.runs.running() == ()
        description = await place.runs.describe("run", 9)
        assert description.run.reason.startswith("run run: cannot be taken up: ")
        assert [(info.round, info.version) for info in description.rounds] == [(2, 0), (1, 1)]
        assert (await place.runs.version("run", None)).version.number == 1
        assert (await place.runs.accepted_devices("run", 1, 0)).device_ids == ("a",)
        assert (await anext(place.runs.watch("run", 0))).sequence == 1
        await stop(place)

    run_virtual(main())


def test_a_view_cannot_be_changed(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), ALONE)
        view = await place.runs.view("run")
        with pytest.raises(FrozenInstanceError):
            view.newest = view.newest
        await stop(place)

    run_virtual(main())


def test_runs_are_listed_in_pages(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        run_ids = [f"run-{number:03d}" for number in range(MAX_PAGE_RUNS + 1)]
        for run_id in run_ids:
            await place.state.stores.runs.add_run(values.start(run_id), 5.0)
        first = await place.runs.listed()
        second = await place.runs.listed(RunQuery(after=first.runs[-1].run_id))
        assert [info.run_id for info in (*first.runs, *second.runs)] == run_ids
        assert (first.num_runs, second.num_runs) == (len(run_ids), 1)
        assert (await place.runs.listed(RunQuery(after=run_ids[-1]))).runs == ()
        newest = await place.runs.listed(RunQuery(newest_first=True, limit=2))
        assert [info.run_id for info in newest.runs] == [*reversed(run_ids[-2:])]
        running = RunQuery(states=(RunState.RUNNING,), after=run_ids[-2])
        assert [info.run_id for info in (await place.runs.listed(running)).runs] == run_ids[-1:]
        assert (await place.runs.listed(RunQuery(states=(RunState.FAILED, RunState.PAUSED)))).num_runs == 0
        older = await place.runs.listed(RunQuery(newest_first=True, after=run_ids[-2]))
        assert (older.runs[0].run_id, older.num_runs) == (run_ids[-3], len(run_ids) - 2)
        with pytest.raises(NotFound):
            await place.runs.listed(RunQuery(after="other"))

    run_virtual(main())


def test_a_page_of_runs_with_large_plans_fits_a_message() -> None:
    reason = "x" * (MAX_PAGE_BYTES * 2 // 5)
    large = [RunInfo(run_id=f"{number}", state=RunState.RUNNING, reason=reason) for number in range(5)]
    index, sizes = 0, []
    while index < len(large):
        reply = page_of_runs(ListedRuns(num_runs=len(large), runs=tuple(large[index:])))
        assert [info.run_id for info in reply.runs] == [info.run_id for info in large[index:][: len(reply.runs)]]
        assert reply.ByteSize() < MAX_PAGE_BYTES + 100
        sizes.append(len(reply.runs))
        index += len(reply.runs)
    assert sizes == [2, 2, 1]
    huge = replace(large[0], reason="x" * (MAX_PAGE_BYTES + 1))
    assert len(page_of_runs(ListedRuns(num_runs=2, runs=(huge, huge))).runs) == 1


def test_a_followed_run_whose_record_is_damaged_is_logged_once_and_shown_until_it_is_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        older, newer = await take_over(tmp_path)
        await newer.runs.stop()
        caplog.clear()
        with closing(sqlite3.connect(tmp_path / "state" / "fanin.db")) as connection:
            (before,) = connection.execute("SELECT version_proto FROM versions").fetchone()
            for data, seconds in ((b"\xff", 3600.0), (before, 120.0)):
                with connection:
                    connection.execute("UPDATE versions SET version_proto = ?", (data,))
                await asyncio.sleep(seconds)
                is_shown = "its record cannot be read" in (await older.runs.info("run")).reason
                assert is_shown == (data != before)
        assert sum("its record cannot be read" in message for message in caplog.messages) == 1
        await older.runs.stop()

    run_virtual(main())

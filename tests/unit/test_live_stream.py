"""The stream of events and of Rounds under way: what its readers get, however slow they are, and what it holds."""

import asyncio
import tracemalloc
from contextlib import aclosing
from pathlib import Path

from support.scenes import Scene
from support.staleness import assignment, settle
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.messages import LiveRound, LoggedEvent, RoundOpened, RunResumed, RunWarned
from fanin.server.runs.stream import MAX_QUEUED, LiveStream, StreamReader
from fanin.server.runs.view import Failures
from fanin.server.storage.records import FeedEntry
from fanin.simulation import run_virtual

ALONE = plan(concurrency=1, buffer=1, quorum=1, max_rounds=2, deadline_s=600.0)
LONG = plan(concurrency=2, buffer=2, quorum=2, max_rounds=100, deadline_s=600.0)


def num_stream_tasks() -> int:
    return sum(task.get_name() == "stream" for task in asyncio.all_tasks())


async def open_run(folder: Path) -> tuple[Place, LiveStream]:
    """Return a coordinator with a Run, and its stream."""
    place = open_place(folder)
    await start(place.runs, bundle_in(folder), ALONE)
    await settle()
    return place, LiveStream(place.runs, place.state.history)


async def all_of(stream: LiveStream, *, has_live: bool) -> list[LoggedEvent | LiveRound]:
    """Return the messages of a Run until its end."""
    return [each async for each in stream.watch("run", 0, has_live=has_live)]


def test_a_slow_watcher_and_a_late_one_get_each_event_once(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), LONG)
        stream = LiveStream(place.runs, place.state.history)
        scene = Scene(folder=tmp_path, place=place, tasks=[], num_devices=2)
        quick = asyncio.create_task(all_of(stream, has_live=True))
        slow: list[LoggedEvent | LiveRound] = []
        async with aclosing(stream.watch("run", 0, has_live=False)) as messages:
            slow.append(await anext(messages))
            scene.work()
            record = [entry async for entry in place.runs.watch("run", 0)]
            assert len(record) > MAX_QUEUED
            # It reads only now, so its queue was full.
            slow += [each async for each in messages]
        late = await all_of(stream, has_live=False)
        assert slow == late == record
        assert [each for each in await quick if isinstance(each, LoggedEvent)] == record
        assert any(isinstance(each, LiveRound) and each.num_at_work for each in await quick)
        await asyncio.sleep(10.0)
        assert num_stream_tasks() == 0
        await scene.hang_up()

    run_virtual(main())


def test_the_round_under_way_is_sent_at_first_and_after_each_change(tmp_path: Path) -> None:
    async def main() -> None:
        place, stream = await open_run(tmp_path)
        work = await assignment(place, "a")
        async with stream.reader() as reader:
            first = [await reader.next()]
            progress = m.TrainingProgress(step=3, num_steps=9)
            await place.coordinator.report("a", m.Report(assignment_id=work.assignment_id, progress=progress))
            changed = await reader.next()
            report = m.Report(assignment_id=work.assignment_id, failure="training: got 7 labels [FN-0843]")
            await place.coordinator.report("a", report)
            failed = await reader.next()
            # Nothing changes but the time.
            try:
                async with asyncio.timeout(30.0):
                    assert await reader.next() is None
            except TimeoutError:
                pass
        lives = [
            each.round for each in (*first, changed, failed) if each is not None and not isinstance(each, FeedEntry)
        ]
        assert [each.num_at_work for each in lives] == [1, 1, 0]
        assert lives[1].progress == {"a": progress}
        (count,) = lives[2].failures
        assert (count.code, count.num_times, count.newest) == ("FN-0843", 1, report.failure)
        assert lives[2].last_failure == report.failure and lives[2].num_gave_up == 1
        await place.runs.stop()

    run_virtual(main())


def test_a_reader_holds_no_more_after_ten_thousand_events() -> None:
    async def main() -> None:
        reader, other = StreamReader(), StreamReader("another")

        def publish(begin: int, end: int) -> None:
            for number in range(begin, end):
                logged = LoggedEvent(sequence=number, time=0.0, event=RoundOpened(round=number, base_version=0))
                entry = FeedEntry(position=number, run_id="run", logged=logged)
                reader.send(entry)
                other.send(entry)

        tracemalloc.start()
        publish(1, 2 * MAX_QUEUED)
        before, _ = tracemalloc.get_traced_memory()
        publish(2 * MAX_QUEUED, 10_000)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 4_000
        assert await reader.next() is None
        publish(10_000, 10_001)
        entry = await reader.next()
        assert isinstance(entry, FeedEntry) and entry.position == 10_000

    asyncio.run(main())


def test_reasons_are_counted_by_text_and_bounded() -> None:
    failures = Failures()
    assert (failures.counts(), failures.newest) == ((), "")
    for text in ("a [FN-0001]", "no code", "b [FN-0001]", "a [FN-0001]"):
        failures.note(text)
    assert [(each.code, each.num_times, each.newest) for each in failures.counts()] == [
        ("", 1, "no code"),
        ("FN-0001", 1, "b [FN-0001]"),
        ("FN-0001", 2, "a [FN-0001]"),
    ]
    assert failures.newest == "a [FN-0001]"
    assert not any(each.is_mixed for each in failures.counts())
    for number in range(5_000):
        failures.note(f"{'x' * 1_000} [FN-{number:04d}]")
    assert len(failures.counts()) <= m.MAX_FAILURES
    assert sum(each.num_times for each in failures.counts()) == 5_004
    assert [each.num_times for each in failures.counts() if each.is_mixed] == [5_004 - 4 - 16]
    assert all(len(each.newest) <= 200 and each.newest[-9:-6] == "[FN" for each in failures.counts() if each.code)


def test_a_closed_stream_ends_its_watchers_as_unavailable(tmp_path: Path) -> None:
    async def main() -> None:
        place, stream = await open_run(tmp_path)
        watch = asyncio.create_task(all_of(stream, has_live=True))
        await settle()
        stream.close()
        (error,) = await asyncio.gather(watch, return_exceptions=True)
        assert getattr(error, "code", "") == "FN-1429"
        await place.runs.stop()

    run_virtual(main())


def test_a_watch_of_a_resumed_run_begins_with_its_past(tmp_path: Path) -> None:
    async def main() -> None:
        place, stream = await open_run(tmp_path)
        scene = Scene(folder=tmp_path, place=place, tasks=[], num_devices=1)
        scene.work()
        first = await all_of(stream, has_live=False)
        await scene.command(m.Resume(rounds=1))
        second = await all_of(stream, has_live=False)
        assert second[: len(first)] == first
        kinds = [type(each.event) for each in second[len(first) :] if isinstance(each, LoggedEvent)]
        assert kinds[0] is RunResumed and RunWarned not in kinds
        await scene.hang_up()

    run_virtual(main())

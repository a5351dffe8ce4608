"""Devices that fall silent: the Round no longer waits for them, and their Updates still count while it is open."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.errors import raises
from support.staleness import CAPABILITIES, assignment, send, settle
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, NotFound
from fanin.protos.messages import DevicesGone
from fanin.protos.plans import CohortPlan, Plan
from fanin.server.selection.presence import GONE_INTERVALS, Presence, interval_of
from fanin.simulation import run_virtual

TWO_OF_THREE = plan(concurrency=3, buffer=3, quorum=2, deadline_s=600.0, min_report_s=math.inf, max_rounds=2)
INTERVAL_S = 10.0
"""The interval of a deadline of 600 s."""


@pytest.mark.parametrize(
    ("concurrency", "deadline_s", "interval_s"),
    [(4, 600.0, 10.0), (4, 12.0, 1.0), (4, 86_400.0, 1440.0), (100_000, 600.0, 500.0), (2_000, 60.0, 10.0)],
)
def test_the_interval_grows_with_the_cohort_and_the_deadline(
    concurrency: int, deadline_s: float, interval_s: float
) -> None:
    cohort = CohortPlan(concurrency=concurrency, buffer=concurrency, quorum=1, deadline_s=deadline_s)
    assert interval_of(cohort) == interval_s


def test_a_device_is_gone_after_three_silent_intervals() -> None:
    presence, nothing = Presence(1.0), m.TrainingProgress()
    assert (presence.gone_at, presence.pop_gone(1e9)) == (None, ())
    presence.note("a", 0.0, nothing)
    presence.note("b", 1.0, nothing)
    presence.note("a", 2.0, m.TrainingProgress(step=1))
    assert (presence.gone_at, presence.pop_gone(3.9)) == (1.0 + GONE_INTERVALS, ())
    assert presence.pop_gone(4.0) == ("b",)
    assert presence.of("a") == m.TrainingProgress(step=1) and presence.of("b") is None
    presence.end("a")
    assert presence.gone_at is None


def run(folder: Path, run_plan: Plan, story: Callable[[Place], Awaitable[None]]) -> None:
    """Run a story with a coordinator on a virtual clock."""

    async def main() -> None:
        place = open_place(folder)
        await start(place.runs, bundle_in(folder), run_plan)
        await settle()
        await story(place)
        await place.runs.stop()

    run_virtual(main())


async def begin(place: Place, device: str, *, reports_progress: bool = True) -> m.Assignment:
    """Check in as a device with or without reports of progress. Return its Assignment."""
    capabilities = replace(CAPABILITIES, reports_progress=reports_progress)
    answer = await place.coordinator.check_in(
        device, m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=0.1)
    )
    assert isinstance(answer, m.Assigned), answer
    return answer.assignment


async def report(place: Place, device: str, work: m.Assignment, step: int = 0) -> m.UploadReply:
    report = m.Report(assignment_id=work.assignment_id, progress=m.TrainingProgress(step=step))
    return await place.coordinator.report(device, report)


async def at_work(place: Place) -> tuple[str, ...]:
    return (await place.runs.describe("run", 1)).live.at_work


def gone(place: Place) -> list[DevicesGone]:
    return [entry.event for entry in place.state.runs.events("run") if isinstance(entry.event, DevicesGone)]


def test_a_silent_device_leaves_the_round_with_an_event_and_its_update_still_counts(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        lively, silent = await begin(place, "a"), await begin(place, "b")
        assert lively.progress_s == INTERVAL_S
        for _ in range(4):
            await asyncio.sleep(INTERVAL_S)
            assert (await report(place, "a", lively)).round_state is m.RoundState.OPEN
        assert await at_work(place) == ("a",)
        assert gone(place) == [DevicesGone(round=1, num_devices=1, device_ids=("b",))]
        assert (await send(place, "b", silent)).update_state is m.UpdateState.ACCEPTED

    run(tmp_path, TWO_OF_THREE, story)


def test_the_place_of_a_silent_device_goes_to_a_waiting_one(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        works = {name: await begin(place, name) for name in "abc"}
        waiting = asyncio.create_task(
            place.coordinator.check_in("d", m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=40.0))
        )
        for _ in range(3):
            await asyncio.sleep(INTERVAL_S)
            await report(place, "a", works["a"])
            await report(place, "b", works["b"])
        await settle()
        assert isinstance(await waiting, m.Assigned)
        assert await at_work(place) == ("a", "b", "d")
        # The silent one works after all, and there is no place for it: the Round does not wait for it.
        await report(place, "c", works["c"])
        assert await at_work(place) == ("a", "b", "d")

    run(tmp_path, TWO_OF_THREE, story)


def test_a_device_that_speaks_again_gets_a_free_place_again(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        work = await begin(place, "a")
        await asyncio.sleep(5 * INTERVAL_S)
        assert await at_work(place) == ()
        await report(place, "a", work, step=7)
        assert await at_work(place) == ("a",)
        # Not so after it gave up.
        await place.coordinator.report("a", m.Report(assignment_id=work.assignment_id, failure="no data"))
        await report(place, "a", work)
        assert await at_work(place) == ()

    run(tmp_path, TWO_OF_THREE, story)


def test_after_a_restart_a_report_of_progress_takes_the_place_again(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), TWO_OF_THREE)
        await settle()
        work = await begin(place, "a")
        await place.runs.stop()
        place = open_place(tmp_path)
        await place.runs.start()
        assert await at_work(place) == ()
        await report(place, "a", work)
        assert await at_work(place) == ("a",)
        await place.runs.stop()

    run_virtual(main())


def test_a_device_that_reports_no_progress_is_waited_for(tmp_path: Path) -> None:
    """Another client may not have this ability. Only deadlines count for it."""

    async def story(place: Place) -> None:
        await begin(place, "a", reports_progress=False)
        await asyncio.sleep(500.0)
        assert (await at_work(place), gone(place)) == (("a",), [])

    run(tmp_path, TWO_OF_THREE, story)


def test_a_report_of_progress_needs_an_assignment_and_reads_nothing(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        work = await begin(place, "a")
        with raises(NotFound, f"assignment {work.assignment_id}: not made for device b; check in again"):
            await report(place, "b", work)
        await send(place, "a", work)
        assert (await report(place, "a", work)).round_state is m.RoundState.OPEN
        for name in "bc":
            await send(place, name)
        await settle()
        assert (await report(place, "a", work)).round_state is m.RoundState.CLOSED

    run(tmp_path, TWO_OF_THREE, story)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"step": -1}, "got step -1 of 0, expected numbers from 0 to 4294967295"),
        ({"num_steps": 1 << 32}, "got step 0 of 4294967296, expected numbers from 0 to 4294967295"),
        ({"step": 3, "num_steps": 2}, "got step 3 of 2, expected at most the last step"),
    ],
)
def test_wrong_progress_is_refused(values: dict[str, int], text: str) -> None:
    with raises(InvalidInput, f"progress: {text}"):
        m.TrainingProgress(**values)
    with raises(InvalidInput, "report: got progress and a failure, expected one of them"):
        m.Report(assignment_id="run.1.tag", failure="no", progress=m.TrainingProgress())


def test_a_device_that_missed_the_deadline_is_selected_last(tmp_path: Path) -> None:
    one_of_two = plan(concurrency=2, buffer=2, quorum=1, deadline_s=60.0, min_report_s=math.inf, max_rounds=3)

    async def story(place: Place) -> None:
        await assignment(place, "a")
        await send(place, "b")
        await asyncio.sleep(60.0)
        # Round 2: three devices wait for two places, and the one of Round 1 waits longest.
        check = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=40.0)
        for name in "cd":
            await begin(place, name, reports_progress=False)
        waiting = {name: asyncio.create_task(place.coordinator.check_in(name, check)) for name in "aef"}
        await asyncio.sleep(30.0)
        for name in "cd":
            await send(place, name)
        await settle()
        assert {name for name, task in waiting.items() if task.done()} == {"e", "f"}
        for task in waiting.values():
            task.cancel()
        await asyncio.gather(*waiting.values(), return_exceptions=True)

    run(tmp_path, one_of_two, story)

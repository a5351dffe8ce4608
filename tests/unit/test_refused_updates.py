"""A refused Update gives up the place of its device, and a Run does not end because of a few devices."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.errors import raises
from support.staleness import CAPABILITIES, assignment, check_in, send, settle, update
from support.virtual import PUBLISHER, SHAPES, Place, bundle_in, open_place, plan, start

from fanin.clients.testing import (
    Habits,
    Lie,
    LoopbackTransport,
    Member,
    SyntheticTrainer,
    run_virtual,
    synthetic_bundle,
)
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, InvalidUpdate
from fanin.protos.messages import RoundFailed, RunRested, RunState
from fanin.protos.plans import Plan
from fanin.simulation import Federation

ONE = plan(concurrency=1, buffer=1, quorum=1, deadline_s=600.0, max_rounds=3)


def run(folder: Path, run_plan: Plan, story: Callable[[Place], Awaitable[None]]) -> None:
    """Run a story with a coordinator on a virtual clock."""

    async def main() -> None:
        place = open_place(folder)
        await start(place.runs, bundle_in(folder), run_plan)
        await settle()
        await story(place)
        await place.runs.stop()

    run_virtual(main())


async def send_wrong(place: Place, device: str, work: m.Assignment) -> None:
    """Send an Update of another Version, which is refused."""
    header, payload = update(work)
    line = LoopbackTransport(fleet=place.coordinator, device=device)
    wrong = work.version.sha256[:8]
    with raises(InvalidUpdate, f"update: trained from version 00000000.., expected {wrong}..; check in again"):
        await line.upload(replace(header, version_sha256="0" * 64), lambda at, size: payload[at : at + size])


async def waits_s(place: Place, device: str) -> float:
    """Check in until there is work. Return how long that took."""
    began_s = asyncio.get_running_loop().time()
    while True:
        check = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=40.0)
        if isinstance(await place.coordinator.check_in(device, check), m.Assigned):
            return round(asyncio.get_running_loop().time() - began_s, 3)


def test_the_place_of_a_refused_device_is_free_at_once(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        work = await assignment(place, "a")
        check = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=40.0)
        waiting = asyncio.create_task(place.coordinator.check_in("b", check))
        await settle()
        assert not waiting.done()
        await send_wrong(place, "a", work)
        await settle()
        answer = await waiting
        assert isinstance(answer, m.Assigned)
        # A report of the failure changes nothing more.
        report = m.Report(assignment_id=work.assignment_id, failure="refused")
        assert (await place.coordinator.report("a", report)).update_state is m.UpdateState.DISCARDED
        assert (await place.runs.describe("run", 1)).at_work == ("b",)
        info = await place.runs.info("run")
        assert info.reason == ""
        assert (await send(place, "b", answer.assignment)).update_state is m.UpdateState.ACCEPTED

    run(tmp_path, ONE, story)


def test_the_same_assignment_is_offered_again_after_pauses_that_grow_until_an_update_is_accepted(
    tmp_path: Path,
) -> None:
    """No other device waits, so the Round needs this one."""

    async def story(place: Place) -> None:
        pauses_s = []
        for _ in range(4):
            await send_wrong(place, "a", await assignment(place, "a"))
            pauses_s.append(await waits_s(place, "a"))
        assert pauses_s == [10.0, 20.0, 40.0, 80.0]
        assert (await send(place, "a")).update_state is m.UpdateState.ACCEPTED
        await settle()
        await send_wrong(place, "a", await assignment(place, "a"))
        assert await waits_s(place, "a") == 10.0

    run(tmp_path, ONE, story)


def test_an_upload_that_is_no_update_gives_up_the_place_too(tmp_path: Path) -> None:
    """Its first message names no Assignment."""

    async def story(place: Place) -> None:
        await assignment(place, "a")
        place.coordinator.refuse("a", "upload: got no header")
        place.coordinator.refuse("stranger", "upload: got no header")
        assert isinstance(await check_in(place, "a"), m.Wait)
        await assignment(place, "b")

    run(tmp_path, ONE, story)


def test_a_wrong_piece_gives_up_the_place_too(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        work = await assignment(place, "a")
        header, _ = update(work)

        async def pieces() -> AsyncIterator[m.Piece]:
            raise InvalidInput("upload: got a second header, expected pieces")
            yield

        with raises(InvalidInput, "upload: got a second header, expected pieces"):
            async for _ in place.coordinator.upload("a", header, pieces()):
                pass
        await assignment(place, "b")

    run(tmp_path, ONE, story)


def test_a_refused_device_is_selected_last(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        await send_wrong(place, "bad", await assignment(place, "bad"))
        await asyncio.sleep(20.0)
        work = await assignment(place, "good")
        check = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=40.0)
        waiting = {name: asyncio.create_task(place.coordinator.check_in(name, check)) for name in ("bad", "new")}
        await settle()
        await send(place, "good", work)
        await settle()
        assert [name for name, task in waiting.items() if task.done()] == ["new"]
        waiting["bad"].cancel()
        await asyncio.gather(waiting["bad"], return_exceptions=True)

    run(tmp_path, ONE, story)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_does_not_fail_because_of_silent_devices_while_others_wait(seed: int, tmp_path: Path) -> None:
    """More of them than three Rounds could teach: 6 silent devices of 12, and 2 places."""

    bundle = synthetic_bundle(tmp_path, PUBLISHER, SHAPES)

    async def main() -> list[object]:
        async with Federation(seed=seed) as federation:
            run_plan = plan(concurrency=2, buffer=2, quorum=2, deadline_s=60.0, max_rounds=5)
            await federation.start_run("run", run_plan, bundle, PUBLISHER)
            for index in range(12):
                work_s = (1e6, 1e6) if index % 2 else (1.0, 2.0)
                trainer = SyntheticTrainer(partition=index)
                federation.join(Member(device=f"d{index}", trainer=trainer, habits=Habits(work_s=work_s)), bundle)
            return [entry.event async for entry in federation.watch("run")]

    events = run_virtual(main())
    failures = [event for event in events if isinstance(event, RoundFailed)]
    assert isinstance(events[-1], RunRested)
    # Without any Update a failure counts: then the cause is probably not a few devices.
    assert events[-1].state is RunState.FINISHED or all(not event.others_wait for event in failures[-3:])


def test_a_liar_does_not_keep_the_others_from_their_rounds(tmp_path: Path) -> None:

    bundle = synthetic_bundle(tmp_path, PUBLISHER, SHAPES)

    async def main() -> tuple[list[object], float]:
        async with Federation(seed=1) as federation:
            run_plan = plan(concurrency=4, buffer=4, quorum=4, deadline_s=60.0, max_rounds=5)
            await federation.start_run("run", run_plan, bundle, PUBLISHER)
            for index in range(8):
                lies = Habits(work_s=(1.0, 1.0), lie=float(index == 0), lies=(Lie.COUNT,))
                trainer = SyntheticTrainer(partition=index)
                federation.join(Member(device=f"d{index}", trainer=trainer, habits=lies), bundle)
            events = [entry.event async for entry in federation.watch("run")]
            return events, asyncio.get_running_loop().time()

    events, seconds = run_virtual(main())
    assert not [event for event in events if isinstance(event, RoundFailed)]
    assert isinstance(events[-1], RunRested) and events[-1].state is RunState.FINISHED
    assert seconds < 60.0

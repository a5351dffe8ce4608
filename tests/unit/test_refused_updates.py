"""A refused Update gives up the place of its device, and a Run does not end because of a few devices."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.errors import raises
from support.staleness import CAPABILITIES, TABLE, assignment, check_in, send, settle, update
from support.virtual import PUBLISHER, SHAPES, Place, bundle_in, open_place, plan, start

from fanin.clients.device.updates import Change, make_update
from fanin.commands.console.show import waits_row, waits_text
from fanin.commands.control.describe import description_text
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, InvalidUpdate
from fanin.protos.messages import RoundFailed, RunRested, RunState
from fanin.protos.plans import Plan
from fanin.simulation import (
    Federation,
    Habits,
    Lie,
    LoopbackTransport,
    Member,
    SyntheticTrainer,
    run_virtual,
    synthetic_bundle,
)

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


def test_an_update_of_no_examples_fills_no_place_and_ends_no_run(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        for _ in range(4):
            work = await assignment(place, "empty")
            change = Change(values=np.zeros(TABLE.num_values, np.float32), counts={m.EXAMPLES: 0})
            header, payload = make_update(work, TABLE, change, m.Telemetry(runtime="synthetic 1"))
            line = LoopbackTransport(fleet=place.coordinator, device="empty")
            text = "update: got examples = 0, expected at least 1; check in again when this device has examples"
            with raises(InvalidUpdate, text):
                await line.upload(header, lambda at, size, data=payload: data[at : at + size])
            await asyncio.sleep(400.0)
        await send(place, "b")
        await settle()
        info = await place.runs.info("run")
        assert (info.state, info.version, info.reason) == (RunState.RUNNING, 1, "")

    run(tmp_path, ONE, story)


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
        assert (await place.runs.describe("run", 1)).live.at_work == ("b",)
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


@pytest.mark.parametrize("is_refused", [False, True], ids=["given up", "refused"])
def test_an_assignment_is_over_after_a_report_of_a_failure_or_a_refused_update(
    tmp_path: Path, *, is_refused: bool
) -> None:
    """Neither progress nor an Update counts any more, until a check-in returns the Assignment again."""

    async def story(place: Place) -> None:
        work = await assignment(place, "a")
        progress = m.Report(assignment_id=work.assignment_id, progress=m.TrainingProgress(step=1))
        assert (await place.coordinator.report("a", progress)).round_state is m.RoundState.OPEN
        if is_refused:
            await send_wrong(place, "a", work)
        else:
            await place.coordinator.report("a", m.Report(assignment_id=work.assignment_id, failure="no memory"))
        over = m.UploadReply(round_state=m.RoundState.CLOSED, update_state=m.UpdateState.DISCARDED)
        assert await place.coordinator.report("a", progress) == over
        assert (await send(place, "a", work)).update_state is m.UpdateState.DISCARDED
        description = await place.runs.describe("run", 1)
        assert (description.live.at_work, description.rounds[0].num_updates) == ((), 0)
        assert (description.live.num_gave_up, description.live.num_refused) == (not is_refused, is_refused)
        named = "1 device was refused, the last with: 'update: trained" if is_refused else "1 device gave up, the last"
        assert named in description.run.reason
        await asyncio.sleep(10.0)
        assert (await assignment(place, "a")).assignment_id == work.assignment_id
        assert (await place.coordinator.report("a", progress)).round_state is m.RoundState.OPEN
        assert (await send(place, "a", work)).update_state is m.UpdateState.ACCEPTED

    run(tmp_path, ONE, story)


def test_an_upload_under_way_ends_when_its_device_gives_up(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        work = await assignment(place, "a")
        header, _ = update(work)
        goes_on = asyncio.Event()

        async def pieces() -> AsyncIterator[m.Piece]:
            await goes_on.wait()
            yield m.Piece(offset=0, data=b"")

        replies = place.coordinator.upload("a", header, pieces())
        assert (await anext(replies)).update_state is m.UpdateState.RECEIVING
        last = asyncio.ensure_future(anext(replies))
        await settle()
        await place.coordinator.report("a", m.Report(assignment_id=work.assignment_id, failure="no memory"))
        assert (await last).update_state is m.UpdateState.DISCARDED

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


def slow_run(folder: Path, seed: int, num_slow: int, num_devices: int, slow_s: float) -> list[object]:
    """Return the events of a Run with 2 places and a deadline of 60 s. Some devices take ``slow_s`` for an Update."""
    bundle = synthetic_bundle(folder, PUBLISHER, SHAPES)

    async def main() -> list[object]:
        async with Federation(seed=seed) as federation:
            run_plan = plan(concurrency=2, buffer=2, quorum=2, deadline_s=60.0, max_rounds=5)
            await federation.start_run("run", run_plan, bundle, PUBLISHER)
            for index in range(num_devices):
                work_s = (slow_s, slow_s) if index < num_slow else (1.0, 2.0)
                trainer = SyntheticTrainer(partition=index)
                federation.join(Member(device=f"d{index}", trainer=trainer, habits=Habits(work_s=work_s)), bundle)
            return [entry.event async for entry in federation.watch("run")]

    return run_virtual(main())


@pytest.mark.parametrize("seed", range(3))
def test_a_run_does_not_fail_because_of_silent_devices_while_others_wait(seed: int, tmp_path: Path) -> None:
    """More of them than three Rounds could teach, so that several Rounds in a row have no Update at all."""
    events = slow_run(tmp_path, seed, num_slow=16, num_devices=20, slow_s=1e6)
    failures = [event for event in events if isinstance(event, RoundFailed)]
    assert len(failures) > 3
    assert isinstance(events[-1], RunRested)
    assert events[-1].state is RunState.FINISHED


def test_a_run_fails_once_every_device_has_cost_a_round(tmp_path: Path) -> None:
    """Then the cause is the Plan or the network, and no others are left."""
    events = slow_run(tmp_path, 0, num_slow=8, num_devices=8, slow_s=100.0)
    rested = events[-1]
    assert isinstance(rested, RunRested)
    assert rested.state is RunState.FAILED
    assert rested.reason == "3 rounds in a row: 0 updates within 60 s, expected at least 2 (cohort.quorum)"
    # Others wait at the end of the first three, so these do not count.
    assert len([event for event in events if isinstance(event, RoundFailed)]) == 6


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


def test_a_described_run_has_the_last_report_of_each_device_at_work(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        work = await assignment(place, "a")
        last = m.TrainingProgress(step=3, num_steps=9, epoch=1, num_epochs=2)
        await place.coordinator.report("a", m.Report(assignment_id=work.assignment_id, progress=last))
        description = await place.runs.describe("run", 1)
        assert description.live.progress == {"a": last}
        assert "            a  step 3 of 9, epoch 1 of 2\n" in description_text(description)
        assert (
            waits_text(description.live) == "round 1 waits: 1 device at work, 33 to 33 % trained, 0 waiting, 0 gave up"
        )
        progress = {"step": 3, "num_steps": 9, "epoch": 1, "num_epochs": 2}
        assert waits_row(description.live)["progress"] == {"a": progress}

    run(tmp_path, ONE, story)

"""A Run whose devices connect late or one by one: it waits for its quorum, and then ends as usual."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.scenes import Scene, play, versions, wait_for_end
from support.staleness import assignment, check_in, send, settle
from support.virtual import PUBLISHER, bundle_in, open_place, plan, start

from fanin.clients.device.session.events import SessionPhase
from fanin.protos import messages as m
from fanin.protos.messages import RoundFailed, RunState
from fanin.protos.plans import StopPlan
from fanin.simulation import LoopbackTransport, SyntheticTrainer, VirtualDevice, run_virtual

TWO = plan(concurrency=2, buffer=2, quorum=2, deadline_s=60.0, max_rounds=2)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_run_continues_as_soon_as_its_second_device_connects(tmp_path: Path, restarts: bool) -> None:
    async def story(scene: Scene) -> None:
        # Many deadlines pass while only the first device is connected.
        await asyncio.sleep(1000.0)
        if restarts:
            await scene.restart()
            await asyncio.sleep(1000.0)
        transport = LoopbackTransport(fleet=scene.place.coordinator, device="late", latency_s=0.01)
        late = VirtualDevice(
            transport, SyntheticTrainer(partition=9), (PUBLISHER.public,), random.Random(9), lambda *_: 10.0
        )
        scene.tasks.append(asyncio.create_task(late.run()))
        await wait_for_end(scene)
        assert (await scene.place.runs.info("run")).state is RunState.FINISHED

    events = play(tmp_path, story, TWO, devices=1)
    assert [event.number for event in versions(events)] == [1, 2]
    assert not [event for event in events if isinstance(event, RoundFailed)]


def test_a_simulated_device_ends_its_work_once_the_round_has_closed(tmp_path: Path) -> None:
    """As a device does: the reply to a report of progress says that the Round does not need its Update."""

    async def story(scene: Scene) -> None:
        line = LoopbackTransport(fleet=scene.place.coordinator, device="slow", latency_s=0.01)
        slow = VirtualDevice(
            line, SyntheticTrainer(partition=9), (PUBLISHER.public,), random.Random(9), lambda *_: 50_000.0
        )
        scene.tasks.append(asyncio.create_task(slow.run()))
        await wait_for_end(scene)
        assert slow.session.phase is SessionPhase.TRAINING
        await asyncio.sleep(1000.0)
        assert slow.session.phase is SessionPhase.IDLE

    play(
        tmp_path, story, replace(TWO, cohort=replace(TWO.cohort, concurrency=3), stop=StopPlan(max_rounds=1)), devices=2
    )


def test_a_run_without_devices_keeps_waiting(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(10_000.0)
        assert (await scene.place.runs.info("run")).state is RunState.RUNNING
        assert (await scene.place.runs.describe("run", 1)).live.deadline_s == 0.0

    assert not [event for event in play(tmp_path, story, TWO, devices=0) if isinstance(event, RoundFailed)]


def test_devices_that_miss_their_deadlines_fail_the_run(tmp_path: Path) -> None:
    """In three Rounds the quorum was assigned, and each time it missed the deadline."""

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), TWO)
        for _ in range(3):
            await settle()
            first = await assignment(place, "a")
            assert first.deadline_s == 60.0
            await asyncio.sleep(500.0)
            assert (await assignment(place, "b")).deadline_s == 60.0
            await asyncio.sleep(59.0)
        await settle()
        info = await place.runs.info("run")
        assert info.state is RunState.FAILED
        assert info.reason == "3 rounds in a row: 0 updates within 60 s, expected at least 2 (cohort.quorum)"
        assert isinstance(await check_in(place, "a"), m.Wait)
        await place.runs.stop()

    run_virtual(main())


def test_an_update_of_an_early_device_counts_when_the_others_connect(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), TWO)
        await settle()
        assert (await send(place, "a")).update_state is m.UpdateState.ACCEPTED
        await asyncio.sleep(1000.0)
        await send(place, "b")
        await settle()
        assert (await place.runs.info("run")).version == 1
        await place.runs.stop()

    run_virtual(main())

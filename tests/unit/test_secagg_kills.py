"""Rounds of secure aggregation whose coordinator or devices are killed: the Version has the same bits."""

import asyncio
import random
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import pytest
from support.endings import NUM_DEVICES, Ending, begin, ending, work_times
from support.mortal import Mortal
from support.secagg import plan_of

from fanin.simulation import run_virtual

NUM_MOMENTS = 25
PLAN = plan_of("secagg", NUM_DEVICES, NUM_DEVICES)


def ended(folder: Path, kill_at: Collection[int] = (), *, loses_power: bool = False) -> Ending:
    async def federate(path: Path, kills: Collection[int], power: bool) -> Ending:
        mortal = Mortal(path, kills, loses_power=power)
        scene = await begin(mortal, path, PLAN, work_times(10.0, 10.0))
        await scene.await_rest()
        return await scene.end({})

    return ending(federate, folder, kill_at, loses_power=loses_power)


def test_a_coordinator_killed_after_the_closed_set_unmasks_the_same_sum(tmp_path: Path) -> None:
    undisturbed = ended(tmp_path / "undisturbed")
    number = undisturbed.moments.index("after Close") + 1
    assert ended(tmp_path / "killed", (number,)).record == undisturbed.record


@pytest.mark.nightly
def test_a_coordinator_killed_around_each_effect_unmasks_the_same_sum(tmp_path: Path) -> None:
    undisturbed = ended(tmp_path / "undisturbed")
    effects = ("Freeze", "Accumulate", "Close", "Fold", "Publish")
    around = [f"{side} {effect}" for side in ("before", "after") for effect in effects]
    moments = [number for number, what in enumerate(undisturbed.moments, 1) if what in around]
    assert sum(undisturbed.moments[number - 1] == "before Freeze" for number in moments) == 3
    for number in moments:
        killed = ended(tmp_path / f"killed-{number}", (number,))
        assert killed.record == undisturbed.record, (number, undisturbed.moments[number - 1])


@pytest.mark.nightly
@pytest.mark.parametrize("loses_power", [False, True])
def test_a_coordinator_killed_at_any_moment_unmasks_the_same_sum(tmp_path: Path, loses_power: bool) -> None:
    undisturbed = ended(tmp_path / "undisturbed")
    opened = undisturbed.moments.index("after GoOn")
    moments = random.Random(0).sample(range(opened, len(undisturbed.moments) + 1), NUM_MOMENTS)
    for number in moments:
        killed = ended(tmp_path / f"killed-{number}", (number,), loses_power=loses_power)
        assert killed.record == undisturbed.record, (number, undisturbed.moments[number - 1])


@pytest.mark.nightly
def test_devices_that_restart_at_any_moment_repeat_their_messages(tmp_path: Path) -> None:
    """A restarted device has its folder and its journal. It gets its Assignment again, and sends the same bytes."""

    async def federate(path: Path, restart_s: float) -> Ending:
        mortal = Mortal(path)
        scene = await begin(mortal, path, PLAN, work_times(10.0, 10.0))
        for task in scene.tasks:
            task.cancel()
        await asyncio.gather(*scene.tasks, return_exceptions=True)
        devices = mortal.devices(NUM_DEVICES, lambda _: 5.0)

        async def restarting(index: int) -> None:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(restart_s + 0.1 * index):
                        await devices[index].run()
                devices[index].restart()

        scene.tasks[:] = [asyncio.create_task(restarting(index)) for index in range(NUM_DEVICES)]
        await scene.await_rest()
        return await scene.end({})

    async def main(restart_s: float) -> Ending:
        async with asyncio.timeout(10_000.0):
            return await federate(tmp_path / f"{restart_s}", restart_s)

    undisturbed = run_virtual(main(1000.0))
    # Shorter than the exchanges, about as long as them, and longer than the training.
    for restart_s in (5.4, 5.7, 6.1, 7.3):
        restarted = run_virtual(main(restart_s))
        assert restarted.record == undisturbed.record, restart_s

"""Commands at difficult moments: in every phase of a Round, repeated, and with effects still queued."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from support.errors import raises
from support.nightly import in_ci
from support.scenes import Scene, play, versions, wait_for_end

from fanin.protos.errors import InvalidInput
from fanin.protos.messages import (
    Adopt,
    Command,
    Pause,
    Resume,
    RoundClosed,
    RunState,
    Stop,
    VersionPublished,
)

T = TypeVar("T")


@pytest.mark.parametrize("seed", in_ci(range(6), range(2)))
def test_commands_at_any_moment_leave_the_versions_of_a_run_bit_identical(tmp_path: Path, seed: int) -> None:
    """Pauses, restarts and resumptions at random times, in any phase, give the Versions of an undisturbed Run."""
    reference = [event.version_sha256 for event in versions(play(tmp_path / "a", wait_for_end))]

    async def story(scene: Scene) -> None:
        rng = random.Random(seed)
        for _ in range(12):
            await asyncio.sleep(rng.choice((0.0, 0.01, rng.uniform(0, 12))))
            if not (await scene.place.runs.info("run")).state.is_live:
                break
            await rng.choice((lambda: scene.command(Pause()), lambda: scene.command(Resume()), scene.restart))()
        if (await scene.place.runs.info("run")).state is RunState.PAUSED:
            await scene.command(Resume())
        await wait_for_end(scene)

    events = play(tmp_path / "b", story)
    assert [event.version_sha256 for event in versions(events)] == reference


def test_a_run_continues_after_a_round_that_was_stopped_with_pending_effects(tmp_path: Path) -> None:
    """Effects of a stopped Round are dropped, in any order of operators' commands and Updates."""

    async def story(scene: Scene) -> None:
        gate = asyncio.Event()

        async def slow_lane(work: Callable[[], object]) -> object:
            await gate.wait()
            return work()

        await asyncio.sleep(5.0)
        object.__setattr__(scene.place.state.files, "lane", slow_lane)
        await asyncio.sleep(0.0)
        await scene.command(Pause())
        await scene.command(Resume())
        await scene.command(Stop())
        gate.set()
        await asyncio.sleep(1.0)
        await scene.command(Resume(rounds=2))
        await wait_for_end(scene)

    events = play(tmp_path, story)
    assert [event.number for event in versions(events)] == [1, 2]


def test_a_command_whose_caller_failed_reaches_the_machine_when_it_is_repeated(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(5.0)
        await scene.command(Pause())
        control = scene.place.state.stores.control
        # As if the process had recorded the command, and had failed before it informed the machine.
        now_s = asyncio.get_running_loop().time()
        await control.resume(Command(command_id="again", run_id="run", what=Resume()), 0, now_s)
        assert (await scene.command(Resume(), "again")).state is RunState.RUNNING
        await wait_for_end(scene)

    assert [event.number for event in versions(play(tmp_path, story))] == [1, 2, 3]


@pytest.mark.parametrize("after_s", in_ci((0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 1.0), (0.0, 0.03, 0.1)))
def test_rounds_that_are_requested_while_the_last_one_ends_are_run(tmp_path: Path, after_s: float) -> None:
    async def slow_store(work: Callable[[], T]) -> T:
        await asyncio.sleep(0.01)
        result = work()
        await asyncio.sleep(0.01)
        return result

    async def story(scene: Scene) -> None:
        await scene.until(RoundClosed, 3)
        await scene.command(Pause())
        await asyncio.sleep(after_s)
        await scene.command(Resume(rounds=2))
        await wait_for_end(scene)

    events = play(tmp_path, story, store_lane=slow_store)
    assert [event.number for event in versions(events)] == [1, 2, 3, 4, 5]


def test_a_rollback_keeps_the_remaining_rounds(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await scene.until(VersionPublished, 2)
        await scene.command(Pause())
        await scene.command(Adopt(number=1))
        await scene.command(Resume())
        await wait_for_end(scene)

    events = play(tmp_path, story)
    assert [event.round for event in versions(events)] == [1, 2, 0, 4]


@pytest.mark.parametrize("arguments", [{"rounds": -1}, {"rounds": 1 << 32}])
def test_rounds_must_fit_the_wire_format(arguments: dict[str, int]) -> None:
    for call in (lambda: Resume(**arguments), lambda: Adopt(number=1, **arguments)):
        with raises(InvalidInput, f"rounds: got {arguments['rounds']}, expected 0 to 4294967295"):
            call()
    with raises(InvalidInput, f"version: got number {1 << 63}, expected 0 to {(1 << 63) - 1}"):
        Adopt(number=1 << 63)

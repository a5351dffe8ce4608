"""A coordinator that is killed at any critical moment ends its Run with the bits of an undisturbed Run.

The tests run on a virtual clock, so there is time for all moments. ``test_kills`` does the same with real processes.
`make kills` runs both, including the nightly tests.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Final, get_args, get_type_hints

import numpy as np
import pytest
from support.endings import NUM_DEVICES, Ending, Story, begin, ending, work_times
from support.mortal import Mortal
from support.nightly import in_ci
from support.stage_runs import FEEDBACK, scaffold
from support.virtual import PUBLISHER, plan

from fanin.clients.versions import next_version
from fanin.protos.chunks import cut
from fanin.protos.messages import Adopt, Command, Pause, Resume, RunInfo, Stop
from fanin.protos.plans import Plan
from fanin.server.protocols import events as e
from fanin.server.runs.catalog import Runs

EFFECTS: Final = [
    effect.__name__
    for effect in get_args(e.Effect)
    if effect
    not in (e.Assign, e.Fail, e.RecordExtension, e.RecordLack, e.RecordGone, e.Warn, e.LookForAbsent, e.Freeze)
]
"""All effects that the driver's worker executes on a sound disk.

Assign is excluded: it is answered at once and leaves nothing durable, so a device without an answer asks again. The
others have tests of their own: no device of this Run is silent, slow, required or online twice, and its Rounds have no
messages.
"""
COMMANDS: Final = {action.__name__ for action in get_args(get_type_hints(Command)["what"])}
NUM_MOMENTS: Final = 50


def full_plan(concurrency: int, max_rounds: int) -> Plan:
    """Return a Plan without spare places.

    It has a rule that reads payloads again, an optimizer and stages that have state, and ranges that devices report.
    """
    return plan(
        concurrency=concurrency,
        buffer=concurrency,
        quorum=concurrency,
        deadline_s=60.0,
        max_rounds=max_rounds,
        rule="trimmed_mean",
        rule_options={"trim": 0.4},
        outer_optimizer="nesterov",
        stages=(scaffold(NUM_DEVICES), FEEDBACK),
        ranges="devices",
    )


async def federate(folder: Path, kill_at: Collection[int], loses_power: bool = False) -> Ending:
    """Run a Round that fails because a device misses its deadline, and two Rounds that publish Versions."""
    mortal = Mortal(folder, kill_at, loses_power=loses_power)
    scene = await begin(mortal, folder, full_plan(NUM_DEVICES, 2), work_times(80.0, 10.0))
    await scene.await_rest()
    return await scene.end({})


async def federate_in_time(folder: Path, kill_at: Collection[int], loses_power: bool = False) -> Ending:
    """Run the same Plan, with all devices in time."""
    mortal = Mortal(folder, kill_at, loses_power=loses_power)
    scene = await begin(mortal, folder, full_plan(NUM_DEVICES, 2), work_times(10.0, 10.0))
    await scene.await_rest()
    return await scene.end({})


async def stream(folder: Path, kill_at: Collection[int], loses_power: bool = False) -> Ending:
    """Run Rounds that two of three Updates close. Time decides in which later Round the third one counts."""
    run_plan = plan(
        concurrency=NUM_DEVICES,
        buffer=2,
        quorum=1,
        deadline_s=60.0,
        max_rounds=4,
        max_staleness=3,
        outer_optimizer="nesterov",
    )
    mortal = Mortal(folder, kill_at, loses_power=loses_power)
    scene = await begin(mortal, folder, run_plan, work_times(25.0, 10.0))
    await scene.await_rest()
    return await scene.end({})


async def command(folder: Path, kill_at: Collection[int], loses_power: bool = False) -> Ending:
    """Let an operator pause, resume, roll back, publish, resume and stop."""
    mortal = Mortal(folder, kill_at, loses_power=loses_power)
    scene = await begin(mortal, folder, full_plan(NUM_DEVICES, 2), work_times(30.0, 30.0))
    spans: dict[str, range] = {}

    async def carry_out(name: str, call: Callable[[Runs], Awaitable[RunInfo]]) -> None:
        first = len(mortal.moments) + 1
        await mortal.operate(call)
        spans[name] = range(first, len(mortal.moments) + 1)

    async def send(action: Pause | Resume | Stop | Adopt) -> None:
        name = type(action).__name__
        request = Command(command_id=f"{name}-{len(spans)}", run_id="run", what=action)
        await carry_out(name, lambda runs: runs.command(request))

    await asyncio.sleep(5.0)
    await send(Pause())
    await asyncio.sleep(5.0)
    await send(Resume())
    await scene.await_rest()
    await send(Adopt(number=1, rounds=1))
    await scene.await_rest()
    parent = (await mortal.operate(lambda runs: runs.version("run", None))).version
    version, data = next_version(parent, np.ones(22, np.float32), scene.bundle, PUBLISHER)

    async def publish(runs: Runs) -> RunInfo:
        for ref, piece in cut(data):
            await runs.put_chunk(ref.sha256, piece)
        return await runs.publish_version(version, 5)

    await carry_out("publish", publish)
    await asyncio.sleep(5.0)
    await send(Stop())
    return await scene.end(spans)


@pytest.fixture(scope="module")
def expected_ending(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """The ending of the undisturbed Run."""
    return ending(federate, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def timely_ending(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """The ending of the Run in which no device is late."""
    return ending(federate_in_time, tmp_path_factory.mktemp("in_time"))


def possible_records(expected_ending: Ending, timely_ending: Ending, number: int) -> tuple[object, ...]:
    """Return the possible endings after a kill at a moment.

    An Assignment has no row. So a coordinator that is killed after it has sent the third one, but before it has written
    the deadline, knows two devices. It waits for a third, and the late device is in time for it.
    """
    moments = expected_ending.moments
    window = range(moments.index("before GoOn"), moments.index("after KeepDeadline"))
    return (expected_ending.record, timely_ending.record) if number - 1 in window else (expected_ending.record,)


@pytest.fixture(scope="module")
def command_ending(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """The ending of the Run with commands that is otherwise undisturbed."""
    return ending(command, tmp_path_factory.mktemp("commanded"))


@pytest.fixture(scope="module")
def stream_ending(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """The ending of the undisturbed Run with stale Updates."""
    return ending(stream, tmp_path_factory.mktemp("streamed"))


def draw_moments(seed: str, moments: tuple[str, ...]) -> list[int]:
    """Draw one moment of the Run, and sometimes a second one soon after, during the recovery from the first kill."""
    rng = random.Random(seed)
    first = rng.randint(1, len(moments))
    return [first, first + rng.randint(1, 40)] if rng.random() < 0.3 else [first]


def test_the_undisturbed_run_has_every_effect_and_every_command(
    expected_ending: Ending, command_ending: Ending
) -> None:
    moments = {moment for moment in expected_ending.moments if moment.split()[1] not in ("work", "change", "sync")}
    assert moments == {f"{side} {effect}" for side in ("before", "after") for effect in EFFECTS}
    assert [event[0] for event in expected_ending.record].count("RoundFailed") == 1
    assert [event[0] for event in expected_ending.record].count("VersionPublished") == 2
    assert set(command_ending.commands) == COMMANDS | {"publish"}
    assert [event[0] for event in command_ending.record].count("VersionPublished") == 5


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_killed_before_and_after_every_effect(expected_ending: Ending, tmp_path: Path, effect: str, side: str) -> None:
    moment = f"{side} {effect}"
    numbers = [number for number, name in enumerate(expected_ending.moments, 1) if name == moment]
    for number in {numbers[0], numbers[-1]}:
        killed_ending = ending(federate, tmp_path / str(number), [number])
        assert killed_ending.kills == (moment,)
        assert killed_ending.record == expected_ending.record


@pytest.mark.parametrize("seed", in_ci(range(NUM_MOMENTS), range(NUM_MOMENTS // 16)))
def test_killed_at_random_moments(expected_ending: Ending, timely_ending: Ending, tmp_path: Path, seed: int) -> None:
    numbers = draw_moments(f"kill {seed}", expected_ending.moments)
    killed_ending = ending(federate, tmp_path, numbers)
    assert killed_ending.kills
    assert killed_ending.record in possible_records(expected_ending, timely_ending, numbers[0])


@pytest.mark.parametrize("name", [*sorted(COMMANDS), "publish"])
def test_killed_while_a_command_is_carried_out(command_ending: Ending, tmp_path: Path, name: str) -> None:
    # Each kill is right after a change, including the command's transaction, and before any notification. A kill
    # between two changes leaves the result of the first one. Every state is in the nightly suite.
    numbers = [
        number for number in command_ending.commands[name] if command_ending.moments[number - 1] == "after change"
    ]
    assert numbers
    for number in numbers:
        killed_ending = ending(command, tmp_path / str(number), [number])
        assert killed_ending.kills == ("after change",)
        assert killed_ending.record == command_ending.record


@pytest.mark.parametrize("seed", in_ci(range(NUM_MOMENTS // 3), range(NUM_MOMENTS // 16)))
def test_the_synced_state_is_enough(expected_ending: Ending, timely_ending: Ending, tmp_path: Path, seed: int) -> None:
    numbers = draw_moments(f"power {seed}", expected_ending.moments)
    killed_ending = ending(federate, tmp_path, numbers, loses_power=True)
    assert killed_ending.kills
    assert killed_ending.record in possible_records(expected_ending, timely_ending, numbers[0])


@pytest.mark.parametrize("seed", in_ci(range(NUM_MOMENTS // 5), range(NUM_MOMENTS // 24)))
def test_stale_updates_are_folded_once_after_any_kill(stream_ending: Ending, tmp_path: Path, seed: int) -> None:
    # The closed sets depend on time here. ``end`` checks that each of them gives its Version, and that no Update is
    # lost.
    assert stream_ending.num_stale
    killed_ending = ending(
        stream, tmp_path, draw_moments(f"stale {seed}", stream_ending.moments), loses_power=seed % 2 == 1
    )
    assert killed_ending.kills
    assert [event[0] for event in killed_ending.record].count("VersionPublished") == 4
    assert killed_ending.record[-1] == stream_ending.record[-1]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("loses_power", [False, True], ids=["killed", "without power"])
@pytest.mark.parametrize("story", [federate, command])
def test_killed_in_every_state(
    expected_ending: Ending,
    timely_ending: Ending,
    command_ending: Ending,
    tmp_path: Path,
    story: Story,
    *,
    loses_power: bool,
) -> None:
    expected = expected_ending if story is federate else command_ending
    # Of the moments of one state, the first. A loss of power leaves another state than a kill only after a commit or a
    # sync.
    numbers = [
        number
        for number, moment in enumerate(expected.moments, 1)
        if (moment.endswith(("change", "sync")) if loses_power else number in expected.turns)
    ]
    assert len(numbers) > 50
    differences = []
    for number in numbers:
        killed_ending = ending(story, tmp_path / str(number), [number], loses_power=loses_power)
        records = possible_records(expected, timely_ending, number) if story is federate else (expected.record,)
        if killed_ending.record not in records or len(killed_ending.kills) != 1:
            differences.append((number, expected.moments[number - 1]))
    assert differences == []

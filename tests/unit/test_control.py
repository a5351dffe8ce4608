"""Operators' commands: pause, resume, stop and adopt; on a virtual clock, across restarts, and repeated."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.errors import raises
from support.scenes import Action, Scene, play, versions, wait_for_end
from support.staleness import assignment
from support.virtual import PUBLISHER, bundle_in, plan, start

from fanin.protos import messages as m
from fanin.protos.errors import Conflict, NotFound
from fanin.protos.messages import (
    Adopt,
    Command,
    Evaluation,
    LoggedEvent,
    Pause,
    Resume,
    RoundClosed,
    RoundFailed,
    RoundOpened,
    RunEvent,
    RunRested,
    RunResumed,
    RunState,
    Stop,
    VersionPublished,
)
from fanin.protos.plans import MAX_TIMES, StopPlan
from fanin.server.runs.driving.stopping import History
from fanin.simulation import synthetic_bundle


@pytest.mark.parametrize("restarts", [False, True])
def test_a_paused_round_waits_and_then_ends_bit_identically(tmp_path: Path, restarts: bool) -> None:
    reference = versions(play(tmp_path / "a", wait_for_end))

    async def story(scene: Scene) -> None:
        await asyncio.sleep(15.0)
        assert (await scene.command(Pause())).state is RunState.PAUSED
        if restarts:
            await scene.restart()
        await asyncio.sleep(5000.0)
        assert len(versions(await scene.events())) <= 1
        assert (await scene.command(Resume())).state is RunState.RUNNING
        await wait_for_end(scene)

    events = play(tmp_path / "b", story)
    assert [event.version_sha256 for event in versions(events)] == [event.version_sha256 for event in reference]
    assert RunRested(state=RunState.PAUSED, reason="by an operator") in events
    assert RunResumed() in events
    assert not [event for event in events if isinstance(event, RoundFailed)]


@pytest.mark.parametrize("restarts", [False, True])
def test_the_deadline_is_suspended_while_a_run_is_paused(tmp_path: Path, restarts: bool) -> None:
    """Three of four devices upload. The Round closes 60 s of running time after its quorum was assigned."""

    async def story(scene: Scene) -> None:
        await asyncio.sleep(40.0)
        await scene.command(Pause())
        await asyncio.sleep(1000.0)
        if restarts:
            await scene.restart()
        await scene.command(Resume())
        resumed_at = asyncio.get_running_loop().time()
        await scene.until(RoundClosed)
        assert asyncio.get_running_loop().time() - resumed_at == pytest.approx(20.0, abs=1.0)

    play(tmp_path, story, plan(quorum=3, deadline_s=60.0, report_factor=math.inf), devices=3)


def test_updates_under_way_count_and_close_the_round_when_it_is_resumed(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(5.0)
        await scene.command(Pause())
        await asyncio.sleep(100.0)
        assert len(scene.place.state.rounds.updates("run", 1)) == 4
        assert versions(await scene.events()) == []
        await scene.command(Resume())
        await scene.until(VersionPublished)

    play(tmp_path, story)


def test_no_device_is_assigned_work_while_a_run_is_paused(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await scene.command(Pause())
        capabilities = m.Capabilities(codecs=("fixed32",), runtimes=("synthetic 1",), graph_formats=("onnx",))
        answer = await scene.place.coordinator.check_in(
            "late", m.CheckIn(protocol=1, capabilities=capabilities, wait_s=1.0)
        )
        assert isinstance(answer, m.Wait)

    play(tmp_path, story, devices=1)


def test_a_run_paused_between_two_rounds_opens_none(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await scene.until(RoundClosed)
        await scene.command(Pause())
        await asyncio.sleep(1000.0)
        assert [event.number for event in versions(await scene.events())] == [1]
        assert len([event for event in await scene.events() if isinstance(event, RoundOpened)]) <= 2
        await scene.command(Resume())
        await wait_for_end(scene)
        assert [event.number for event in versions(await scene.events())] == [1, 2, 3]

    play(tmp_path, story)


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_stopped_run_fails_its_round_and_rests(tmp_path: Path, is_paused: bool) -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(5.0)
        if is_paused:
            await scene.command(Pause())
        info = await scene.command(Stop())
        assert (info.state, info.reason) == (RunState.STOPPED, "by an operator")
        await scene.restart()
        await asyncio.sleep(100.0)
        assert scene.place.runs.driver("run").recent_rounds == ()

    events = play(tmp_path, story)
    assert events[-2:] == [
        RoundFailed(round=1, reason="stopped by an operator"),
        RunRested(state=RunState.STOPPED, reason="by an operator"),
    ]
    assert versions(events) == []


def test_a_stopped_run_continues_for_the_requested_rounds(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await scene.until(VersionPublished)
        await asyncio.sleep(3.0)
        await scene.command(Stop())
        with pytest.raises(Conflict, match="FN-0621"):
            await scene.command(Resume())
        info = await scene.command(Resume(rounds=4))
        assert (info.num_rounds, info.max_rounds) == (1, 5)
        await wait_for_end(scene)
        info = await scene.place.runs.info("run")
        assert (info.num_rounds, info.max_rounds) == (5, 5)
        # More Rounds than the wire can count are all that it can.
        assert (await scene.command(Resume(rounds=MAX_TIMES))).max_rounds == MAX_TIMES
        await scene.command(Stop())

    events = play(tmp_path, story)
    assert [event.number for event in versions(events)] == [1, 2, 3, 4, 5]
    assert RunRested(state=RunState.FINISHED, reason="5 of 5 rounds done") in events


def test_a_failed_run_tries_again_when_it_is_resumed(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        # The fourth device of each Round never reports again.
        for number in (1, 2, 3):
            await scene.until(RoundOpened, number)
            await asyncio.sleep(1.0)
            assert (await assignment(scene.place, f"dead-{number}")).round == number
        await wait_for_end(scene)
        assert (await scene.place.runs.info("run")).state is RunState.FAILED
        scene.num_devices = 5
        await scene.restart()
        assert (await scene.command(Resume())).state is RunState.RUNNING
        await wait_for_end(scene)

    events = play(tmp_path, story, plan(deadline_s=30.0), devices=3)
    assert len([event for event in events if isinstance(event, RoundFailed)]) == 3
    assert [event.number for event in versions(events)] == [1, 2, 3]


def test_a_rollback_publishes_an_older_version_with_a_new_number(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await scene.until(VersionPublished, 2)
        await scene.command(Pause())
        info = await scene.command(Adopt(number=1))
        assert (info.state, info.version) == (RunState.PAUSED, 3)
        await scene.command(Resume(rounds=1))
        await wait_for_end(scene)

    events = play(tmp_path, story)
    first, second, rollback, after = versions(events)
    assert rollback.version_sha256 == first.version_sha256 != second.version_sha256
    assert (rollback.adopted_run_id, rollback.adopted_number, rollback.round) == ("run", 1, 0)
    assert after.parent == rollback.number
    assert RoundFailed(round=3, reason="version 3 was published") in events


def test_a_version_is_promoted_to_another_run_of_its_bundle_only(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await wait_for_end(scene)
        runs = scene.place.runs
        await start(runs, bundle_in(tmp_path), plan(), run_id="other")
        await runs.command(Command(command_id="p", run_id="other", what=Pause()))
        adopt = Adopt(from_run_id="run", number=3, rounds=1)
        info = await runs.command(Command(command_id="a", run_id="other", what=adopt))
        assert info.version_sha256 == versions(await scene.events())[-1].version_sha256
        assert (info.state, info.version) == (RunState.RUNNING, 1)
        with raises(NotFound, "run run: has no version 9"):
            await scene.command(Adopt(number=9))
        with raises(NotFound, "run nowhere: has no version 0"):
            await scene.command(Adopt(from_run_id="nowhere", number=0))
        other = synthetic_bundle(tmp_path / "else", PUBLISHER, {"a": (2,)})
        await start(runs, other, plan(), run_id="else")
        with pytest.raises(Conflict, match="FN-0371"):
            await scene.command(Adopt(from_run_id="else", number=0))

    play(tmp_path, story)


def test_a_repeated_command_is_executed_once_whatever_has_happened_since(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await scene.command(Pause(), "first")
        await scene.command(Resume(), "second")
        assert (await scene.command(Pause(), "first")).state is RunState.RUNNING
        await scene.restart()
        assert (await scene.command(Pause(), "first")).state is RunState.RUNNING
        with raises(Conflict, "command first: the id is taken by another command; choose another"):
            await scene.command(Stop(), "first")
        await wait_for_end(scene)
        await scene.command(Adopt(number=0), "third")
        assert (await scene.command(Adopt(number=0), "third")).version == 4

    events = play(tmp_path, story)
    assert len([event for event in events if isinstance(event, RunRested) and event.state is RunState.PAUSED]) == 1


@pytest.mark.parametrize(
    ("before", "command", "message"),
    [
        (None, Pause(), "run run: it is finished, there is nothing to pause"),
        (None, Stop(), "run run: it is finished, there is nothing to stop"),
        (None, Resume(), "run run: is finished; pass --rounds N to continue it"),
        (Resume(rounds=9), Resume(rounds=2), "it is running; pause it to give it another number of rounds"),
        (Resume(rounds=9), Adopt(number=0), "run run: a round is open; publish when the run rests, or pause it"),
    ],
)
def test_an_impossible_command_changes_nothing(
    tmp_path: Path, before: Action | None, command: Action, message: str
) -> None:
    async def story(scene: Scene) -> None:
        await wait_for_end(scene)
        if before is not None:
            await scene.command(before)
        state = await scene.events()
        with pytest.raises(Conflict, match=message):
            await scene.command(command, "refused")
        assert await scene.events() == state
        # The id of a refused command can be used again.
        assert not await scene.place.state.stores.control.is_done(
            Command(command_id="refused", run_id="run", what=Pause())
        )

    play(tmp_path, story)


def rest_of(events: Sequence[RunEvent], max_rounds: int, stop: StopPlan) -> RunRested | None:
    history = History(stop)
    history.add(LoggedEvent(sequence=number, time=0.0, event=event) for number, event in enumerate(events))
    return history.rest_of(max_rounds)


def published_version(accuracy_int8: float) -> VersionPublished:
    evaluation = Evaluation(
        num_examples=10_000,
        loss=1.0,
        accuracy_float=0.9,
        accuracy_int8=accuracy_int8,
        int8_agreement=0.97,
        num_labels=10_000,
    )
    return VersionPublished(number=2, version_sha256="0" * 64, parent=1, round=2, evaluation=evaluation)


def test_a_run_pauses_when_int8_loses_more_than_the_plan_allows() -> None:
    stop = StopPlan(max_int8_drop=2.0)
    assert rest_of([published_version(0.881)], 100, stop) is None
    rest = rest_of([published_version(0.875)], 100, stop)
    assert rest is not None
    assert rest.state is RunState.PAUSED
    assert rest.reason.startswith(
        "int8 loses 250 of 10000 labels, 2.50 points with a sampling error of 0.28; one label is 0.01 points, on 10000 "
        "examples of the devices (version 1), the plan allows 2; "
    )
    assert rest_of([published_version(0.875)], 100, replace(stop, max_int8_drop=0.0)) is None
    assert rest_of([published_version(0.875), RunResumed()], 100, stop) is None


def test_one_label_of_a_small_sample_pauses_no_run() -> None:
    version = published_version(0.9)
    assert version.evaluation is not None
    small = replace(version.evaluation, num_examples=64, num_labels=64, accuracy_float=60 / 64, int8_agreement=63 / 64)
    stop = StopPlan(max_int8_drop=1.0)
    chance, proof = (
        replace(version, evaluation=replace(small, accuracy_int8=num / 64, int8_agreement=1 - (60 - num) / 64))
        for num in (59, 50)
    )
    assert rest_of([chance], 100, stop) is None
    rest = rest_of([proof], 100, stop)
    assert rest is not None and rest.reason.startswith("int8 loses 10 of 64 labels, 15.62 points with a sampling error")


@pytest.mark.parametrize(("rise", "is_paused"), [(-3.0, False), (2.0, False), (2.5, True), (1e9, True)])
def test_a_run_of_values_pauses_when_int8_adds_more_percent_to_the_squared_error(rise: float, is_paused: bool) -> None:
    version = published_version(0.0)
    assert version.evaluation is not None
    evaluation = replace(version.evaluation, accuracy_float=0.0, int8_rise_percent=rise)
    rest = rest_of([replace(version, evaluation=evaluation)], 100, StopPlan(max_int8_drop=2.0))
    assert (rest is not None) == is_paused
    if rest is not None:
        assert rest.state is RunState.PAUSED
        assert rest.reason.startswith(
            f"the cost of int8 is {rise:.2f} % on 10000 examples of the devices (version 1), the plan allows "
        )

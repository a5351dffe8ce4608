"""The contract of operators' commands."""

from dataclasses import replace

from fanin.protos.errors import Conflict
from fanin.protos.messages import Command, Pause, Resume, RoundFailed, RunRested, RunResumed, RunState, Stop
from fanin.server.storage.contracts.values import (
    COHORT,
    OPERATOR,
    opened,
    published,
    reclaim_of,
    refusal,
    start,
    version,
)
from fanin.server.storage.records import Newest, RoundMark, RoundRecord
from fanin.server.storage.stores import DriverStores, Stores

RUN = "commanded"


async def check_commands(stores: Stores) -> None:
    """Check the commands to a new Run. Raises AssertionError."""
    await stores.runs.add_run(start(RUN), 200.0)
    await refusal(Conflict, stores.runs.run_key(RUN, 1, b"new", 200.0), "run_key: created a key for a run that had one")
    driver = await stores.take(RUN)
    await driver.writer.open(opened(run_id=RUN))
    await driver.writer.set_deadline(1, 70.0, 10.0)
    await _check_pause(stores, driver)
    await _check_stop(stores, driver)
    await _check_outside(stores, driver)
    await _check_reclaim(stores, driver)


async def _check_pause(stores: Stores, driver: DriverStores) -> None:
    control, pause = stores.control, Command(command_id="pause", run_id=RUN, what=Pause(), by=OPERATOR)
    assert not await control.is_done(pause), "is_done: of a command that was never carried out"
    for now_s in (50.0, 55.0):
        await control.pause(pause, now_s)
        assert await control.is_done(pause), "is_done: forgot a command"
    other = replace(pause, run_id="other")
    await refusal(Conflict, control.is_done(other), "is_done: of another command with an id that is taken")
    assert await _state(stores) == (RunState.PAUSED, f"by {OPERATOR}"), f"pause: got {await _state(stores)}"
    halted = await _last(stores)
    assert (halted.deadline_at_s, halted.left_s) == (None, 20.0), f"pause: the deadline is not halted in {halted}"
    await driver.writer.set_deadline(1, 90.0, 50.0)
    assert (await _last(stores)).left_s == 40.0, "set_deadline: of a paused run did not record the seconds left"
    outside = Newest(version=version(version(run_id=RUN), RUN), event=published(version(version(run_id=RUN), RUN), 0))
    resume = Command(command_id="resume", run_id=RUN, what=Resume())
    for now_s in (1000.0, 2000.0):
        await control.resume(resume, 0, now_s)
    resumed = await _last(stores)
    assert (resumed.deadline_at_s, resumed.left_s) == (1040.0, None), f"resume: the deadline is not going in {resumed}"
    assert await _state(stores) == (RunState.RUNNING, ""), f"resume: got {await _state(stores)}"
    more = Command(command_id="more", run_id=RUN, what=Resume(rounds=3))
    await refusal(Conflict, control.resume(more, 3, 1000.0), "resume: of a running run with a number of rounds")
    await refusal(Conflict, control.publish(RUN, outside, 1000.0), "publish: of a running run")
    assert not await control.is_done(more), "is_done: a refused command is recorded"


async def _check_stop(stores: Stores, driver: DriverStores) -> None:
    control = stores.control
    await driver.writer.close(1, cohort=replace(COHORT, quorum=1), now_s=1010.0)
    assert (await _last(stores)).mark is RoundMark.FAILED, "close: a round without updates did not fail"
    await driver.writer.open(opened(2, run_id=RUN))
    await control.stop(Command(command_id="stop", run_id=RUN, what=Stop()), 1020.0)
    assert (await _last(stores)).mark is RoundMark.FAILED, "stop: left a round open"
    assert await _state(stores) == (RunState.STOPPED, "by an operator"), f"stop: got {await _state(stores)}"
    late = Command(command_id="late", run_id=RUN, what=Pause())
    await refusal(Conflict, control.pause(late, 1030.0), "pause: of a stopped run")
    again = Command(command_id="again", run_id=RUN, what=Resume())
    await refusal(Conflict, control.resume(again, 0, 1030.0), "resume: of a stopped run without rounds")
    events = [one.event for one in await stores.runs.event_page(RUN, 0)]
    expected = [
        RunRested(state=RunState.PAUSED, reason=f"by {OPERATOR}", by=OPERATOR),
        RunResumed(rounds=0),
        RoundFailed(round=2, reason="stopped by an operator"),
        RunRested(state=RunState.STOPPED, reason="by an operator"),
    ]
    assert [one for one in events if one in expected] == expected, f"event_page: got {events}, expected {expected}"


async def _check_outside(stores: Stores, driver: DriverStores) -> None:
    control, first = stores.control, version(version(run_id=RUN), RUN)
    skipping = Newest(version=version(first, RUN), event=published(version(first, RUN), 0))
    await refusal(Conflict, control.publish(RUN, skipping, 1040.0), "publish: of a version that is not the next one")
    await control.publish(RUN, Newest(version=first, event=published(first, 0)), 1040.0)
    assert (await _state(stores))[0] is RunState.STOPPED, "publish: without rounds set the run going"
    await control.publish(RUN, Newest(version=version(first, RUN), event=published(version(first, RUN), 0, 4)), 1050.0)
    run = await stores.runs.run(RUN)
    assert run is not None, "run: forgot a run"
    expected = (RunState.RUNNING, await stores.rounds.num_published(RUN) + 4)
    assert (run.state, run.max_rounds) == expected, f"publish: with rounds left the run {run.state}"
    assert await stores.runs.lineage_start(RUN) == 2, "lineage_start: a version from outside starts a lineage"
    earlier = [await stores.runs.lineage_start(RUN, until) for until in (0, 1, 2)]
    assert earlier == [0, 1, 2], f"lineage_start: got {earlier} until each version, all of which are from outside"
    assert await stores.rounds.recorded_grid(version(first, RUN)) is None, "recorded_grid: of a version from outside"
    assert await driver.writer.open(opened(3, 2, RUN)), "open: refused a round after a version from outside"


async def _check_reclaim(stores: Stores, driver: DriverStores) -> None:
    """Check the next epoch of the running Run, whose Version 2 is the newest and whose Round 3 is open."""
    newest, last = await stores.runs.newest_version(RUN), await _last(stores)
    await stores.runs.run_key(RUN, 2, b"next", 1060.0)
    following = version(newest, RUN)
    early = reclaim_of(replace(following, epoch=3))
    await refusal(
        Conflict, stores.control.reclaim(early, published(following, 0), 1060.0), "reclaim: with a later epoch"
    )
    reclaim = reclaim_of(replace(following, epoch=2))
    await stores.control.reclaim(reclaim, published(following, 0), 1060.0)
    run = await stores.runs.run(RUN)
    assert run is not None, "run: forgot a run"
    assert run.delegation == reclaim.delegation, f"reclaim: recorded {run.delegation}, expected {reclaim.delegation}"
    assert run.state is RunState.RUNNING, f"reclaim: without rounds left the run {run.state}"
    assert await stores.runs.newest_version(RUN) == reclaim.version, "reclaim: its version is not the newest"
    assert (await _last(stores), last.mark) == (replace(last, mark=RoundMark.FAILED), RoundMark.OPEN), (
        "reclaim: left a round open"
    )
    await refusal(Conflict, stores.runs.run_key(RUN, 1, b"old", 1070.0), "reclaim: a key of an earlier epoch is there")
    assert await stores.runs.run_key(RUN, 2, b"other", 1070.0) == b"next", "reclaim: removed the key of the epoch"
    again = stores.control.reclaim(reclaim, published(following, 0), 1070.0)
    await refusal(Conflict, again, "reclaim: of an epoch that has begun")
    outside = Newest(version=version(newest, RUN), event=published(following, 0))
    await refusal(Conflict, stores.control.publish(RUN, outside, 1070.0), "publish: of a version of an earlier epoch")
    assert await driver.writer.open(opened(4, 3, RUN)), "open: refused a round after the run was reclaimed"


async def _state(stores: Stores) -> tuple[RunState, str]:
    run = await stores.runs.run(RUN)
    assert run is not None, "run: forgot a run"
    return run.state, run.reason


async def _last(stores: Stores) -> RoundRecord:
    last = await stores.rounds.last(RUN)
    assert last is not None, "last: forgot a round"
    return last

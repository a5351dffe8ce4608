"""Failures around stale Updates: resting Runs, restarts, dead devices, and inconsistent records."""

import asyncio
import math
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import text
from support.errors import raises
from support.staleness import (
    CAPABILITIES,
    assignment,
    check_in,
    devices,
    federate,
    hang_up,
    send,
    settle,
    slow_store,
    update,
    watched,
)
from support.virtual import PUBLISHER, Place, bundle_in, open_place, plan, start

from fanin.clients.versions import next_version
from fanin.edge.tensors import TensorTable
from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan, Unavailable
from fanin.protos.messages import Adopt, Command, Pause, Resume, RoundClosed, RunState, Stop
from fanin.protos.plans import AggregationPlan
from fanin.protos.wire import to_proto
from fanin.server.aggregation.fold import Contribution, accept, begin, finish
from fanin.server.aggregation.verify import verify_run
from fanin.server.folder import open_archive
from fanin.server.storage.disk import Durability
from fanin.server.storage.sqlite.engine import open_engine
from fanin.simulation import run_virtual
from fanin.v1 import control_pb2


async def silent_assignment(place: Place, device: str) -> m.Assignment:
    """Return the Assignment of a device that falls silent, so that it may get another one."""
    capabilities = replace(CAPABILITIES, reports_progress=True)
    check = m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=0.1)
    answer = await place.coordinator.check_in(device, check)
    assert isinstance(answer, m.Assigned), answer
    await asyncio.sleep(60.0)
    return answer.assignment


@pytest.mark.parametrize("adopts", [False, True])
def test_updates_that_were_trained_before_an_external_version_never_count(tmp_path: Path, adopts: bool) -> None:
    """Otherwise the next Update would restore the changes that a rollback removes."""

    async def main() -> None:
        place, bundle = open_place(tmp_path), bundle_in(tmp_path)
        await start(place.runs, bundle, plan(buffer=1, quorum=1, max_staleness=50, max_rounds=9))
        slow = await assignment(place, "slow")
        await send(place, "fast-1")
        await settle()
        await place.runs.command(Command(command_id="1", run_id="run", what=Pause()))
        if adopts:
            await place.runs.command(Command(command_id="2", run_id="run", what=Adopt(number=0)))
        else:
            parent = (await place.runs.version("run", None)).version
            table = bundle.manifest.table
            version, data = next_version(parent, np.ones(table.num_values, np.float32), bundle, PUBLISHER)
            await place.runs.put_chunk(version.parameters.chunks[0].sha256, data)
            await place.runs.publish_version(version, 0)
        await place.runs.command(Command(command_id="3", run_id="run", what=Resume()))
        await settle()
        for server in (place, open_place(tmp_path)):
            if server is not place:
                await place.runs.stop()
                await server.runs.start()
            assert (await send(server, "slow", slow)).update_state is m.UpdateState.DISCARDED
        await server.runs.stop()

    run_virtual(main())


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.07, 0.1, 0.12, 0.15, 0.2, 0.3])
def test_an_update_that_comes_while_a_round_ends_is_in_the_next(tmp_path: Path, after_s: float) -> None:
    async def main() -> None:
        place = open_place(tmp_path, store_lane=slow_store)
        await start(place.runs, bundle_in(tmp_path), plan(buffer=1, quorum=1, max_staleness=3, max_rounds=3))
        await settle()
        fast, slow = await assignment(place, "fast"), await assignment(place, "slow")
        first = asyncio.create_task(send(place, "fast", fast))
        await asyncio.sleep(after_s)
        second = await send(place, "slow", slow)
        assert [(await first).update_state, second.update_state] == [m.UpdateState.ACCEPTED] * 2
        await settle()
        rounds = place.state.rounds
        assert [len(rounds.updates("run", number)) for number in (1, 2)] == [1, 1]
        await place.runs.stop()

    run_virtual(main())


def test_an_update_that_waits_for_the_next_round_is_released_when_the_run_ends(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        await asyncio.sleep(8.0)
        await place.runs.command(Command(command_id="1", run_id="run", what=Stop()))

    run_plan = plan(buffer=1, quorum=1, max_staleness=50, max_rounds=1000)
    assert len(federate(tmp_path, run_plan, story)) > 3


def test_stale_uploads_are_kept_until_they_no_longer_count(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(buffer=1, quorum=1, max_staleness=1, max_rounds=2))
        slow = await assignment(place, "slow")
        place.state.spool.open(update(slow)[0], "slow").close()
        folder = tmp_path / "state" / "spool"
        await send(place, "fast-1")
        await settle()
        assert [path.name for path in folder.glob("*.header")] == [f"{slow.assignment_id}.header"]
        await send(place, "fast-2")
        await settle()
        assert place.runs.driver("run").run.state is RunState.FINISHED
        assert list(folder.iterdir()) == []
        await place.runs.stop()

    run_virtual(main())


def test_the_mean_divides_by_the_weights_of_fresh_updates() -> None:
    """A stale Update moves the model less. The other Updates do not gain its weight."""
    table = TensorTable.of({"a": (1,)})
    pieces = (np.array([100], np.int32),)
    stale = Contribution(
        weights=(128,), fresh_weights=(256,), shifts=(0,), bits=32, max_shift=0, counts={}, pieces=pieces
    )
    assert finish(accept(begin(table), table, stale), table, (0,)).tolist() == [50.0]


@pytest.mark.parametrize("max_staleness", [-1, 1001])
def test_the_staleness_of_a_plan_has_its_range(max_staleness: int) -> None:
    with raises(
        InvalidPlan,
        (
            f"plan: aggregation.max_staleness: got {max_staleness}, expected an integer from 0 to 1000; "
            "docs/reference/plan.md describes the key"
        ),
    ):
        AggregationPlan(max_staleness=max_staleness)


def test_devices_that_keep_all_places_lose_them_at_the_deadline(tmp_path: Path) -> None:
    """Devices at work for an earlier Round may be dead. A Round that opens with only them has a deadline too."""

    async def main() -> None:
        place = open_place(tmp_path)
        run_plan = plan(concurrency=2, buffer=1, quorum=1, max_staleness=5, deadline_s=60.0, max_rounds=9)
        await start(place.runs, bundle_in(tmp_path), run_plan)
        late = await assignment(place, "late")
        await assignment(place, "dead-0")
        # Round 1 misses its deadline. Two other devices get the places of Round 2, and the late device closes it.
        await asyncio.sleep(61.0)
        for device in ("dead-1", "dead-2"):
            await assignment(place, device)
        assert (await send(place, "late", late)).update_state is m.UpdateState.ACCEPTED
        await settle()
        assert isinstance(await check_in(place, "new"), m.Wait)
        await asyncio.sleep(61.0)
        assert isinstance(await check_in(place, "new"), m.Assigned)
        await place.runs.stop()

    run_virtual(main())


@pytest.mark.parametrize(("report_factor", "waits"), [(math.inf, True), (2.0, False)])
def test_dead_devices_do_not_make_every_later_round_wait_for_its_deadline(
    tmp_path: Path, report_factor: float, waits: bool
) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        run_plan = plan(concurrency=4, buffer=2, quorum=1, max_staleness=50, deadline_s=60.0, max_rounds=6)
        cohort = replace(run_plan.cohort, report_factor=report_factor)
        run_plan = replace(run_plan, cohort=cohort)
        await start(place.runs, bundle_in(tmp_path), run_plan)
        for index in range(3):
            await assignment(place, f"dead-{index}")
        tasks = devices(tmp_path, place)
        versions = await watched(place)
        await hang_up(place, tasks)
        assert [version.round_s > 30.0 for version in versions] == [waits] + [False] * 5

    run_virtual(main())


def test_hanging_up_a_thousand_times_while_waiting_for_a_round_leaves_no_task(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(buffer=2, quorum=2, max_staleness=3, max_rounds=9))
        first = await silent_assignment(place, "device")
        await assignment(place, "other")
        for device in ("fast-1", "fast-2"):
            await send(place, device)
        await settle()
        # The device's Update for Round 2 is accepted. Its Update for Round 1 must wait until Round 2 ends.
        assert (await send(place, "device")).update_state is m.UpdateState.ACCEPTED
        before = len(asyncio.all_tasks())
        for _ in range(100):
            call = asyncio.create_task(send(place, "device", first))
            await asyncio.sleep(0.1)
            assert not call.done()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await settle()
        assert len(asyncio.all_tasks()) == before
        await place.runs.stop()

    run_virtual(main())


def test_a_coordinator_that_stops_releases_waiting_uploads(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(buffer=2, quorum=2, max_staleness=3, max_rounds=9))
        first = await silent_assignment(place, "device")
        for device in ("fast-1", "fast-2"):
            await send(place, device)
        await settle()
        await send(place, "device")
        upload = asyncio.create_task(send(place, "device", first))
        await settle()
        await place.runs.stop()
        with pytest.raises(Unavailable, match="FN-0696"):
            await upload

    run_virtual(main())


def test_a_pause_between_two_rounds_postpones_uploads(tmp_path: Path) -> None:
    """Their Updates count when the Run resumes, so a pause must not discard them."""

    async def main() -> None:
        place = open_place(tmp_path, store_lane=slow_store)
        await start(place.runs, bundle_in(tmp_path), plan(buffer=1, quorum=1, max_staleness=3, max_rounds=9))
        await settle()
        slow = await assignment(place, "slow")
        place.state.spool.open(update(slow)[0], "slow").close()
        fast = await assignment(place, "fast")
        upload = asyncio.create_task(send(place, "fast", fast))
        async with aclosing(place.runs.watch("run", 0)) as events:
            async for entry in events:
                if isinstance(entry.event, RoundClosed):
                    break
        await place.runs.command(Command(command_id="1", run_id="run", what=Pause()))
        assert (await upload).update_state is m.UpdateState.ACCEPTED
        await settle()
        for _ in range(2):
            with pytest.raises(Unavailable, match="FN-0696"):
                await send(place, "slow", slow)
        assert list((tmp_path / "state" / "spool").glob("*.header")) != []
        await place.runs.command(Command(command_id="2", run_id="run", what=Resume()))
        await settle()
        assert (await send(place, "slow", slow)).update_state is m.UpdateState.ACCEPTED
        await place.runs.stop()

    run_virtual(main())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE rounds SET state = 'failed' WHERE round = 3", "the record of the round that made it is missing"),
        ("UPDATE rounds SET accepted = '[]' WHERE round = 3", "round 3: 0 updates, expected 1 to 1"),
        ("UPDATE rounds SET base_version = 0 WHERE round = 2", "the record of the round that made it is missing"),
        ("UPDATE runs SET start_proto = :older", "an update of round 1 is too old to count in it"),
        ("UPDATE runs SET start_proto = :slower", "round 2: recomputed "),
        ("UPDATE rounds SET next_grid = '[0]' WHERE round = 2", "round 2: recomputed another grid for the next round"),
    ],
)
def test_verify_reports_an_inconsistent_record(tmp_path: Path, change: str, problem: str) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(buffer=1, quorum=1, max_staleness=5, max_rounds=3))
        slow = await assignment(place, "slow")
        for device in ("fast-1", "fast-2"):
            await send(place, device)
            await settle()
        await send(place, "slow", slow)
        await settle()
        await place.runs.stop()
        run = place.state.runs.run("run")
        assert run is not None
        run_plan = run.start.plan
        slower_plan = replace(run_plan, aggregation=replace(run_plan.aggregation, outer_options={"learning_rate": 0.5}))
        plans = {"older": plan(buffer=1, quorum=1, max_staleness=1, max_rounds=3), "slower": slower_plan}
        values = {
            name: to_proto(replace(run.start, plan=other), control_pb2.StartRunRequest).SerializeToString()
            for name, other in plans.items()
            if f":{name}" in change
        }
        engine = open_engine(tmp_path / "state" / "fanin.db", Durability.PROCESS)
        with engine.begin() as connection:
            connection.execute(text(change), values)
        engine.dispose()
        problems = [verdict.problem for verdict in verify_run(open_archive(tmp_path / "state"), "run")]
        assert problems[0] == ""
        assert any(problem in one for one in problems)

    run_virtual(main())

"""One driver of a Run at a time: after another driver takes the Run, writes of the older driver are refused."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.errors import raises
from support.snapshot import snapshot
from support.staleness import assignment, send, settle
from support.stored import FIRST, OPEN, START, Driven, close, commit, committed_update, published_event
from support.values import RUN, version
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.errors import Superseded, Unavailable
from fanin.protos.messages import Command, Pause, RoundFailed, RoundOpened, RunRested, RunState
from fanin.server.aggregation.verify import verify_run
from fanin.server.storage.disk import Durability
from fanin.server.storage.sqlite.engine import open_engine
from fanin.server.storage.sqlite.runs import SqliteRuns
from fanin.server.storage.sqlite.writer import Candidate, SqliteLeases, commit_all
from fanin.simulation import run_virtual

PLAN = plan(buffer=2, quorum=2, max_rounds=2)
WRITES: dict[str, Callable[[Driven], object]] = {
    "open": lambda driver: driver.open(replace(OPEN, round=2)),
    "set_deadline": lambda driver: driver.set_deadline(1, 70.0, 10.0),
    "close": lambda driver: close(driver, quorum=1),
    "publish": lambda driver: driver.publish(
        version(parent=FIRST), published_event(1), next_grid=(1, 2), outer_state={}, now_s=30.0
    ),
    "fail": lambda driver: driver.fail(1, reason="damaged", now_s=20.0),
    "rest": lambda driver: driver.rest(RunRested(state=RunState.FAILED, reason="no"), 20.0, next_sequence=99),
}


@contextmanager
def two_drivers(folder: Path) -> Iterator[tuple[Driven, Driven]]:
    """The older and the newer driver of a Run with an open Round, each with its own database handle."""
    engines = [open_engine(folder / "fanin.db", Durability.PROCESS) for _ in range(2)]
    SqliteRuns(engines[0]).add_run(START, 5.0)
    older = Driven(engines[0])
    older.open(OPEN)
    commit(older, committed_update("a"), 9)
    yield older, Driven(engines[1])
    for engine in engines:
        engine.dispose()


@pytest.mark.parametrize("name", sorted(WRITES))
def test_a_write_of_the_older_driver_is_refused_and_changes_nothing(tmp_path: Path, name: str) -> None:
    with two_drivers(tmp_path) as (older, newer):
        before = snapshot(tmp_path)
        with raises(
            Superseded,
            "run run: got a write of epoch 1, expected epoch 2; the driver in here has taken the run",
        ):
            WRITES[name](older)
        assert snapshot(tmp_path) == before
        WRITES[name](newer)
        assert name == "open" or snapshot(tmp_path) != before


def test_an_update_of_the_older_driver_is_refused_and_one_of_another_run_is_not(tmp_path: Path) -> None:
    with two_drivers(tmp_path) as (older, newer):
        updates = [
            Candidate(update=committed_update(name), buffer=9, lease=one.lease)
            for name, one in (("b", older), ("c", newer))
        ]
        refusal, accepted = commit_all(newer._engine, updates)
        assert isinstance(refusal, Superseded)
        assert accepted == committed_update("c")
        assert [update.device_id for update in newer.updates(RUN, 1)] == ["a", "c"]


def test_the_newest_lease_names_its_holder(tmp_path: Path) -> None:
    with two_drivers(tmp_path) as (older, newer):
        leases = SqliteLeases(newer._engine)
        assert leases.lease(RUN) == newer.lease == replace(older.lease, epoch=2)
        assert leases.lease("other") is None


def story(folder: Path, *, taken_over: bool) -> list[str]:
    """Run two Rounds of two devices. Between the first Updates, another coordinator may take the Run."""

    async def main() -> list[str]:
        first = open_place(folder)
        await start(first.runs, bundle_in(folder), PLAN)
        await settle()
        await send(first, "a")
        work = await assignment(first, "b")
        await settle()
        coordinator = first
        if taken_over:
            coordinator = open_place(folder)
            await coordinator.runs.start()
            await settle()
            await check_refusal(first, work, folder / "state")
        assert (await send(coordinator, "b", work)).update_state is m.UpdateState.ACCEPTED
        await settle()
        for device in ("a", "b"):
            await send(coordinator, device)
        await settle()
        assert (await coordinator.runs.info("run")).state is RunState.FINISHED
        await first.runs.stop()
        await coordinator.runs.stop()
        assert len(asyncio.all_tasks()) == 1
        assert [verdict.problem for verdict in verify_run(coordinator.state, "run") if verdict.problem] == []
        return [verdict.version_sha256 for verdict in verify_run(coordinator.state, "run")]

    return run_virtual(main())


async def check_refusal(place: Place, work: m.Assignment, folder: Path) -> None:
    """Check that a coordinator refuses an Update after another coordinator has taken the Run."""
    rows = snapshot(folder).rows
    with pytest.raises(Unavailable, match="FN-0013"):
        await send(place, "b", work)
    assert snapshot(folder).rows == rows
    assert place.runs.running() == ()
    assert (await place.runs.info("run")).reason == "run run: another coordinator drives this run now"
    with pytest.raises(Unavailable, match="FN-0615"):
        await send(place, "b", work)


def test_a_run_that_another_coordinator_takes_has_the_same_versions(tmp_path: Path) -> None:
    assert story(tmp_path / "two", taken_over=True) == story(tmp_path / "one", taken_over=False)


def test_the_older_driver_ends_at_its_deadline_and_leaves_the_record_alone(tmp_path: Path) -> None:
    async def main() -> None:
        older = open_place(tmp_path)
        await start(older.runs, bundle_in(tmp_path), PLAN)
        await settle()
        for device in ("a", "b"):
            await assignment(older, device)
        await settle()
        newer = open_place(tmp_path)
        await newer.runs.start()
        watch = asyncio.create_task(anext(older.runs.watch("run", 3)))
        await asyncio.sleep(601.0)
        assert older.runs.running() == ()
        # A watch at this coordinator receives the other coordinator's events too.
        assert (await watch).event == RoundOpened(round=2, base_version=0)
        events = [type(record.event) for record in newer.state.runs.events("run")]
        assert events == [RoundOpened, RoundFailed, RoundOpened]
        # A command to the older coordinator takes the Run back. Then the other one is the older driver.
        await older.runs.command(Command(command_id="1", run_id="run", what=Pause()))
        assert older.runs.driver("run").run.state is RunState.PAUSED
        assert (await older.state.stores.leases.lease("run")).epoch == 3
        await older.runs.stop()
        await newer.runs.stop()

    run_virtual(main())

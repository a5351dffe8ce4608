"""Runs that cannot be resumed when the coordinator starts: operators can list, stop and later resume them."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.epochs import reclaim_of
from support.errors import raises
from support.staleness import assignment, send, settle, update
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.edge.bundles.bundle import Bundle
from fanin.protos import messages as m
from fanin.protos.errors import Conflict, Unavailable
from fanin.protos.messages import Command, Pause, Resume, RoundFailed, RunRested, RunState, Stop
from fanin.simulation import run_virtual

REASON = (
    "run run: cannot be taken up: the coordinator's own state does not verify; the coordinator's log has the details"
)


def manifest(folder: Path, bundle: Bundle) -> Path:
    """Return the path of a Bundle's manifest in the coordinator's folder."""
    return folder / "state" / "blobs" / bundle.sha256[:2] / bundle.sha256


async def broken_run(folder: Path) -> tuple[Place, m.Assignment, Bundle]:
    """Return a coordinator that cannot resume its Run, an earlier Assignment of that Run, and the Run's Bundle."""
    before = open_place(folder)
    bundle = bundle_in(folder)
    await start(before.runs, bundle, plan())
    await settle()
    work = await assignment(before, "a")
    before.state.spool.open(update(work)[0], "a").close()
    await before.runs.stop()
    path = manifest(folder, bundle)
    path.rename(path.with_suffix(".moved"))
    path.mkdir()
    place = open_place(folder)
    await place.runs.start()
    return place, work, bundle


def repair(folder: Path, bundle: Bundle) -> None:
    path = manifest(folder, bundle)
    path.rmdir()
    path.with_suffix(".moved").rename(path)


def test_a_run_that_cannot_be_resumed_is_listed_and_shows_devices_no_path(tmp_path: Path) -> None:
    async def main() -> None:
        place, work, bundle = await broken_run(tmp_path)
        (info,) = (await place.runs.listed()).runs
        assert (info.run_id, info.state, info.reason) == ("run", RunState.RUNNING, REASON)
        assert await place.runs.info("run") == info
        # Its devices keep their Updates and wait.
        with pytest.raises(Unavailable, match=REASON.split(";")[0].replace("(", r"\(").replace(")", r"\)")):
            await send(place, "a", work)
        with raises(Conflict, REASON):
            await place.runs.command(Command(command_id="1", run_id="run", what=Pause()))
        # The uploads of its devices are kept.
        assert list((tmp_path / "state" / "spool").glob("*.header")) != []
        repair(tmp_path, bundle)

    run_virtual(main())


@pytest.mark.parametrize(
    "statement", ["DELETE FROM run_keys", "UPDATE run_keys SET private_key = zeroblob(32) WHERE run_id = 'run'"]
)
def test_a_run_that_lost_its_key_publishes_no_version_and_names_the_remedy(tmp_path: Path, statement: str) -> None:
    async def main() -> None:
        await serve_once(tmp_path)
        change_record(tmp_path, statement)
        place = open_place(tmp_path)
        await place.runs.start()
        assert (await place.runs.info("run")).reason == (
            "run run: cannot be taken up: the key that signs the versions of run run is lost, and devices accept no "
            "other; restore fanin.db from a backup, or let the publisher delegate to a new one: "
            "fanin reclaim run --key publisher.key; the coordinator's log has the details"
        )
        assert place.runs.running() == ()
        # The remedy works.
        newest = await place.state.stores.runs.newest_version("run")
        info = await place.runs.reclaim(await reclaim_of(place.runs, newest))
        assert (info.state, info.version, info.epoch, info.reason) == (RunState.RUNNING, 1, 2, "")
        assert [driver.run_id for driver in place.runs.running()] == ["run"]
        await place.runs.stop()

    run_virtual(main())


@pytest.mark.parametrize("action", ["start", "resume"])
def test_a_run_that_is_resumed_later_serves_its_devices(tmp_path: Path, action: str) -> None:
    async def main() -> None:
        place, work, bundle = await broken_run(tmp_path)
        repair(tmp_path, bundle)
        if action == "start":
            await start(place.runs, bundle, plan())
        else:
            await place.runs.command(Command(command_id="1", run_id="run", what=Resume()))
        await settle()
        assert (await place.runs.info("run")).reason == ""
        assert [info.run_id for info in (await place.runs.listed()).runs] == ["run"]
        assert (await send(place, "a", work)).update_state is m.UpdateState.ACCEPTED
        for device in "bcd":
            await send(place, device)
        await settle()
        assert (await place.runs.info("run")).version == 1
        await place.runs.stop()

    run_virtual(main())


def test_a_run_that_cannot_be_resumed_can_be_stopped(tmp_path: Path) -> None:
    async def main() -> None:
        place, _, _ = await broken_run(tmp_path)
        for _ in range(2):
            info = await place.runs.command(Command(command_id="1", run_id="run", what=Stop()))
            assert (info.state, info.reason) == (RunState.STOPPED, f"by an operator; {REASON}")
        assert [entry.event for entry in place.state.runs.events("run")][-2:] == [
            RoundFailed(round=1, reason="stopped by an operator"),
            RunRested(state=RunState.STOPPED, reason="by an operator"),
        ]

    run_virtual(main())


def change_record(folder: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / "state" / "fanin.db")) as connection, connection:
        connection.execute(statement, values)


async def serve_once(folder: Path) -> None:
    """Start a coordinator with one Run, then stop it."""
    place = open_place(folder)
    await start(place.runs, bundle_in(folder), plan())
    await settle()
    await place.runs.stop()


DAMAGE = [
    "UPDATE runs SET start_proto = x'' WHERE run_id = 'run'",
    "UPDATE runs SET start_proto = x'ffffff' WHERE run_id = 'run'",
    "UPDATE runs SET started_by = 'nobody' WHERE run_id = 'run'",
    "UPDATE runs SET state = 'ruling' WHERE run_id = 'run'",
    "UPDATE versions SET version_proto = x'ffffff' WHERE run_id = 'run'",
    "UPDATE rounds SET grid = 'x' WHERE run_id = 'run'",
]


@pytest.mark.parametrize("statement", DAMAGE)
def test_a_run_with_a_damaged_record_is_shown_and_stopped_while_the_others_are_served(
    tmp_path: Path, statement: str
) -> None:
    async def main() -> None:
        before = open_place(tmp_path)
        await start(before.runs, bundle_in(tmp_path), plan(), "run")
        await start(before.runs, bundle_in(tmp_path), plan(), "whole")
        await settle()
        await before.runs.stop()
        change_record(tmp_path, statement)
        place = open_place(tmp_path)
        await place.runs.start()
        page = await place.runs.listed()
        damaged, whole = page.runs
        assert (page.num_runs, damaged.run_id, whole.run_id, whole.reason) == (2, "run", "whole", "")
        assert "cannot be taken up" in damaged.reason and str(tmp_path) not in damaged.reason
        assert [driver.run.start.run_id for driver in place.runs.running()] == ["whole"]
        assert (await place.runs.describe("run", 5)).run == damaged
        with raises(Conflict, damaged.reason):
            await place.runs.command(Command(command_id="1", run_id="run", what=Pause()))
        info = await place.runs.command(Command(command_id="2", run_id="run", what=Stop()))
        if "SET state" not in statement:
            assert info.state is RunState.STOPPED
        assert (await place.runs.listed()).runs[0].state is RunState.STOPPED
        await place.runs.stop()

    run_virtual(main())


def test_a_run_that_is_damaged_while_it_is_served_does_not_hide_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(), "run")
        await start(place.runs, bundle_in(tmp_path), plan(), "whole")
        change_record(tmp_path, DAMAGE[4])
        damaged, whole = (await place.runs.listed()).runs
        assert damaged.reason.startswith("run run: the coordinator's own state does not verify"), damaged.reason
        assert (damaged.plan, whole.plan) == (None, plan())
        await place.runs.stop()

    run_virtual(main())


def test_a_run_whose_payloads_are_newer_than_its_record_is_not_continued(tmp_path: Path) -> None:
    async def main() -> None:
        await serve_once(tmp_path)
        folder = tmp_path / "state" / "updates" / "run" / "9"
        folder.mkdir(parents=True)
        (folder / ".DS_Store").touch()
        place = open_place(tmp_path)
        await place.runs.start()
        assert [info.reason for info in (await place.runs.listed()).runs] == [""]
        await place.runs.stop()
        (folder / f"device.{'0' * 16}.payload").touch()
        place = open_place(tmp_path)
        await place.runs.start()
        (info,) = (await place.runs.listed()).runs
        assert info.reason.startswith("run run: cannot be taken up: "), info.reason

    run_virtual(main())

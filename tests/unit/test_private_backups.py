"""Backups of private Runs have neither seeds nor Updates. A restored Run waits until its lost interval is charged."""

import gc
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from support.epochs import reclaim_of
from support.private import begin, num_rows, private, rested, story
from support.staleness import settle
from support.virtual import Place

from fanin.protos.errors import Conflict, InvalidInput, NotFound
from fanin.protos.messages import Command, LostInterval, Principal, PrincipalKind, Resume, RoundFailed, RunState
from fanin.server.administration.audit import AuditLog
from fanin.server.aggregation.verify import verify_run
from fanin.server.care.backup import back_up
from fanin.server.care.places import place_of
from fanin.server.care.restore import restore
from fanin.server.storage.sqlite.ledger.places import PLACE_FILES, begin_place, count_rows, find_place

ADMIN: Final = Principal(kind=PrincipalKind.ADMIN, id="0123456789ab")


def written(folder: Path, *, stops: bool = False) -> None:
    """Run two Rounds whose seeds and Updates are kept, and back up: before the coordinator stops, or after it."""

    async def tell(place: Place) -> None:
        audit = AuditLog(place.state.stores)
        await audit.start()
        await begin(place, folder, private(max_rounds=2, keep_seed_rounds=9))
        await rested(place)
        if stops:
            await audit.stop()
        back_up(folder / "state", place_of(str(folder / "backup")), lambda _: None)

    story(folder, tell)


def restored(folder: Path, tell: Callable[[Place], Awaitable[None]], *, was_stopped: bool = False) -> None:
    """Restore the backup, and tell a story of its coordinator."""
    (folder / "state").rename(folder / "lost")
    restore(place_of(str(folder / "backup")), folder / "state", lambda _: None, was_stopped=was_stopped)
    story(folder, tell)


def resume(command_id: str) -> Command:
    return Command(command_id=command_id, run_id="run", what=Resume(rounds=5))


def test_a_backup_has_neither_seeds_nor_updates(tmp_path: Path) -> None:
    written(tmp_path)
    database = sqlite3.connect(tmp_path / "state" / "fanin.db")
    seeds = [seed for (seed,) in database.execute("SELECT seed FROM noise_seeds")]
    payloads = [path.read_bytes() for path in (tmp_path / "state" / "updates").rglob("*.payload")]
    assert (len(seeds), len(payloads)) == (2, 8)
    copied = [path.read_bytes() for path in (tmp_path / "backup").rglob("*") if path.is_file()]
    for secret in (*seeds, *payloads):
        assert not any(secret in data for data in copied)

    async def tell(place: Place) -> None:
        verdicts = list(verify_run(place.state, "run"))
        assert [verdict.problem for verdict in verdicts] == ["", "", ""]
        assert [bool(verdict.from_sum) for verdict in verdicts] == [False, True, True]
        assert await num_rows(place) == 2

    restored(tmp_path, tell)


def test_a_restored_run_waits_until_its_lost_interval_is_charged(tmp_path: Path) -> None:
    written(tmp_path)

    async def tell(place: Place) -> None:
        runs, populations = place.runs, place.runs.populations
        newest = (await runs.view("run")).newest
        await runs.reclaim(await reclaim_of(runs, newest, rounds=5))
        await settle()
        info = await runs.info("run")
        assert (info.state, info.version) == (RunState.PAUSED, 3)
        assert "FN-1691" in info.reason
        assert "fanin privacy charge phones --rounds N" in info.reason
        with pytest.raises(Conflict) as excinfo:
            await runs.command(resume("early"))
        assert excinfo.value.code == "FN-1691"
        with pytest.raises(Conflict) as excinfo:
            await begin(place, tmp_path, private(), "second")
        assert excinfo.value.code == "FN-1691"
        for wrong in (
            LostInterval(population="others", rounds=1),
            LostInterval(population="phones", rounds=1, run_id="x"),
        ):
            with pytest.raises(NotFound):
                await populations.charge(wrong, ADMIN)
        lost = LostInterval(population="phones", rounds=1, after=2)
        for _ in range(2):
            population = await populations.charge(lost, ADMIN)
        assert population.uncharged == ()
        assert population.newest is not None
        assert (population.newest.count, population.newest.round, population.newest.epoch) == (1, 0, 2)
        assert 1.62 < population.newest.epsilon < 1.63
        entries = (await place.state.stores.audit.audit_page(1)).entries
        assert [(each.call, each.principal) for each in entries][-1] == ("ChargePopulation", str(ADMIN))
        # The budget of three Rounds is spent now.
        with pytest.raises(Conflict) as excinfo:
            await runs.command(resume("late"))
        assert (excinfo.value.code, await num_rows(place)) == ("FN-1660", 3)
        with pytest.raises(InvalidInput) as invalid:
            await populations.charge(LostInterval(population="phones", rounds=1, after=3), ADMIN)
        assert invalid.value.code == "FN-1693"

    restored(tmp_path, tell)


def test_a_backup_of_a_coordinator_that_serves_is_not_restored_as_one_of_a_stopped_one(tmp_path: Path) -> None:
    written(tmp_path)
    for _ in range(2):
        with pytest.raises(Conflict, match="the last entry of its audit log is BeginPopulation") as excinfo:
            restore(place_of(str(tmp_path / "backup")), tmp_path / "new", lambda _: None, was_stopped=True)
        assert excinfo.value.code == "FN-1721"
        assert not (tmp_path / "new").exists()


def test_a_copied_folder_waits_for_a_charge_and_a_moved_one_does_not(tmp_path: Path) -> None:
    """Both folders have all files of one moment. In the copy, nobody knows what the other one released since."""
    written(tmp_path, stops=True)
    (tmp_path / "state").rename(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "state")

    async def in_copy(place: Place) -> None:
        for _ in range(2):
            with pytest.raises(Conflict) as excinfo:
                await place.runs.command(resume("early"))
            assert excinfo.value.code == "FN-1691"
        with pytest.raises(Conflict) as excinfo:
            await begin(place, tmp_path, private(), "second")
        assert excinfo.value.code == "FN-1691"
        await place.runs.populations.charge(LostInterval(population="phones", rounds=1, after=2), ADMIN)

    async def later(place: Place) -> None:
        """The second start of the copy finds its own file."""
        with pytest.raises(Conflict) as excinfo:
            await place.runs.command(resume("late"))
        assert (excinfo.value.code, await num_rows(place)) == ("FN-1660", 3)

    async def in_first(place: Place) -> None:
        await place.runs.command(resume("more"))
        info = await rested(place)
        assert (info.version, await num_rows(place)) == (3, 3)

    story(tmp_path, in_copy)
    story(tmp_path, later)
    (tmp_path / "state").rename(tmp_path / "copy")
    (tmp_path / "first").rename(tmp_path / "state")
    story(tmp_path, in_first)


def put_back_database(state: Path, copy: Path) -> None:
    """Overwrite the database, so that its inode stays."""
    inode = (state / "fanin.db").stat().st_ino
    gc.collect()  # The coordinator before has ended: its connections to this inode end, too.
    (state / "fanin.db-shm").unlink(missing_ok=True)
    for name in ("fanin.db", "fanin.db-wal"):
        if (copy / name).exists():
            shutil.copy2(copy / name, state / name)
        else:
            (state / name).unlink(missing_ok=True)
    assert (state / "fanin.db").stat().st_ino == inode


def put_back_folder(state: Path, copy: Path) -> None:
    """Overwrite every file, so that inodes and times are those of the copy, except for the change times."""
    subprocess.run(["cp", "-a", f"{copy}/.", str(state)], check=True)
    assert (state / "fanin.place.0").stat().st_mtime_ns == (copy / "fanin.place.0").stat().st_mtime_ns


def put_back_by_rsync(state: Path, copy: Path) -> None:
    """Replace every file by a new one with the times of the copy."""
    for path in copy.iterdir():
        if path.is_file():
            shutil.copy2(path, state / "draft")
            (state / "draft").replace(state / path.name)


@pytest.mark.parametrize("put_back", [put_back_database, put_back_folder, put_back_by_rsync])
def test_files_that_were_put_back_wait_for_a_charge(tmp_path: Path, put_back: Callable[[Path, Path], None]) -> None:
    """The third Round was released, and the files that are put back do not have its row."""
    written(tmp_path, stops=True)
    subprocess.run(["cp", "-a", str(tmp_path / "state"), str(tmp_path / "copy")], check=True)

    async def third(place: Place) -> None:
        await place.runs.command(resume("third"))
        await rested(place)
        assert await num_rows(place) == 3

    async def after(place: Place) -> None:
        assert await num_rows(place) == 2
        for _ in range(2):
            with pytest.raises(Conflict) as excinfo:
                await place.runs.command(resume("early"))
            assert excinfo.value.code == "FN-1691"
        await place.runs.populations.charge(LostInterval(population="phones", rounds=1, after=2), ADMIN)

    async def later(place: Place) -> None:
        with pytest.raises(Conflict) as excinfo:
            await place.runs.command(resume("late"))
        assert excinfo.value.code == "FN-1660"

    story(tmp_path, third)
    put_back(tmp_path / "state", tmp_path / "copy")
    # Payloads of a Round that the database does not know keep the Run from being taken up.
    shutil.rmtree(tmp_path / "state" / "updates" / "run" / "3")
    story(tmp_path, after)
    story(tmp_path, later)


def checkpoint(state: Path) -> None:
    with closing(sqlite3.connect(state / "fanin.db")) as database:
        assert database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0


def change_folders(state: Path) -> None:
    """Change times, permissions and the name of the folder, and those of the folder above it."""
    for folder in (state, state.parent):
        folder.chmod(0o750)
        os.chown(folder, os.getuid(), os.getgid())
        os.utime(folder, (1, 1))
    state.rename(state.parent / "other")
    (state.parent / "other").rename(state)


def lose_count(state: Path) -> None:
    """Leave the files as a kill does between the transaction of a row and the count of the rows."""
    place = find_place(state)
    assert place is not None and place.rows == 2
    count_rows(state, place, 1)


def leave_draft(state: Path) -> None:
    """Leave the draft of a file, as a kill does before its rename."""
    (state / "fanin.place.0.draft").write_bytes(b"{")


@pytest.mark.parametrize("change", [lambda _: None, checkpoint, change_folders, lose_count, leave_draft])
def test_a_restart_in_the_same_folder_waits_for_no_charge(tmp_path: Path, change: Callable[[Path], None]) -> None:
    written(tmp_path)
    for _ in range(3):
        change(tmp_path / "state")

        async def tell(place: Place) -> None:
            population = await place.state.stores.ledger.population("phones")
            assert population is not None and population.uncharged == ()

        story(tmp_path, tell)
    story(tmp_path, _one_more)


async def _one_more(place: Place) -> None:
    await place.runs.command(resume("more"))
    await rested(place)
    assert await num_rows(place) == 3


COUNTING: Final = """
import sys
from pathlib import Path
from fanin.server.storage.sqlite.ledger.places import begin_place, count_rows, find_place
folder = Path(sys.argv[1])
place = find_place(folder) or begin_place(folder, 0)
while True:
    place = count_rows(folder, place, place.rows + 1)
    print(place.rows, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_pair_of_files(tmp_path: Path) -> None:
    order, rows = random.Random(3), 0
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", COUNTING, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            rows = int(process.stdout.readline())
            time.sleep(order.random() / 50)
            process.kill()
            rows = max([rows, *map(int, process.stdout.read().split(b"\n")[:-1])])
        place = find_place(tmp_path)
        assert place is not None and place.rows in (rows, rows + 1)


def test_a_damaged_or_missing_file_is_no_place(tmp_path: Path) -> None:
    for name in PLACE_FILES:
        for damage in (Path.unlink, lambda path: path.write_text("{}"), lambda path: path.write_bytes(b"\xff")):
            begin_place(tmp_path, 4)
            assert find_place(tmp_path) is not None
            damage(tmp_path / name)
            assert find_place(tmp_path) is None


def test_a_reclaimed_run_waits_for_a_charge(tmp_path: Path) -> None:
    """Somebody else with the key of the Run may have released Versions that this ledger does not have."""

    async def tell(place: Place) -> None:
        runs = place.runs
        await begin(place, tmp_path, private(max_rounds=1))
        await rested(place)
        await runs.reclaim(await reclaim_of(runs, (await runs.view("run")).newest, rounds=5))
        await settle()
        info = await runs.info("run")
        assert (info.state, info.version) == (RunState.PAUSED, 2)
        assert "FN-1691" in info.reason
        await runs.populations.charge(LostInterval(population="phones", rounds=0, after=1), ADMIN)
        await runs.command(resume("late"))
        info = await rested(place)
        assert (info.state, await num_rows(place)) == (RunState.FINISHED, 3)

    story(tmp_path, tell)


def test_a_stopped_coordinator_lost_nothing(tmp_path: Path) -> None:
    written(tmp_path, stops=True)

    async def tell(place: Place) -> None:
        await place.runs.command(resume("more"))
        info = await rested(place)
        assert (info.state, info.version, await num_rows(place)) == (RunState.FINISHED, 3, 3)

    restored(tmp_path, tell, was_stopped=True)


def test_a_round_under_way_fails_in_the_backup(tmp_path: Path) -> None:
    async def tell(place: Place) -> None:
        plan = private()
        cohort = replace(plan.cohort, concurrency=5, buffer=5, quorum=5)
        await begin(place, tmp_path, replace(plan, cohort=cohort))
        await settle()
        audit = AuditLog(place.state.stores)
        await audit.start()
        await audit.stop()
        back_up(tmp_path / "state", place_of(str(tmp_path / "backup")), lambda _: None)

    story(tmp_path, tell)

    async def look(place: Place) -> None:
        events = [entry.event for entry in place.state.runs.events("run")]
        (failed,) = [event for event in events if isinstance(event, RoundFailed)]
        assert failed.reason == "a backup has no updates of a run with privacy"
        assert await num_rows(place) == 0

    restored(tmp_path, look, was_stopped=True)

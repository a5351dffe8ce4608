"""Backups of private Runs have neither seeds nor Updates. A restored Run waits until its lost interval is charged."""

import shutil
import sqlite3
from collections.abc import Awaitable, Callable
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

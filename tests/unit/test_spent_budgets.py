"""The budget of a population: a Run stops before it is exceeded, and nothing resets its ledger."""

import asyncio
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.private import NUM_ROUNDS, begin, num_rows, private, rested, story
from support.staleness import devices, hang_up, settle
from support.virtual import PUBLISHER, Place, open_place

from fanin.edge.bundles.versions import sign_version
from fanin.protos import messages as m
from fanin.protos.errors import Conflict, Corrupted, RuntimeMissing
from fanin.protos.messages import Adopt, Command, Prune, Resume, RunState
from fanin.protos.plans import RetentionPlan
from fanin.server.aggregation.verify import verify_run
from fanin.server.care.pruner import Pruner
from fanin.server.privacy.accounting import epsilon
from fanin.server.privacy.ledger import from_text
from fanin.simulation import run_virtual


def test_a_run_finishes_before_its_budget_is_exceeded(tmp_path: Path) -> None:
    async def tell(place: Place) -> None:
        await begin(place, tmp_path, private())
        info = await rested(place)
        assert (info.state, await num_rows(place)) == (RunState.FINISHED, NUM_ROUNDS)
        assert "FN-1660" in info.reason
        ledger = await place.state.stores.ledger.counts("phones")
        spent = [(from_text(text), count) for text, count in ledger.counts.items()]
        rows = await place.state.stores.ledger.ledger_page("phones", 1)
        assert rows[-1].epsilon == epsilon(spent, 1e-6) <= 1.8 < epsilon([*spent, (spent[0][0], 1)], 1e-6)
        assert [(row.run_id, row.epoch, row.lineage, row.round) for row in rows] == [
            ("run", 1, 0, number) for number in range(1, NUM_ROUNDS + 1)
        ]

    story(tmp_path, tell)


def test_more_rounds_and_a_rollback_do_not_pass_the_budget(tmp_path: Path) -> None:
    async def tell(place: Place) -> None:
        await begin(place, tmp_path, private(max_rounds=2))
        await rested(place)
        back = Adopt(number=1, rounds=5)
        await place.runs.command(Command(command_id="back", run_id="run", what=back))
        info = await rested(place)
        assert (info.state, await num_rows(place)) == (RunState.FINISHED, NUM_ROUNDS)
        rows = await place.state.stores.ledger.ledger_page("phones", 1)
        assert [row.lineage for row in rows] == [0, 0, 3]
        # The Run is never running, so no operator reads that it is.
        with pytest.raises(Conflict) as excinfo:
            await place.runs.command(Command(command_id="more", run_id="run", what=Resume(rounds=9)))
        assert excinfo.value.code == "FN-1660"
        # Nor do more Rounds of a rollback, of another Run's Version or of one from outside. Each leaves no trace.
        newest = await place.state.stores.runs.newest_version("run")
        for index, adopt in enumerate((Adopt(number=1, rounds=5), Adopt(from_run_id="run", number=2, rounds=1))):
            with pytest.raises(Conflict) as excinfo:
                await place.runs.command(Command(command_id=f"more-{index}", run_id="run", what=adopt))
            assert excinfo.value.code == "FN-1660"
        bundle, parameters = newest.bundle_sha256, newest.parameters
        outside = sign_version(PUBLISHER, parent=newest, run_id="run", bundle_sha256=bundle, parameters=parameters)
        with pytest.raises(Conflict) as excinfo:
            await place.runs.publish_version(outside, 4)
        assert excinfo.value.code == "FN-1660"
        assert await place.state.stores.runs.newest_version("run") == newest
        # A Version without Rounds releases nothing.
        await place.runs.command(Command(command_id="rest", run_id="run", what=Adopt(number=1)))
        events = place.state.runs.events("run")
        assert not any(isinstance(entry.event, m.RunResumed) for entry in events)
        info = await place.runs.info("run")
        assert (info.state, await num_rows(place)) == (RunState.FINISHED, NUM_ROUNDS)
        assert "FN-1660" in info.reason

    story(tmp_path, tell)


def test_a_second_run_shares_the_budget_and_a_spent_one_is_refused(tmp_path: Path) -> None:
    async def tell(place: Place) -> None:
        await begin(place, tmp_path, private(max_rounds=2))
        await rested(place)
        await begin(place, tmp_path, private(epsilon=1.7), "second")
        info = await rested(place, "second")
        assert (info.state, info.version, await num_rows(place)) == (RunState.FINISHED, 1, NUM_ROUNDS)
        with pytest.raises(Conflict) as excinfo:
            await begin(place, tmp_path, private(), "third")
        assert excinfo.value.code == "FN-1660"
        assert await place.runs.run_ids() == ("run", "second")
        await begin(place, tmp_path, private(population="others"), "fourth")
        assert (await rested(place, "fourth")).version == NUM_ROUNDS

    story(tmp_path, tell)


@pytest.mark.parametrize("change", [{"epsilon": 1.81}, {"delta": 1e-5}])
def test_a_plan_cannot_loosen_the_budget_of_its_population(tmp_path: Path, change: dict[str, float]) -> None:
    async def tell(place: Place) -> None:
        await begin(place, tmp_path, private(max_rounds=1))
        await rested(place)
        with pytest.raises(Conflict) as excinfo:
            await begin(place, tmp_path, private(**change), "second")
        assert excinfo.value.code == "FN-1690"
        (entry,) = [
            each for each in (await place.state.stores.audit.audit_page(1)).entries if each.call == "BeginPopulation"
        ]
        assert entry.subject == "population phones: epsilon 1.8, delta 1e-06, size 1000, run run"

    story(tmp_path, tell)


def test_two_runs_that_close_together_do_not_spend_the_same_rest(tmp_path: Path) -> None:
    """Both open when one Round is left: the second one to close fails, and is not charged."""

    async def main() -> None:
        place = open_place(tmp_path)
        await begin(place, tmp_path, private(max_rounds=2))
        tasks = devices(tmp_path, place)
        await rested(place)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for run_id in ("left", "right"):
            await begin(place, tmp_path, private(max_rounds=2), run_id)
        await settle()
        opened = [await place.state.stores.rounds.unfinished(run_id) for run_id in ("left", "right")]
        assert [None if each is None else each.round for each in opened] == [1, 1]
        tasks = devices(tmp_path, place)
        infos = [await rested(place, run_id) for run_id in ("left", "right")]
        assert sorted(info.version for info in infos) == [0, 1]
        assert {info.state for info in infos} == {RunState.FINISHED}
        assert await num_rows(place) == NUM_ROUNDS
        events = [entry.event for run_id in ("left", "right") for entry in place.state.runs.events(run_id)]
        (failed,) = [event for event in events if isinstance(event, m.RoundFailed)]
        assert "FN-1660" in failed.reason
        await hang_up(place, tasks)

    run_virtual(main())


def test_pruning_and_stopping_a_run_free_no_population(tmp_path: Path) -> None:
    async def tell(place: Place) -> None:
        await begin(place, tmp_path, private(max_rounds=2))
        await rested(place)
        stores = place.state.stores
        pruner = Pruner(stores, place.state.files)
        await pruner.prune(Prune(run_id="run", retention=RetentionPlan(keep_versions=1, keep_days=0.0), apply=True))
        await pruner.prune_all()
        assert await num_rows(place) == 2
        assert await stores.ledger.population("phones") is not None
        with pytest.raises(Conflict) as excinfo:
            await begin(place, tmp_path, private(epsilon=5.0), "second")
        assert excinfo.value.code == "FN-1690"

    story(tmp_path, tell)


def test_the_updates_and_the_seed_are_erased_with_the_publication(tmp_path: Path) -> None:
    async def tell(place: Place) -> None:
        await begin(place, tmp_path, private(max_rounds=3, keep_seed_rounds=1))
        await rested(place)
        await settle()
        left = {int(path.parent.name) for path in (tmp_path / "state" / "updates").rglob("*.payload")}
        assert left == {3}
        seeds = [await place.state.stores.ledger.charged("run", number) for number in (1, 2, 3)]
        assert [None if each is None else each.seed is None for each in seeds] == [True, True, False]
        verdicts = list(verify_run(place.state, "run"))
        assert [verdict.problem for verdict in verdicts] == [""] * 4
        assert [bool(verdict.from_sum) for verdict in verdicts] == [False, True, True, False]

    story(tmp_path, tell)


def test_no_file_of_a_serving_coordinator_has_an_erased_seed(tmp_path: Path) -> None:
    async def tell(place: Place) -> None:
        await begin(place, tmp_path, private(max_rounds=2, keep_seed_rounds=1))
        seeds = set[bytes]()
        while len(seeds) < 2:
            await asyncio.sleep(1.0)
            for number in (1, 2):
                charged = await place.state.stores.ledger.charged("run", number)
                seeds |= {charged.seed} if charged is not None and charged.seed is not None else set()
        await rested(place)
        await settle()
        last = await place.state.stores.ledger.charged("run", 2)
        assert last is not None
        files = [path.read_bytes() for path in (tmp_path / "state").iterdir() if path.is_file()]
        assert [any(seed in data for data in files) for seed in sorted(seeds, key=lambda seed: seed == last.seed)] == [
            False,
            True,
        ]

    story(tmp_path, tell)


def test_a_coordinator_without_the_extra_refuses_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(place: Place) -> None:
        # An import of a module that is None fails as that of a missing one.
        monkeypatch.setitem(sys.modules, "dp_accounting", None)
        with pytest.raises(RuntimeMissing) as excinfo:
            await begin(place, tmp_path, private())
        assert excinfo.value.code == "FN-1652"
        assert "pip install 'fanin[privacy]'" in str(excinfo.value)
        assert await place.runs.run_ids() == ()

    story(tmp_path, tell)


@pytest.mark.parametrize("number", [1, 2])
def test_a_missing_row_of_a_ledger_is_damage_also_the_newest_one(tmp_path: Path, number: int) -> None:
    async def tell(place: Place) -> None:
        await begin(place, tmp_path, private(max_rounds=2))
        await rested(place)
        with closing(sqlite3.connect(tmp_path / "state" / "fanin.db")) as database, database:
            database.execute("DELETE FROM privacy_ledger WHERE number = ?", (number,))
        with pytest.raises(Corrupted) as excinfo:
            await place.state.stores.ledger.counts("phones")
        assert excinfo.value.code == "FN-1661"
        with pytest.raises(Corrupted) as excinfo:
            await place.runs.populations.ledger("phones", 1)
        assert excinfo.value.code == "FN-1661"

    story(tmp_path, tell)


def test_a_seed_that_a_reader_kept_in_the_log_is_erased_after_the_reader(tmp_path: Path) -> None:
    seeds: list[bytes] = []

    def with_seed() -> list[str]:
        return [path.name for path in tmp_path.rglob("*") if path.is_file() and seeds[0] in path.read_bytes()]

    async def tell(place: Place) -> None:
        await begin(place, tmp_path, private(max_rounds=1, keep_seed_rounds=1))
        await rested(place)
        charged = await place.state.stores.ledger.charged("run", 1)
        assert charged is not None and charged.seed is not None
        seeds.append(charged.seed)
        address = f"file:{tmp_path}/state/fanin.db?mode=ro"
        with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM noise_seeds").fetchall()
            await place.runs.command(Command(command_id="more", run_id="run", what=Resume(rounds=1)))
            await rested(place)
            await settle()
            assert with_seed()
        await Pruner(place.state.stores, place.state.files).prune_all()
        assert with_seed() == []

    story(tmp_path, tell)

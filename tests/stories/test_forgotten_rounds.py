"""Rounds whose Updates retention removed: the database stays small, and a late Update still counts at most once."""

import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.staleness import assignment, send, settle
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.errors import Conflict
from fanin.protos.plans import RetentionPlan
from fanin.server.aggregation.verify import verify_run
from fanin.server.care.pruner import Pruner
from fanin.simulation import run_virtual

MONTH_S = 30 * 86400.0
KEEP_UPDATES = 4
RETENTION = RetentionPlan(keep_versions=KEEP_UPDATES + 4, keep_updates=KEEP_UPDATES)
BYTES_PER_ROUND = 4096
"""The record of a Round and its Version, whatever its cohort."""
NUM_BASE_ROUNDS = 50


async def prune(place: Place) -> None:
    """Prune as a month later."""
    stores = replace(place.state.stores, wall=lambda: time.time() + MONTH_S)
    await Pruner(stores, place.state.files).prune_all()


def stored_bytes(folder: Path) -> int:
    """Return the size of the database. Its log is written into it first, because that only grows to 4 MB."""
    path = folder / "state" / "fanin.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return path.stat().st_size


@pytest.mark.parametrize(
    ("num_rounds", "num_devices"),
    [(24, 3), pytest.param(3000, 20, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)])],
)
def test_the_database_does_not_grow_with_devices_times_rounds(
    tmp_path: Path, num_rounds: int, num_devices: int
) -> None:
    run_plan = plan(concurrency=num_devices, buffer=num_devices, quorum=num_devices, max_rounds=num_rounds)

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), replace(run_plan, retention=RETENTION))
        base_rounds = min(NUM_BASE_ROUNDS, num_rounds // 2)
        base = 0
        for number in range(1, num_rounds + 1):
            for index in range(num_devices):
                await send(place, f"device-{index}")
            await settle()
            if number % base_rounds == 0:
                await prune(place)
                base = base or stored_bytes(tmp_path)
        growth = (stored_bytes(tmp_path) - base) / (num_rounds - base_rounds)
        print(f"{growth:.0f} bytes for each of {num_rounds} rounds, {stored_bytes(tmp_path)} in all")
        assert growth < BYTES_PER_ROUND
        stores = place.state.stores
        contributors = await stores.rounds.contributors("run")
        assert (contributors.num_updates, contributors.num_devices) == (num_rounds * num_devices, num_devices)
        verdicts = [each for each in verify_run(place.state, "run") if each.round]
        assert [each.problem for each in verdicts if each.problem] == []
        assert {each.num_updates for each in verdicts} == {num_devices}
        assert len([each for each in verdicts if not each.digest_only]) == KEEP_UPDATES
        assert sum("the digest of the set is" in each.digest_only for each in verdicts) == num_rounds - KEEP_UPDATES
        await place.runs.stop()

    run_virtual(main())


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_an_update_that_arrives_after_its_round_is_forgotten_counts_at_most_once(
    tmp_path: Path, max_staleness: int
) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        run_plan = plan(concurrency=4, buffer=1, quorum=1, max_staleness=max_staleness, max_rounds=20)
        await start(place.runs, bundle_in(tmp_path), replace(run_plan, retention=RetentionPlan(keep_updates=0)))
        counted, lost = await assignment(place, "counted"), await assignment(place, "lost")
        assert (await send(place, "counted", counted)).update_state is m.UpdateState.ACCEPTED
        await settle()
        for index in range(2):
            await send(place, f"device-{index}")
            await settle()
        await prune(place)
        # With staleness, the next Round may still count Updates for the last ones: their rows stay.
        assert len(place.state.rounds.updates("run", 3)) == (1 if max_staleness else 0)
        for index in range(3, 6):
            await send(place, f"device-{index}")
            await settle()
        await prune(place)
        rounds = place.state.stores.rounds
        before = await rounds.contributors("run")
        assert await rounds.update("run", 1, "counted") is None
        # A device that did not get the reply comes back with the same Update: it has counted.
        reply = await send(place, "counted", counted)
        assert (reply.round_state, reply.update_state) == (m.RoundState.CLOSED, m.UpdateState.ACCEPTED)
        # The Round of the other one is over.
        reply = await send(place, "lost", lost)
        assert (reply.round_state, reply.update_state) == (m.RoundState.CLOSED, m.UpdateState.DISCARDED)
        assert await rounds.contributors("run") == before
        assert await rounds.last_folded("run", "counted", lineage=0) == 1
        with pytest.raises(Conflict) as error:
            await place.runs.accepted_devices("run", 1, 0)
        assert error.value.code == "FN-1451"
        await place.runs.stop()
        assert [verdict.problem for verdict in verify_run(place.state, "run") if verdict.problem] == []

    run_virtual(main())

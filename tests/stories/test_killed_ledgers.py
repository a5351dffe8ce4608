"""A coordinator that is killed at any moment charges each closed Round once, and never draws a second noise.

The tests run on a virtual clock, with a database in a folder. ``make kills`` runs them, including the nightly ones.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest
from support.endings import NUM_DEVICES, begin, digests, work_times
from support.mortal import Mortal
from support.virtual import plan

from fanin.protos.messages import RunState
from fanin.protos.plans import Plan, PrivacyPlan
from fanin.server.aggregation.verify import verify_run
from fanin.server.privacy.accounting import epsilon
from fanin.server.privacy.ledger import from_text
from fanin.server.storage.disk import Durability
from fanin.server.storage.records import RoundMark
from fanin.server.storage.sqlite.care import named_files
from fanin.server.storage.sqlite.engine import open_engine
from fanin.server.storage.sqlite.ledger.rows import SqliteLedger
from fanin.simulation import run_virtual

PRIVACY: Final = PrivacyPlan(
    mechanism="central",
    clip_norm=0.5,
    noise_multiplier=5.0,
    epsilon=1.4,
    delta=1e-6,
    population="phones",
    population_size=1000,
)
"""Two Rounds are within the budget: epsilon is 0.90, 1.31 and 1.62."""


@dataclass(frozen=True)
class Spent:
    """What a Run has left behind, and the moments at which it can be killed."""

    moments: tuple[str, ...]
    rows: tuple[tuple[str, int, int], ...]
    marks: dict[int, RoundMark]


def private(keep_seed_rounds: int) -> Plan:
    base = plan(concurrency=NUM_DEVICES, buffer=NUM_DEVICES, quorum=NUM_DEVICES, deadline_s=60.0, max_rounds=9)
    privacy = replace(PRIVACY, keep_seed_rounds=keep_seed_rounds)
    return replace(base, aggregation=replace(base.aggregation, max_examples=1), privacy=privacy)


def spent(folder: Path, kill_at: Collection[int] = (), *, loses_power: bool = False, keep: int = 9) -> Spent:
    """Run until the budget is spent, and check what must hold after any kill."""

    async def main() -> Spent:
        mortal = Mortal(folder, kill_at, loses_power=loses_power)
        scene = await begin(mortal, folder, private(keep), work_times(10.0, 10.0))
        await scene.await_rest()
        # The files of erased Updates are removed after the Run rests.
        await asyncio.sleep(10.0)
        info = await mortal.operate(lambda runs: runs.info("run"))
        assert (info.state, info.version) == (RunState.FINISHED, 2)
        assert "FN-1660" in info.reason
        ended = await scene.end({})
        assert ended.record[0] == digests(mortal.life.state.runs.version("run"))
        state, folder_of_life = mortal.life.state, mortal.life.folder
        engine = open_engine(folder_of_life / "fanin.db", Durability.PROCESS)
        ledger = SqliteLedger(engine)
        entries = [(from_text(text), count) for text, count in ledger.counts("phones").counts.items()]
        assert epsilon(entries, PRIVACY.delta) <= PRIVACY.epsilon
        rows = tuple((row.run_id, row.round, row.count) for row in ledger.ledger_page("phones", 1))
        marks = {record.round: record.mark for record in state.rounds.rounds("run")}
        for verdict in verify_run(state, "run"):
            assert not verdict.problem
            # With a kept seed, the noise of each Version is recomputed from it.
            assert bool(verdict.from_sum) == bool(verdict.round and not keep)
        named = {each.path for each in named_files(engine, lambda each: state.blobs.read_artifact("manifest", each))}
        engine.dispose()
        stored = {str(path.relative_to(folder_of_life)) for path in (folder_of_life / "blobs").glob("??/*")}
        # A second draw of the noise would have stored another sum, which no record names.
        assert stored <= named
        payloads = {str(path.relative_to(folder_of_life)) for path in (folder_of_life / "updates").rglob("*.payload")}
        assert payloads <= named
        return Spent(moments=tuple(mortal.moments), rows=rows, marks=marks)

    return run_virtual(main())


def check(result: Spent) -> None:
    closed = {number for number, mark in result.marks.items() if mark is not RoundMark.FAILED}
    assert [row[1] for row in result.rows] == sorted({row[1] for row in result.rows}), "a round was charged twice"
    assert closed <= {row[1] for row in result.rows}, "a round that closed was not charged"
    assert len(result.rows) == 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Spent:
    return spent(tmp_path_factory.mktemp("undisturbed"))


def around(moments: tuple[str, ...], effect: str) -> range:
    """Return the numbers of the moments of the first effect of a kind."""
    return range(moments.index(f"before {effect}") + 1, moments.index(f"after {effect}") + 3)


def test_an_undisturbed_run_charges_each_round_once(undisturbed: Spent) -> None:
    check(undisturbed)


@pytest.mark.parametrize("effect", ["Close", "Fold", "Publish"])
def test_a_kill_in_an_effect_charges_each_round_once(tmp_path: Path, undisturbed: Spent, effect: str) -> None:
    moments = around(undisturbed.moments, effect)
    for number in (moments[0], moments[len(moments) // 2], moments[-1]):
        check(spent(tmp_path / str(number), (number,)))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("loses_power", [False, True])
@pytest.mark.parametrize("keep_seed_rounds", [0, 9])
def test_a_kill_at_any_moment_charges_each_round_once(
    tmp_path: Path, undisturbed: Spent, loses_power: bool, keep_seed_rounds: int
) -> None:
    names = ("change", "sync") if loses_power else ("change", "work", "Close", "Fold", "Publish", "GoOn")
    numbers = [number for number, moment in enumerate(undisturbed.moments, 1) if moment.split()[1] in names]
    assert len(numbers) > 20
    for number in numbers:
        folder = tmp_path / str(number)
        check(spent(folder, (number,), loses_power=loses_power, keep=keep_seed_rounds))

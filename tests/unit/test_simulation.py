"""A federation in memory: with the same seed, Versions and logs are identical, with any faults."""

import asyncio
import math
import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from support.errors import raises
from support.scenarios import CALM, PATIENT_S, WILD, bundle_in, members, outcome_of
from support.virtual import PUBLISHER, plan

from fanin.edge.bundles.keys import SigningKey
from fanin.protos.errors import InvalidVersion, Unavailable
from fanin.protos.messages import RoundClosed, RoundFailed, RunRested, RunState
from fanin.protos.plans import Statistic
from fanin.server.aggregation.verify import verify_run
from fanin.server.folder import open_archive
from fanin.simulation import Federation, Habits, Member, Outcome, Scenario, SyntheticTrainer, play, run_virtual

STOPS_S = (50.0, 200.0)


def steady(work_s: float) -> Habits:
    """Return habits with a constant time of work."""
    return replace(CALM, work_s=(work_s, work_s))


def closed_sets(outcome: Outcome) -> list[tuple[str, ...]]:
    """Return the closed sets, in the order of acceptance."""
    return [entry.event.accepted for entry in outcome.events if isinstance(entry.event, RoundClosed)]


def test_three_rounds_end_in_three_versions_that_verify(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, plan(), [CALM] * 4)
    assert [version.number for version in outcome.versions] == [1, 2, 3]
    assert outcome.events[-1].event == RunRested(state=RunState.FINISHED, reason="3 of 3 rounds done")
    assert [verdict.num_updates for verdict in outcome.verdicts] == [0, 4, 4, 4]
    assert outcome.parameters.size == 4007 and outcome.parameters.any()
    # The federation's folder is that of a coordinator.
    assert list(verify_run(open_archive(tmp_path / "state"), "run")) == list(outcome.verdicts)


def test_another_order_of_arrival_ends_in_the_same_bits(tmp_path: Path) -> None:
    runs = [outcome_of(tmp_path / str(seed), plan(), [CALM] * 4, seed) for seed in range(3)]
    assert len({tuple(closed_sets(outcome)) for outcome in runs}) == 3
    assert len({outcome.digests for outcome in runs}) == 1


def test_a_round_closes_at_its_deadline_with_a_quorum(tmp_path: Path) -> None:
    run_plan = plan(quorum=2, deadline_s=60.0, report_factor=math.inf, max_rounds=1)
    outcome = outcome_of(tmp_path, run_plan, [steady(1.0), steady(2.0), steady(1000.0), steady(1000.0)])
    assert closed_sets(outcome) == [("device-0", "device-1")]
    assert outcome.versions[0].round_s >= 60.0


def test_a_round_with_a_quorum_waits_twice_as_long_as_the_quorum_took(tmp_path: Path) -> None:
    work = [steady(10.0), steady(20.0), steady(30.0), steady(1000.0)]
    outcome = outcome_of(tmp_path, plan(quorum=2, deadline_s=60.0, max_rounds=1), work)
    assert closed_sets(outcome) == [("device-0", "device-1", "device-2")]
    assert 40.0 <= outcome.versions[0].round_s <= 41.0


def test_a_run_whose_rounds_never_reach_their_quorum_fails(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, plan(deadline_s=60.0), [*[steady(1.0)] * 3, steady(100.0)])
    failures = [entry.event for entry in outcome.events if isinstance(entry.event, RoundFailed)]
    assert [failure.reason for failure in failures] == [
        "3 updates within 60 s, expected at least 4 (cohort.quorum)"
    ] * 3
    last_event = outcome.events[-1].event
    assert isinstance(last_event, RunRested) and last_event.state is RunState.FAILED


def test_the_same_seed_gives_the_same_bits_and_the_same_log(tmp_path: Path) -> None:
    run_plan = plan(deadline_s=PATIENT_S)
    first, second, other = (
        outcome_of(tmp_path / name, run_plan, [WILD] * 4, seed, STOPS_S)
        for name, seed in (("a", 2), ("b", 2), ("c", 3))
    )
    assert [str(entry) for entry in first.log] == [str(entry) for entry in second.log]
    assert first.events == second.events
    assert other.log != first.log
    # The course of the Run differs, but its Versions do not.
    assert first.digests == second.digests == other.digests
    actions = {entry.what for entry in first.log}
    assert {"stops", "serves", "is back"} <= actions
    assert any(action.startswith("lies: ") for action in actions) and any(
        "connection broke" in action for action in actions
    )


HASH_SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from hashlib import sha256
from pathlib import Path
from support.scenarios import PATIENT_S, WILD, outcome_of
from support.virtual import plan
outcome = outcome_of(Path(sys.argv[2]), plan(deadline_s=PATIENT_S), [WILD] * 4, 2, (50.0, 200.0))
print(sha256("\\n".join(map(str, outcome.log)).encode()).hexdigest(), *outcome.digests)
"""


def test_another_process_computes_the_same_bits_and_log(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path / "here", plan(deadline_s=PATIENT_S), [WILD] * 4, 2, STOPS_S)
    expected = [sha256("\n".join(map(str, outcome.log)).encode()).hexdigest(), *outcome.digests]
    # Another hash seed changes the iteration order of sets of names.
    environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    command = [sys.executable, "-c", HASH_SCRIPT, str(Path(__file__).parents[1]), str(tmp_path / "there")]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert completed.stdout.split() == expected


def test_stale_updates_and_wild_devices_still_end_in_versions_that_verify(tmp_path: Path) -> None:
    run_plan = plan(concurrency=4, buffer=2, quorum=2, deadline_s=PATIENT_S, max_rounds=6, max_staleness=3)
    outcome = outcome_of(tmp_path, run_plan, [steady(5.0), replace(WILD, work_s=(20.0, 60.0)), WILD, WILD], 5, STOPS_S)
    assert len(outcome.versions) == 6
    assert sum(version.num_stale for version in outcome.versions) > 0


def test_a_run_that_cannot_end_is_reported(tmp_path: Path) -> None:
    scenario = Scenario(
        plan=plan(), bundle=bundle_in(tmp_path), publisher=PUBLISHER, members=members([CALM] * 3), max_s=3600.0
    )
    offline_scenario = replace(scenario, members=members([replace(CALM, stay_s=1.0, lost=1.0)] * 4))
    message = (
        "scenario: the run has not ended after 3600 s: version 0 of 3, round 2 is SELECTING with 0 updates of at least "
        "4, and 0 devices at work; give it more members that stay, or a longer max_s"
    )
    with raises(TimeoutError, message):
        play(offline_scenario, tmp_path / "lost")
    advice = "the coordinator is down at that time; end its stops earlier, or give it a longer max_s"
    with raises(TimeoutError, f"scenario: the run has not ended after 3600 s: {advice}"):
        play(replace(offline_scenario, stops_s=(3599.0,), down_s=60.0), tmp_path / "down")
    with pytest.raises(ValueError, match=r"expected at least one, each of another name"):
        replace(scenario, members=members([CALM]) * 2)


def test_a_device_that_fails_ends_the_simulation(tmp_path: Path) -> None:
    class Broken(SyntheticTrainer):
        def train(self, *_: object) -> None:
            raise ZeroDivisionError("of the trainer's own")

    async def main() -> None:
        async with Federation(tmp_path) as federation:
            bundle = bundle_in(tmp_path)
            await federation.start_run("run", plan(), bundle, PUBLISHER)
            federation.join(Member(device="broken", trainer=Broken(partition=0)), bundle)
            async for _ in federation.watch("run"):
                pass

    with pytest.raises(ExceptionGroup) as excinfo:
        run_virtual(main())
    assert excinfo.group_contains(ZeroDivisionError)


def test_an_error_of_the_body_is_raised_without_a_group(tmp_path: Path) -> None:
    scenario = Scenario(
        plan=plan(), bundle=bundle_in(tmp_path), publisher=SigningKey(bytes(32)), members=members([CALM] * 4)
    )
    with pytest.raises(InvalidVersion, match="signed"):
        play(scenario, tmp_path)


def test_no_coordinator_serves_between_stop_and_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with Federation(tmp_path) as federation:
            bundle = bundle_in(tmp_path)
            await federation.start_run("run", plan(max_rounds=1), bundle, PUBLISHER)
            for member in members([CALM] * 4):
                federation.join(member, bundle)
            await asyncio.sleep(0.5)
            await federation.stop()
            with pytest.raises(Unavailable, match="FN-1115"):
                assert federation.runs
            await asyncio.sleep(1000.0)
            await federation.start()
            events = [entry.event async for entry in federation.watch("run")]
            assert events[-1] == RunRested(state=RunState.FINISHED, reason="1 of 1 round done")

    run_virtual(main())


def test_statistics_of_the_plan_are_summed_within_their_bounds(tmp_path: Path) -> None:
    """The first device reports far too many words. The Plan does not declare letters."""
    words = Statistic(name="words", unit="words", bound=100)
    counting_members = tuple(
        Member(device=f"device-{i}", trainer=SyntheticTrainer(partition=i, counts={"words": number, "letters": 1}))
        for i, number in enumerate((1 << 50, 7, -7, 8))
    )
    for statistics in ((words,), ()):
        folder = tmp_path / str(len(statistics))
        run_plan = replace(plan(max_rounds=1), statistics=statistics)
        bundle = bundle_in(folder)
        outcome = play(
            Scenario(plan=run_plan, bundle=bundle, publisher=PUBLISHER, members=counting_members, seed=1), folder
        )
        assert dict(outcome.versions[0].statistics) == ({"words": 100 + 8} if statistics else {})


@pytest.mark.parametrize("habits", [CALM, WILD], ids=["calm", "wild"])
def test_a_federation_in_memory_ends_in_the_same_bits_as_one_in_a_folder(tmp_path: Path, habits: Habits) -> None:
    scenario = Scenario(
        plan=plan(deadline_s=PATIENT_S, outer_optimizer="nesterov", outer_options={"momentum": 0.5}),
        bundle=bundle_in(tmp_path),
        publisher=PUBLISHER,
        members=members([habits] * 4),
        seed=2,
        stops_s=STOPS_S,
    )
    in_memory, in_folder = play(scenario), play(scenario, tmp_path / "folder")
    assert len(in_memory.versions) == 3
    assert in_memory.digests == in_folder.digests
    assert in_memory.events == in_folder.events
    assert [str(line) for line in in_memory.log] == [str(line) for line in in_folder.log]
    assert [verdict.problem for verdict in in_memory.verdicts] == [""] * 4
    assert in_memory.verdicts == in_folder.verdicts

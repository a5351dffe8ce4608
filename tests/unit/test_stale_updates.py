"""Buffered and streaming Rounds: Updates for an earlier Round count with a lower weight, and never twice."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.nightly import in_ci
from support.staleness import assignment, check_in, federate, send, settle
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.messages import RoundClosed
from fanin.server.aggregation.verify import verify_run
from fanin.simulation import run_virtual


@pytest.mark.parametrize("buffer", in_ci((1, 2, 3), (2,)))
def test_stale_updates_count_and_the_recomputed_versions_are_the_same(tmp_path: Path, buffer: int) -> None:
    run_plan = plan(buffer=buffer, quorum=buffer, max_staleness=50, max_rounds=30)
    versions = federate(tmp_path, run_plan)
    assert len(versions) == 30
    assert sum(version.num_stale for version in versions) > 0
    # Slow devices take part too: the slowest commits an Update every 19 s.
    assert {name for version in versions for name in version.runtimes} == {"synthetic 1"}


@pytest.mark.nightly
def test_the_slowest_device_has_its_part_only_where_stale_updates_count(tmp_path: Path) -> None:
    def participants(max_staleness: int) -> set[str]:
        devices: set[str] = set()

        async def story(place: Place) -> None:
            async for entry in place.runs.watch("run", 0):
                if isinstance(entry.event, RoundClosed):
                    devices.update(entry.event.accepted)

        folder = tmp_path / str(max_staleness)
        run_plan = plan(buffer=2, quorum=2, max_staleness=max_staleness, max_rounds=20)
        versions = federate(folder, run_plan, story)
        assert any(version.num_stale for version in versions) == (max_staleness > 0)
        return devices

    assert participants(50) == {f"device-{index}" for index in range(4)}
    assert "device-3" not in participants(0)


def test_versions_follow_from_the_exponent_of_the_plan_and_are_recomputed(tmp_path: Path) -> None:
    """Updates that count as much as fresh ones, and less than by default, give other Versions than the default."""

    def digests(exponent: float) -> list[str]:
        run_plan = plan(buffer=2, quorum=2, max_staleness=50, max_rounds=8)
        run_plan = replace(run_plan, aggregation=replace(run_plan.aggregation, staleness_exponent=exponent))
        return [version.version_sha256 for version in federate(tmp_path / f"{exponent}", run_plan)]

    assert len({tuple(digests(exponent)) for exponent in (0.0, 0.5, 2.5)}) == 3


def test_a_buffer_of_the_entire_cohort_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    fedavg = federate(tmp_path / "a", plan())
    with_staleness = federate(tmp_path / "b", plan(max_staleness=50))
    assert [version.version_sha256 for version in with_staleness] == [version.version_sha256 for version in fedavg]


def test_no_more_devices_are_at_work_than_the_plan_allows(tmp_path: Path) -> None:
    """Devices at work for an earlier Round keep their places."""

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(concurrency=3, buffer=1, quorum=1, max_staleness=5))
        for index in range(3):
            assert isinstance(await check_in(place, f"early-{index}"), m.Assigned)
        assert isinstance(await check_in(place, "late"), m.Wait)
        first_answer = await check_in(place, "early-2")
        assert isinstance(first_answer, m.Assigned)
        await send(place, "early-0")
        await settle()
        # One place is free for any device. A device at work receives the same Assignment as before.
        second_answer = await check_in(place, "early-2")
        assert isinstance(second_answer, m.Assigned)
        assert second_answer.assignment.assignment_id == first_answer.assignment.assignment_id
        assert second_answer.assignment.round == 1
        answers = [await check_in(place, device) for device in ("late", "later")]
        assert [type(answer) for answer in answers] == [m.Assigned, m.Wait]
        assert isinstance(answers[0], m.Assigned)
        assert answers[0].assignment.round == 2
        await place.runs.stop()

    run_virtual(main())


def test_a_stale_update_is_accepted_once_and_only_as_long_as_the_plan_allows(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(buffer=1, quorum=1, max_staleness=1, max_rounds=9))
        slow, slower = await assignment(place, "slow"), await assignment(place, "slower")
        await send(place, "fast-1")
        await settle()
        assert (await send(place, "slow", slow)).update_state is m.UpdateState.ACCEPTED
        await settle()
        assert (await send(place, "slow", slow)).update_state is m.UpdateState.ACCEPTED
        assert [len(place.state.rounds.updates("run", number)) for number in (1, 2, 3)] == [1, 1, 0]
        reply = await send(place, "slower", slower)
        assert (reply.round_state, reply.update_state) == (m.RoundState.CLOSED, m.UpdateState.DISCARDED)
        await place.runs.stop()
        assert [verdict.problem for verdict in verify_run(place.state, "run") if verdict.problem] == []

    run_virtual(main())


def test_a_stale_update_is_accepted_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(buffer=1, quorum=1, max_staleness=3, max_rounds=9))
        slow = await assignment(place, "slow")
        await send(place, "fast-1")
        await settle()
        await place.runs.stop()
        new_place = open_place(tmp_path)
        await new_place.runs.start()
        assert (await send(new_place, "slow", slow)).update_state is m.UpdateState.ACCEPTED
        await settle()
        await new_place.runs.stop()
        verdicts = list(verify_run(new_place.state, "run"))
        assert [(verdict.version, verdict.problem) for verdict in verdicts] == [(0, ""), (1, ""), (2, "")]

    run_virtual(main())

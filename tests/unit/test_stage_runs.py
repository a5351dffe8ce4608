"""Runs with stages through the production coordinator: the states of devices, and auxiliary tensors."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from support.nightly import in_ci
from support.stage_runs import (
    DEVICES,
    NUM,
    STAGED_PLAN,
    StagedDevice,
    change_of,
    control_of,
    open_run,
    problems,
    reopen,
    roll_back,
    staged_plan,
    take_round,
)
from support.staleness import settle
from support.virtual import Place

from fanin.protos import messages as m
from fanin.protos.messages import RoundFailed
from fanin.simulation import run_virtual


def test_a_version_has_the_control_variates_of_its_parent_and_round(tmp_path: Path) -> None:
    async def main() -> None:
        place = await open_run(tmp_path, STAGED_PLAN)
        await settle()
        first, second = StagedDevice("a"), StagedDevice("b")
        assert not (await place.state.stores.runs.newest_version("run")).auxiliary
        expected = np.zeros(NUM, np.float32)
        for number in range(1, 4):
            await take_round(place, (first, second))
            version = await place.state.stores.runs.newest_version("run")
            assert (version.number, list(version.auxiliary)) == (number, ["control"])
            key = m.StageState(lineage=0, round=number)
            variates = [device.states[key]["scaffold"]["control"].astype(np.float64) for device in (first, second)]
            expected = (np.sum(variates, axis=0) / len(DEVICES)).astype(np.float32)
            np.testing.assert_allclose(await control_of(place), expected, atol=1e-6)
        assert expected.any()
        assert problems(place) == []
        await place.runs.stop()

    run_virtual(main())


@dataclass
class History:
    """The expected state of a device, computed by the rules of docs/howto/stages.md without the record."""

    lineage: int = 0
    version: int = 0
    last: dict[str, int] = field(default_factory=dict)

    def state(self, device: str) -> m.StageState:
        return m.StageState(lineage=self.lineage, round=self.last.get(device, 0))

    def publish(self, devices: Sequence[str], number: int) -> None:
        self.version += 1
        self.last |= dict.fromkeys(devices, number)

    def roll_back(self) -> None:
        self.version += 1
        self.lineage, self.last = self.version, {}


@pytest.mark.parametrize("seed", in_ci(range(6), range(2)))
def test_devices_begin_with_the_state_after_their_last_update_that_counts(tmp_path: Path, seed: int) -> None:
    """Random sequences of published Rounds, failed Rounds, rollbacks and restarts of the coordinator."""
    rng = random.Random(seed)

    async def main() -> None:
        devices, history, events = {name: StagedDevice(name) for name in DEVICES}, History(), []
        place = await open_run(tmp_path, STAGED_PLAN)
        await settle()
        for number in range(14):
            event = rng.choice(("publish", "publish", "publish", "fail", "restart", "rollback"))
            # Three failures in a row would end the Run.
            event = "publish" if events[-2:] == ["fail", "fail"] else event
            events += [event] * (event != "restart")
            match event:
                case "publish":
                    await take_and_check(place, devices, history, rng.sample(DEVICES, 2))
                case "fail":
                    await fail_round(place, devices, history, rng.choice(DEVICES))
                case "restart":
                    place = await reopen(tmp_path, place)
                    await settle()
                case "rollback":
                    await roll_back(place, rng.randint(0, history.version), f"command-{number}")
                    history.roll_back()
            newest = await place.state.stores.runs.newest_version("run")
            assert newest.number == history.version, events
            await check_mean(place, devices, history)
        assert problems(place) == []
        await place.runs.stop()

    run_virtual(main())


async def take_and_check(
    place: Place, devices: dict[str, StagedDevice], history: History, names: Sequence[str]
) -> None:
    number = 0
    for name in names:
        work = await devices[name].assignment(place)
        assert work.state == history.state(name)
        number = work.round
        reply = await devices[name].send(place, work, change_of(name, number))
        assert reply.update_state is m.UpdateState.ACCEPTED
    await settle()
    history.publish(names, number)


async def fail_round(place: Place, devices: dict[str, StagedDevice], history: History, name: str) -> None:
    """Let a Round fail after it has accepted one Update, which then does not count."""
    work = await devices[name].assignment(place)
    assert work.state == history.state(name)
    reply = await devices[name].send(place, work, change_of(name, work.round))
    assert reply.update_state is m.UpdateState.ACCEPTED
    # A second device holds an Assignment, so the deadline passes.
    other = next(one for one in DEVICES if one != name)
    await devices[other].assignment(place)
    await asyncio.sleep(STAGED_PLAN.cohort.deadline_s + 1.0)
    failures = [one.event for one in place.state.runs.events("run") if isinstance(one.event, RoundFailed)]
    assert failures[-1].round == work.round


async def check_mean(place: Place, devices: dict[str, StagedDevice], history: History) -> None:
    """Check that c is the mean of the c_i of all devices, up to the rounding of float32."""
    states = [devices[name].states.get(history.state(name)) for name in DEVICES]
    variates = [np.zeros(NUM) if state is None else state["scaffold"]["control"] for state in states]
    np.testing.assert_allclose(await control_of(place), np.mean(variates, axis=0), atol=2e-6)


@pytest.mark.parametrize("rule", ["weighted_mean", "trimmed_mean"])
def test_a_restart_in_any_round_changes_no_bit_of_any_version(tmp_path: Path, rule: str) -> None:
    options = {"trim": 0.4} if rule == "trimmed_mean" else {}
    run_plan = staged_plan(4, concurrency=3, rule=rule, rule_options=options, outer_optimizer="nesterov")

    async def versions(folder: Path, *, restarts: bool) -> list[tuple[str, str]]:
        place, devices, digests = await open_run(folder, run_plan), [StagedDevice(name) for name in DEVICES], []
        await settle()
        for _ in range(4):
            for device in devices:
                if restarts:
                    place = await reopen(folder, place)
                    await settle()
                work = await device.assignment(place)
                await device.send(place, work, change_of(device.name, work.round))
            await settle()
            version = await place.state.stores.runs.newest_version("run")
            digests.append((version.sha256, version.auxiliary["control"].sha256))
        assert problems(place) == []
        await place.runs.stop()
        return digests

    expected = run_virtual(versions(tmp_path / "one", restarts=False))
    assert len(set(expected)) == 4
    assert run_virtual(versions(tmp_path / "two", restarts=True)) == expected


def test_a_rollback_starts_with_zeros_and_with_the_grid_of_its_version(tmp_path: Path) -> None:
    async def main() -> None:
        place, devices = await open_run(tmp_path, STAGED_PLAN), [StagedDevice("a"), StagedDevice("b")]
        await settle()
        for _ in range(3):
            await take_round(place, devices)
        assert (await control_of(place)).any()
        await roll_back(place, 2, "back")
        newest = await place.state.stores.runs.newest_version("run")
        assert (newest.number, dict(newest.auxiliary)) == (4, {})
        work = await devices[0].assignment(place)
        assert work.state == m.StageState(lineage=4, round=0)
        assert work.grid == place.state.rounds.grid_after("run", 2)
        await take_round(place, devices)
        assert problems(place) == []
        await place.runs.stop()

    run_virtual(main())

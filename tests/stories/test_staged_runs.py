"""Runs with stages on production devices and coordinator: states follow the Versions through failures and restarts.

The tests run on a virtual clock. Devices miss deadlines, an operator rolls back, and the coordinator is killed at
random moments. ``test_every_kill`` compares such a Run with the undisturbed one, bit by bit.
"""

import asyncio
import random
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from support.mortal import Mortal
from support.nightly import in_ci
from support.stage_runs import NUM, TABLE, staged_plan
from support.virtual import bundle_in, start

from fanin.clients.device.storage.states import StateLabel
from fanin.edge.codecs.pipeline import States, first_states
from fanin.edge.codecs.stages import layout_of, stages_of
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.messages import Adopt, Command, Pause, RoundClosed, RunState, VersionPublished
from fanin.server.aggregation.parameters import auxiliary_pieces
from fanin.server.aggregation.verify import verify_run
from fanin.server.runs.catalog import Runs
from fanin.server.storage.stores import CoordinatorState
from fanin.simulation import VirtualDevice, run_virtual
from fanin.simulation.federation.memory import MemoryStates

NUM_DEVICES: Final = 3
PLAN: Final = staged_plan(NUM_DEVICES, concurrency=2, deadline_s=60.0, max_rounds=5)
NUM_SEEDS: Final = 30


class StateHistory(MemoryStates):
    """States of a device, and copies of all states that it ever stored, by lineage and Round."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[m.StageState, States] = {}

    def put(self, label: StateLabel, states: States) -> None:
        key = m.StageState(lineage=label.lineage, round=label.round)
        # A repeated training gives bit-identical states.
        assert key not in self.copies or bits(self.copies[key]) == bits(states)
        self.copies[key] = states
        super().put(label, states)


class RecordingMortal(Mortal):
    """A coordinator that records the Assignments of all devices."""

    def __init__(self, folder: Path, kill_at: set[int]) -> None:
        super().__init__(folder, kill_at)
        self.works: list[tuple[str, m.Assignment]] = []

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        answer = await super().check_in(device, check_in)
        if isinstance(answer, m.Assigned):
            self.works.append((device, answer.assignment))
        return answer


def bits(states: States) -> dict[tuple[str, str], bytes]:
    return {(stage, name): values.tobytes() for stage, tensors in states.items() for name, values in tensors.items()}


@dataclass(frozen=True)
class Outcome:
    """The result of a Run."""

    state: CoordinatorState
    works: list[tuple[str, m.Assignment]]
    histories: Mapping[str, StateHistory]


def work_s(rng: random.Random) -> float:
    """Draw the seconds of a training. Some trainings take longer than a Round."""
    return rng.choice((5.0, 5.0, 10.0, 10.0, 20.0, 20.0, 30.0, 75.0))


async def federate(folder: Path, seed: int) -> Outcome:
    """Run five Rounds, a rollback to any Version, and three Rounds; kill the coordinator three times."""
    rng = random.Random(seed)
    mortal = RecordingMortal(folder, {rng.randint(1, 900) for _ in range(3)})
    await mortal.start()
    bundle = bundle_in(folder, scaffold=True)
    await mortal.operate(lambda runs: start(runs, bundle, PLAN))
    devices = {f"device-{index}": device for index, device in enumerate(mortal.devices(NUM_DEVICES, work_s))}
    histories = {name: StateHistory() for name in devices}
    for name, device in devices.items():
        device.folder.states = histories[name]
    tasks = [asyncio.create_task(device.run()) for device in devices.values()]
    if rng.random() < 0.5:
        await asyncio.sleep(rng.uniform(1.0, 100.0))
        await mortal.operate(lambda runs: runs.command(Command(command_id="pause", run_id="run", what=Pause())))
    else:
        await await_rest(mortal)
    restart(rng, devices)
    newest = (await mortal.operate(lambda runs: runs.version("run", None))).version
    adoption = Adopt(number=rng.randint(0, newest.number), rounds=3)
    await asyncio.sleep(10.0)
    await mortal.operate(lambda runs: runs.command(Command(command_id="back", run_id="run", what=adoption)))
    await await_rest(mortal)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await mortal.stop()
    return Outcome(state=mortal.life.state, works=mortal.works, histories=histories)


def restart(rng: random.Random, devices: Mapping[str, VirtualDevice]) -> None:
    """Restart some devices, which lose all state that is not on their disk."""
    for device in devices.values():
        if rng.random() < 0.5:
            device.restart()


async def await_rest(mortal: Mortal) -> None:
    async def watch(runs: Runs) -> None:
        async with aclosing(runs.watch("run", 0)) as events:
            async for _ in events:
                pass

    await mortal.operate(watch)


def rounds_and_versions(state: CoordinatorState) -> tuple[dict[int, tuple[str, ...]], list[tuple[int, int]]]:
    """Return the devices of each published Round, and the Round of each Version, by the Run's events.

    The Round of a Version from outside is 0.
    """
    events = [entry.event for entry in state.runs.events("run")]
    accepted = {event.round: tuple(event.accepted) for event in events if isinstance(event, RoundClosed)}
    versions = [(0, 0), *((event.number, event.round) for event in events if isinstance(event, VersionPublished))]
    return {number: accepted[number] for _, number in versions if number}, versions


def expected_state(outcome: Outcome, device: str, version: int) -> m.StageState:
    """Return the last Round up to a Version that folded an Update of a device, within the Version's lineage.

    The Run's events decide.
    """
    devices_of, versions = rounds_and_versions(outcome.state)
    lineage = max(number for number, round_number in versions if not round_number and number <= version)
    rounds = [
        round_number
        for number, round_number in versions
        if lineage < number <= version and device in devices_of[round_number]
    ]
    return m.StageState(lineage=lineage, round=max(rounds, default=0))


def control_of(state: CoordinatorState, number: int) -> Float32s:
    version = state.runs.version("run", number)
    assert version is not None
    layout = layout_of(TABLE, stages_of(PLAN.stages))
    return np.concatenate(list(auxiliary_pieces(state.blobs, version, "control", layout.auxiliary)))


@pytest.mark.parametrize("seed", in_ci(range(NUM_SEEDS), range(4)))
def test_states_are_those_after_the_last_update_that_a_version_contains(tmp_path: Path, seed: int) -> None:
    async def main() -> Outcome:
        async with asyncio.timeout(10_000.0):
            return await federate(tmp_path, seed)

    outcome = run_virtual(main())
    state, run = outcome.state, outcome.state.runs.run("run")
    assert run is not None
    # Three Rounds in succession may miss their deadlines.
    assert run.state in (RunState.FINISHED, RunState.FAILED), run.reason
    assert [verdict.problem for verdict in verify_run(state, "run") if verdict.problem] == []
    # The states that devices were assigned to begin with.
    assert outcome.works
    for device, work in outcome.works:
        assert work.state == expected_state(outcome, device, work.version.number)
    _, versions = rounds_and_versions(state)
    first = first_states(stages_of(PLAN.stages), NUM)
    for number, _ in versions:
        expected_states = {device: expected_state(outcome, device, number) for device in outcome.histories}
        states = [
            outcome.histories[device].copies[key] if key.round else first for device, key in expected_states.items()
        ]
        # The c_i with which each device would begin the next Round.
        mean = np.mean([tensors["scaffold"]["control"].astype(np.float64) for tensors in states], axis=0)
        np.testing.assert_allclose(control_of(state, number), mean, rtol=0, atol=1e-6)
    # The state that each device will begin with is in its folder, bit by bit.
    for device, history in outcome.histories.items():
        key = expected_state(outcome, device, versions[-1][0])
        if key.round:
            label = StateLabel(run_id="run", lineage=key.lineage, round=key.round)
            assert bits(history.get(label, first)) == bits(history.copies[key])
    assert any(control_of(state, number).any() for number, round_number in versions if round_number)

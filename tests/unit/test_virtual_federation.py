"""A whole federation in one process on a virtual clock: the production coordinator, sessions and codecs."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from support.virtual import PUBLISHER, bundle_in, open_place, plan, start

from fanin.clients.testing import (
    LoopbackTransport,
    SyntheticTrainer,
    VirtualDevice,
    run_virtual,
)
from fanin.protos.plans import Plan
from fanin.protos.runs import RoundClosed, RoundFailed, RunEvent, RunRested, RunState, VersionPublished
from fanin.server.verify import verify_run


async def federate(
    folder: Path, wanted: Plan, num_devices: int, order_seed: int, work_s: Callable[[random.Random], float]
) -> tuple[list[RunEvent], object]:
    """Run a Plan to its rest; what happened, and the coordinator's tools for a look into its state."""
    place = open_place(folder, order_seed)
    runs, tools, coordinator = place.runs, place.tools, place.coordinator
    await start(runs, bundle_in(folder), wanted)
    devices = []
    for index in range(num_devices):
        line = LoopbackTransport(fleet=coordinator, device=f"device-{index}", latency_s=0.01)
        trainer = SyntheticTrainer(partition=index, num_examples=10 + index)
        rng = random.Random(f"{order_seed}/{index}")
        devices.append(VirtualDevice(line, trainer, (PUBLISHER.public,), rng, work_s))
    tasks = [asyncio.create_task(device.run()) for device in devices]
    events = [recorded.event async for recorded in runs.watch("run", 0)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await runs.stop()
    return events, tools


def published(events: list[RunEvent]) -> list[VersionPublished]:
    """The Versions of a Run."""
    return [event for event in events if isinstance(event, VersionPublished)]


def test_three_rounds_end_in_three_versions_that_verify(tmp_path: Path) -> None:
    events, tools = run_virtual(federate(tmp_path, plan(), 4, 1, lambda rng: rng.uniform(1, 100)))
    assert [event.number for event in published(events)] == [1, 2, 3]
    assert events[-1] == RunRested(state=RunState.FINISHED, reason="3 of 3 rounds done")
    verdicts = list(verify_run(tools, "run"))
    assert [verdict.problem for verdict in verdicts] == ["", "", "", ""]
    assert [verdict.num_updates for verdict in verdicts] == [0, 4, 4, 4]


def test_another_order_of_arrival_ends_in_the_same_bits(tmp_path: Path) -> None:
    orders, digests = set(), set()
    for seed in range(3):
        events, _ = run_virtual(federate(tmp_path / str(seed), plan(), 4, seed, lambda rng: rng.uniform(1, 100)))
        orders.add(tuple(event.accepted for event in events if isinstance(event, RoundClosed)))
        digests.add(tuple(event.version_sha256 for event in published(events)))
    assert len(orders) == 3
    assert len(digests) == 1


def test_a_round_closes_at_its_deadline_with_a_quorum(tmp_path: Path) -> None:
    wanted = plan(concurrency=4, buffer=4, quorum=2, deadline_s=60.0, max_rounds=1)
    slow_from_third = iter([1.0, 2.0, 1000.0, 1000.0])
    events, _ = run_virtual(federate(tmp_path, wanted, 4, 1, lambda _: next(slow_from_third, 1000.0)))
    (closed,) = [event for event in events if isinstance(event, RoundClosed)]
    assert len(closed.accepted) == 2
    assert published(events)[0].round_s >= 60.0


def test_a_run_whose_rounds_never_reach_their_quorum_fails(tmp_path: Path) -> None:
    events, _ = run_virtual(federate(tmp_path, plan(deadline_s=60.0), 3, 1, lambda _: 1.0))
    failures = [event for event in events if isinstance(event, RoundFailed)]
    assert [failure.reason for failure in failures] == ["3 updates within 60 s, expected at least 4"] * 3
    assert isinstance(events[-1], RunRested)
    assert events[-1].state is RunState.FAILED

"""A month of a coordinator: Run after Run with retention on, a backup, and a restore on which a Run goes on.

The Rounds run on a virtual clock. The files have the time of this machine, so the pruner's clock is a month ahead.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from support.virtual import PUBLISHER, Place, bundle_in, open_place, plan, start

from fanin.protos.messages import Command, Resume
from fanin.protos.plans import RetentionPlan
from fanin.server.aggregation.verify import Verdict, verify_run
from fanin.server.care.backup import back_up
from fanin.server.care.places import place_of
from fanin.server.care.pruner import Pruner
from fanin.server.care.restore import restore
from fanin.simulation import LoopbackTransport, SyntheticTrainer, VirtualDevice, run_virtual

MONTH_S = 30 * 86400.0
NUM_DEVICES = 2
KEEP_UPDATES = 4
KEEP_VERSIONS = 6
RETENTION = RetentionPlan(keep_versions=KEEP_VERSIONS, keep_updates=KEEP_UPDATES)


@contextmanager
def devices(place: Place) -> Iterator[None]:
    """Let devices take part in every Run."""
    tasks = []
    for index in range(NUM_DEVICES):
        line = LoopbackTransport(fleet=place.coordinator, device=f"device-{index}", latency_s=0.01)
        trainer = SyntheticTrainer(partition=index, num_examples=10 + index)
        rng = random.Random(f"device {index}")
        device = VirtualDevice(line, trainer, (PUBLISHER.public,), rng, lambda *_: 1.0)
        tasks.append(asyncio.create_task(device.run()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def finish(place: Place, run_id: str) -> None:
    """Wait until a Run rests."""
    async for _ in place.runs.watch(run_id, 0):
        pass


def sizes(state: Path) -> tuple[int, int]:
    """Return the numbers of stored Chunks and payloads."""
    return len(list(state.glob("blobs/*/*"))), len(list(state.glob("updates/*/*/*")))


def verdicts(place: Place, run_id: str) -> list[Verdict]:
    """Verify a Run, which must have no problem."""
    results = list(verify_run(place.state, run_id))
    assert [each.problem for each in results if each.problem] == []
    return results


@pytest.mark.parametrize(
    ("num_runs", "num_rounds"), [(2, 12), pytest.param(60, 50, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
)
def test_a_month_with_retention_leaves_a_bounded_folder_that_verifies(
    tmp_path: Path, num_runs: int, num_rounds: int
) -> None:
    run_ids = [f"run-{number}" for number in range(num_runs)]
    small = replace(
        plan(concurrency=NUM_DEVICES, buffer=NUM_DEVICES, quorum=NUM_DEVICES, max_rounds=num_rounds),
        retention=RETENTION,
    )

    async def month() -> None:
        place = open_place(tmp_path)
        stores = replace(place.state.stores, wall=lambda: time.time() + MONTH_S)
        pruner = Pruner(stores, place.state.files)
        bundle = bundle_in(tmp_path)
        await start(place.runs, bundle, small, run_ids[0])
        growth = []
        with devices(place):
            for run_id, following in zip(run_ids, [*run_ids[1:], ""], strict=True):
                await finish(place, run_id)
                await pruner.prune_all()
                growth.append(sizes(tmp_path / "state"))
                if following:
                    await start(place.runs, bundle, small, following)
        # Each Run leaves as much as the first one, however many Rounds it had.
        per_run = [second[1] - first[1] for first, second in pairwise(growth)]
        assert set(per_run) <= {KEEP_UPDATES * NUM_DEVICES}
        assert growth[-1][0] <= growth[0][0] + (num_runs - 1) * KEEP_VERSIONS
        for run_id in run_ids:
            rounds = [each for each in verdicts(place, run_id) if each.round]
            assert [each.version for each in rounds if not each.digest_only] == list(
                range(num_rounds - KEEP_UPDATES + 1, num_rounds + 1)
            )
        await place.runs.stop()

    async def after_restore() -> None:
        place = open_place(tmp_path / "other")
        await place.runs.start()
        await place.runs.command(Command(command_id="on", run_id=run_ids[-1], what=Resume(rounds=3)))
        with devices(place):
            await finish(place, run_ids[-1])
        assert (await place.runs.info(run_ids[-1])).version == num_rounds + 3
        for run_id in run_ids:
            verdicts(place, run_id)
        await place.runs.stop()

    run_virtual(month())
    steps: list[str] = []
    back_up(tmp_path / "state", place_of(str(tmp_path / "backup")), steps.append)
    (tmp_path / "other").mkdir()
    restored = restore(place_of(str(tmp_path / "backup")), tmp_path / "other" / "state", steps.append, was_stopped=True)
    assert restored.waiting == () and len(restored.manifest.newest) == num_runs
    run_virtual(after_restore())

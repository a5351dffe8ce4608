"""A Run whose devices have different speeds, on a virtual clock, and the calls of single devices."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from fanin.clients.device.updates import Change, make_update
from fanin.edge.tensors import TensorTable
from fanin.protos import messages as m
from fanin.protos.messages import VersionPublished
from fanin.protos.plans import Plan
from fanin.server.aggregation.verify import verify_run
from fanin.simulation import LoopbackTransport, SyntheticTrainer, VirtualDevice, run_virtual
from support.virtual import PUBLISHER, Place, bundle_in, open_place, start

T = TypeVar("T")
Story = Callable[[Place], Awaitable[None]]
CAPABILITIES = m.Capabilities(codecs=("fixed32",), runtimes=("synthetic 1",), graph_formats=("onnx",))
TABLE = TensorTable.of({"a": (3, 5), "b": (7,)})
SLOW_S = (1.0, 2.0, 7.0, 19.0)
"""Seconds of work of each of four devices. While the last one trains once, the first one could fill many Rounds."""


def devices(folder: Path, place: Place, seed: int = 0) -> list[asyncio.Task[None]]:
    """Start four devices, each with a constant time of work."""
    tasks = []
    for index, work_s in enumerate(SLOW_S):
        line = LoopbackTransport(fleet=place.coordinator, device=f"device-{index}", latency_s=0.01)
        trainer = SyntheticTrainer(partition=index, num_examples=10 + index)
        rng = random.Random(f"{seed}/{index}")
        device = VirtualDevice(line, trainer, (PUBLISHER.public,), rng, lambda *_, work_s=work_s: work_s)
        tasks.append(asyncio.create_task(device.run()))
    return tasks


async def hang_up(place: Place, tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await place.runs.stop()


async def check_in(place: Place, device: str) -> m.CheckInAnswer:
    """Check in with a short wait."""
    return await place.coordinator.check_in(
        device, m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=0.1)
    )


async def assignment(place: Place, device: str) -> m.Assignment:
    """Check in, and return the Assignment that the coordinator must answer with."""
    answer = await check_in(place, device)
    assert isinstance(answer, m.Assigned), answer
    return answer.assignment


def update(work: m.Assignment, size: float = 0.01, table: TensorTable = TABLE) -> tuple[m.UpdateHeader, bytes]:
    """Return an Update of 10 examples that changes every parameter by the same value."""
    change = Change(values=np.full(table.num_values, size, np.float32), counts={m.EXAMPLES: 10})
    return make_update(work, table, change, m.Telemetry(runtime="synthetic 1"))


async def send(place: Place, device: str, work: m.Assignment | None = None) -> m.UploadReply:
    """Send an Update for an Assignment, by default for a new one."""
    line = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
    header, payload = update(work or await assignment(place, device))
    return await line.upload(header, lambda offset, size_bytes: payload[offset : offset + size_bytes])


async def settle() -> None:
    """Let the coordinator complete its pending work."""
    await asyncio.sleep(1.0)


async def watched(place: Place) -> list[VersionPublished]:
    """Wait until the Run rests. Return its Versions."""
    events = [entry.event async for entry in place.runs.watch("run", 0)]
    return [event for event in events if isinstance(event, VersionPublished)]


def federate(
    folder: Path, plan: Plan, story: Callable[[Place], Awaitable[None]] | None = None
) -> list[VersionPublished]:
    """Run a federation of four devices with different speeds, and recompute its Versions. Return them."""

    async def main() -> list[VersionPublished]:
        place = open_place(folder)
        await start(place.runs, bundle_in(folder), plan)
        tasks = devices(folder, place)
        if story is not None:
            await story(place)
        versions = await watched(place)
        await hang_up(place, tasks)
        assert [verdict.problem for verdict in verify_run(place.state, "run") if verdict.problem] == []
        return versions

    return run_virtual(main())


async def slow_store(work: Callable[[], T]) -> T:
    """Run the work with a short delay before and after it, so that the end of a Round takes some time."""
    await asyncio.sleep(0.01)
    result = work()
    await asyncio.sleep(0.01)
    return result

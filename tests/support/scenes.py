"""A Run with devices on a virtual clock, and an operator's commands."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fanin.protos.messages import (
    Adopt,
    Command,
    Pause,
    Resume,
    RunEvent,
    RunInfo,
    Stop,
    VersionPublished,
)
from fanin.protos.plans import Plan
from fanin.server.aggregation.verify import verify_run
from fanin.server.storage.lanes import Lane, inline
from fanin.simulation import LoopbackTransport, SyntheticTrainer, VirtualDevice, run_virtual
from support.virtual import PUBLISHER, Place, bundle_in, open_place, plan, start

T = TypeVar("T")
Action = Pause | Resume | Stop | Adopt


@dataclass
class Scene:
    """A coordinator with one Run, and devices that work for 10 s a Round."""

    folder: Path
    place: Place
    tasks: list[asyncio.Task[None]]
    num_devices: int
    num_commands: int = 0

    async def command(self, what: Action, command_id: str = "") -> RunInfo:
        """Send a command, with a new id by default."""
        self.num_commands += 1
        command_id = command_id or f"command-{self.num_commands}"
        return await self.place.runs.command(Command(command_id=command_id, run_id="run", what=what))

    async def events(self) -> list[RunEvent]:
        """Return all events so far."""
        return [entry.event for entry in self.place.state.runs.events("run")]

    async def until(self, kind: type[RunEvent], number: int = 1) -> None:
        """Wait for the event with this number among those of its kind."""
        async with aclosing(self.place.runs.watch("run", 0)) as watched:
            async for entry in watched:
                number -= isinstance(entry.event, kind)
                if not number:
                    return

    async def restart(self) -> None:
        """Restart as after a kill: the devices continue with a coordinator that knows only its folder."""
        await self.hang_up()
        self.place = open_place(self.folder)
        await self.place.runs.start()
        self.work()

    async def hang_up(self) -> None:
        """Stop the devices and the coordinator."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.place.runs.stop()

    def work(self) -> None:
        """Start the devices."""
        for index in range(self.num_devices):
            line = LoopbackTransport(fleet=self.place.coordinator, device=f"device-{index}", latency_s=0.01)
            trainer = SyntheticTrainer(partition=index, num_examples=10 + index)
            device = VirtualDevice(line, trainer, (PUBLISHER.public,), random.Random(index), lambda *_: 10.0)
            self.tasks.append(asyncio.create_task(device.run()))


def play(
    folder: Path,
    story: Callable[[Scene], Awaitable[None]],
    run_plan: Plan | None = None,
    devices: int = 4,
    store_lane: Lane = inline,
) -> list[RunEvent]:
    """Play a story with a Run, and verify its record. Return all events."""

    async def main() -> list[RunEvent]:
        scene = Scene(folder, open_place(folder, store_lane=store_lane), [], devices)
        await start(scene.place.runs, bundle_in(folder), run_plan or plan())
        scene.work()
        await story(scene)
        events = await scene.events()
        await scene.hang_up()
        assert [verdict.problem for verdict in verify_run(scene.place.state, "run") if verdict.problem] == []
        return events

    return run_virtual(main())


def versions(events: list[RunEvent]) -> list[VersionPublished]:
    return [event for event in events if isinstance(event, VersionPublished)]


async def wait_for_end(scene: Scene) -> None:
    """Wait until the Run rests."""
    async for _ in scene.place.runs.watch("run", 0):
        pass

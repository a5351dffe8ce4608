"""Runs on a virtual clock whose coordinator is killed, and how they end."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.edge.bundles.bundle import Bundle
from fanin.protos.messages import RunEvent, Version, VersionPublished
from fanin.protos.plans import Plan
from fanin.server.aggregation.verify import verify_run
from fanin.server.runs.catalog import Runs
from fanin.simulation import run_virtual
from support.mortal import Mortal
from support.virtual import bundle_in, start

NUM_DEVICES: Final = 3


@dataclass(frozen=True)
class Ending:
    """The part of a Run's result that a kill may not change, and the moments and turns of the Run and of each command.

    ``record`` has the digests of the newest Version's tensors, and the events.
    """

    record: tuple[object, ...]
    moments: tuple[str, ...]
    turns: tuple[int, ...]
    kills: tuple[str, ...]
    commands: dict[str, range]
    num_stale: int


@dataclass
class Scene:
    """A Run, from the publication of its Bundle on."""

    mortal: Mortal
    bundle: Bundle
    tasks: list[asyncio.Task[None]]

    async def await_rest(self) -> None:
        """Wait until no Round is to follow."""

        async def watch(runs: Runs) -> None:
            async with aclosing(runs.watch("run", 0)) as events:
                async for _ in events:
                    pass

        await self.mortal.operate(watch)

    async def end(self, commands: dict[str, range]) -> Ending:
        """Stop all devices and the coordinator, check the record, and return the ending."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.mortal.stop()
        state = self.mortal.life.state
        assert [verdict.problem for verdict in verify_run(state, "run") if verdict.problem] == []
        assert self.mortal.accepted
        assert all(state.rounds.update("run", number, device) for device, number in self.mortal.accepted)
        events = [entry.event for entry in state.runs.events("run")]
        return Ending(
            record=(digests(state.runs.version("run")), *(stable_fields(event) for event in events)),
            num_stale=sum(event.num_stale for event in events if isinstance(event, VersionPublished)),
            moments=tuple(self.mortal.moments),
            turns=tuple(self.mortal.turns),
            kills=tuple(self.mortal.kills),
            commands=commands,
        )


async def begin(mortal: Mortal, folder: Path, run_plan: Plan, work_s: Iterator[float]) -> Scene:
    """Publish the Bundle, start the Run, and let devices work for ``work_s`` seconds each time."""
    await mortal.start()
    bundle = bundle_in(folder, scaffold=bool(run_plan.stages))
    await mortal.operate(lambda runs: start(runs, bundle, run_plan))
    tasks = [asyncio.create_task(device.run()) for device in mortal.devices(NUM_DEVICES, lambda _: next(work_s))]
    return Scene(mortal=mortal, bundle=bundle, tasks=tasks)


def digests(version: Version | None) -> tuple[str, ...]:
    """Return the digests of a Version's tensors."""
    assert version is not None
    return version.sha256, *(tensor.sha256 for tensor in version.auxiliary.values())


def stable_fields(event: RunEvent) -> tuple[object, ...]:
    """Return an event without the fields that depend on time and on the order of arrival."""
    names = ("number", "round", "version_sha256", "base_version", "rounds", "state", "reason", "adopted_number")
    return type(event).__name__, *(getattr(event, name, None) for name in names)


def work_times(first: float, later: float) -> Iterator[float]:
    """Yield ``first`` seconds of work, and ``later`` seconds each time afterwards."""
    yield first
    while True:
        yield later


Story = Callable[[Path, Collection[int], bool], Awaitable[Ending]]


def ending(story: Story, folder: Path, kill_at: Collection[int] = (), *, loses_power: bool = False) -> Ending:
    """Return the ending of a story. A story that hangs fails the test, because virtual time passes quickly."""

    async def main() -> Ending:
        async with asyncio.timeout(10_000.0):
            return await story(folder, kill_at, loses_power)

    return run_virtual(main())

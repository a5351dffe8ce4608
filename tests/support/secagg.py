"""Runs with secure aggregation on a virtual clock, whose devices vanish in a phase or send what they like."""

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from fanin.clients.device.updates import Trainer
from fanin.protos import messages as m
from fanin.protos.errors import FaninError, Unavailable
from fanin.protos.plans import Plan, RoundPlan
from fanin.server.aggregation.verify import verify_run
from fanin.simulation import LoopbackTransport, SyntheticTrainer, VirtualDevice, run_virtual, synthetic_bundle
from fanin.simulation.federation.loopback import Fleet
from support.virtual import PUBLISHER, SHAPES, Place, open_place, plan, start

UPLOAD: Final = "upload"
COUNTS: Final = {
    m.TRAIN_LOSS: 3 << 16,
    m.EVAL_EXAMPLES: 10,
    m.EVAL_LOSS: 5 << 16,
    m.EVAL_PREDICTIONS: 10,
    m.EVAL_CORRECT_FLOAT: 7,
    m.EVAL_CORRECT_INT8: 6,
    m.EVAL_AGREE: 8,
}
"""The statistics of a device."""
SUMS: Final = ("total_examples", "train_loss", "train_loss_examples", "evaluation", "num_rounded", "num_saturated")
"""The fields of a published Version that are sums over its devices."""
NOBODY: Final[Mapping[int, str]] = {}


def plan_of(name: str, num_devices: int, quorum: int, max_rounds: int = 1, **options: object) -> Plan:
    """Return a Plan. The quorum closes each phase after two seconds."""
    cohort = {"concurrency": num_devices, "buffer": num_devices, "quorum": quorum}
    whole = plan(**cohort, max_rounds=max_rounds, min_report_s=2.0, report_factor=2.0)
    aggregation = replace(whole.aggregation, max_examples=4096)
    return replace(whole, aggregation=aggregation, round=RoundPlan(protocol=name, options=options))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line(LoopbackTransport):
    """The calls of a device that vanishes before a call, for a time: before the message of a phase, or the upload.

    ``change`` may change a message before it is sent. ``errors`` has the codes of the coordinator's refusals, and
    ``replies`` the ends of its uploads.
    """

    gone_at: str = ""
    gone_s: float = 1e9
    change: Callable[[m.ExchangeRequest], m.ExchangeRequest] = lambda request: request
    gone: set[str] = field(default_factory=set)
    came_back: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    replies: list[m.UpdateState] = field(default_factory=list)

    async def upload(self, header: m.UpdateHeader, read: Callable[[int, int], bytes]) -> m.UploadReply:
        """See Transport."""
        await self._reach(UPLOAD)
        reply = await LoopbackTransport.upload(self, header, read)
        self.replies.append(reply.update_state)
        return reply

    async def exchange(self, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        """See Transport."""
        await self._reach(request.phase)
        try:
            return await LoopbackTransport.exchange(self, self.change(request))
        except FaninError as exc:
            self.errors.append(exc.code)
            raise

    async def report(self, report: m.Report) -> m.UploadReply:
        """See Transport."""
        await self._reach("")
        return await LoopbackTransport.report(self, report)

    async def _reach(self, call: str) -> None:
        if self.gone or (call and call == self.gone_at and not self.came_back):
            self.gone.add(call)
            await asyncio.sleep(self.gone_s)
            self.gone.clear()
            self.came_back.add(call)
            raise Unavailable("the line broke")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a Run: the digests of its Versions, their sums, the sets of their Rounds, and reasons of failures."""

    versions: tuple[str, ...]
    sums: tuple[tuple[object, ...], ...]
    closed: tuple[tuple[str, ...], ...]
    failures: tuple[str, ...]


def device_of(fleet: Fleet, index: int, trainer: Trainer | None = None, **line: object) -> VirtualDevice:
    """Return a device that trains for a few seconds. ``line`` are fields of its ``Line``."""
    calls = Line(fleet=fleet, device=f"device-{index}", latency_s=0.01, **line)
    trainer = trainer or SyntheticTrainer(partition=index, num_examples=10 + index, counts=COUNTS)
    rng = random.Random(f"device {index}")
    return VirtualDevice(calls, trainer, (PUBLISHER.public,), rng, lambda rng, _: rng.uniform(1.0, 2.0))


async def await_rest(place: Place) -> None:
    """Wait until the Run rests."""
    async with aclosing(place.runs.watch("run", 0)) as events:
        async for _ in events:
            pass


async def outcome_of(place: Place) -> Outcome:
    """Check the record of a Run, and return its end."""
    assert [verdict.problem for verdict in verify_run(place.state, "run") if verdict.problem] == []
    events = [entry.event for entry in await place.state.stores.runs.event_page("run", 0)]
    published = [event for event in events if isinstance(event, m.VersionPublished) and event.round]
    records = [place.state.rounds.round("run", event.round) for event in published]
    return Outcome(
        versions=tuple(event.version_sha256 for event in published),
        sums=tuple(tuple(getattr(event, name) for name in SUMS) for event in published),
        closed=tuple(tuple(sorted(record.accepted)) for record in records if record is not None),
        failures=tuple(event.reason for event in events if isinstance(event, m.RoundFailed)),
    )


def outcome(
    whole: Plan,
    folder: Path,
    lines: Mapping[int, Mapping[str, object]] = NOBODY,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> Outcome:
    """Run a Plan to its end. ``lines`` has the fields of some devices' lines by index."""

    async def main() -> Outcome:
        place = open_place(folder)
        await start(place.runs, synthetic_bundle(folder / "bundle", PUBLISHER, shapes), whole)
        devices = [
            device_of(place.coordinator, index, **lines.get(index, {})) for index in range(whole.cohort.concurrency)
        ]
        tasks = [asyncio.create_task(device.run()) for device in devices]
        async with asyncio.timeout(10_000.0):
            await await_rest(place)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        result = await outcome_of(place)
        await place.coordinator.stop()
        await place.runs.stop()
        return result

    return run_virtual(main())

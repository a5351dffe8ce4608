"""Devices whose journal of masks lost whole records in the middle of a Round: they give up, and no key serves twice."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from support.secagg import (
    COUNTS,
    PUBLISHER,
    SHAPES,
    Line,
    await_rest,
    device_of,
    open_place,
    outcome_of,
    plan_of,
    start,
)

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.storage.journals import JournalStore
from fanin.clients.device.updates import Change
from fanin.edge.masking.journal import read_journal, record_of
from fanin.protos import messages as m
from fanin.protos.errors import FaninError, Unavailable
from fanin.simulation import SyntheticTrainer, run_virtual, synthetic_bundle
from fanin.simulation.federation.device import VirtualDevice
from fanin.simulation.federation.memory import MemoryFolder

NUM_DEVICES = 5
VICTIM = 2


def cut(path: Path, num_left: int) -> None:
    """Cut a journal exactly after a number of records, as a copy of an earlier one would be."""
    path.write_bytes(b"".join(map(record_of, read_journal(path.read_bytes())[:num_left])))


@pytest.mark.parametrize(
    ("phase", "num_left", "counts"),
    [
        ("sharing", 1, False),
        ("training", 3, True),
        pytest.param("advertising", 0, False, marks=pytest.mark.nightly),
        pytest.param("unmasking", 4, True, marks=pytest.mark.nightly),
    ],
)
def test_a_device_whose_journal_lost_whole_records_gives_up_and_comes_back(
    tmp_path: Path, phase: str, num_left: int, counts: bool
) -> None:
    """The journal is cut while a message of a phase is under way. The device sends no further one in this Round."""
    sent: list[m.ExchangeRequest] = []

    def change(request: m.ExchangeRequest) -> m.ExchangeRequest:
        if request.phase == phase and phase not in {each.phase for each in sent}:
            cut(tmp_path / "journals" / "run.journal", num_left)
        sent.append(request)
        return request

    async def main() -> None:
        place = open_place(tmp_path)
        whole = plan_of("secagg", NUM_DEVICES, NUM_DEVICES - 1, max_rounds=4, dropout_fraction=0.2)
        await start(place.runs, synthetic_bundle(tmp_path / "bundle", PUBLISHER, SHAPES), whole)
        lines = {VICTIM: {"change": change}}
        devices = [device_of(place.coordinator, index, **lines.get(index, {})) for index in range(NUM_DEVICES)]
        victim = devices[VICTIM]
        victim.folder.journals = JournalStore(tmp_path / "journals")  # type: ignore[assignment]  # one on a disk
        victim.restart()
        tasks = [asyncio.create_task(device.run()) for device in devices]
        async with asyncio.timeout(10_000.0):
            await await_rest(place)
        assert not any(task.done() for task in tasks), "a device has ended"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        outcome = await outcome_of(place)
        await place.coordinator.stop()
        await place.runs.stop()
        assert outcome.failures == ()
        is_in = [f"device-{VICTIM}" in closed for closed in outcome.closed]
        assert is_in[0] is counts
        assert is_in[-1]
        first = [each.phase for each in sent if each.assignment_id == sent[0].assignment_id]
        assert list(dict.fromkeys(first))[-1] == phase
        messages = {(each.assignment_id, each.phase): each.payload for each in sent}
        assert all(each.payload == messages[each.assignment_id, each.phase] for each in sent)

    run_virtual(main())


@dataclass
class Forgetful:
    """A trainer whose second training of a Round gives another change. It copies the folder before the first one."""

    folder: MemoryFolder | None = None
    copies: list[dict[str, object]] = field(default_factory=list)
    runtime: str = "synthetic 1"
    graph_format: str = ""

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """See Trainer."""
        assert self.folder is not None
        self.copies.append(deepcopy(vars(self.folder)))
        inner = SyntheticTrainer(partition=len(self.copies), num_examples=10, counts=COUNTS)
        return inner.train(model, assignment, should_continue)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Line):
    """The calls of a device that is cut off in its first upload, after the coordinator knows the header."""

    was_cut: asyncio.Event = field(default_factory=asyncio.Event)
    payloads: list[str] = field(default_factory=list)

    async def upload(self, header: m.UpdateHeader, read: Callable[[int, int], bytes]) -> m.UploadReply:
        """See Transport."""
        self.payloads.append(header.payload.sha256)

        def cut_off(offset: int, size_bytes: int) -> bytes:
            self.was_cut.set()
            raise Unavailable("the line broke")

        try:
            return await Line.upload(self, header, read if self.was_cut.is_set() else cut_off)
        except FaninError as exc:
            self.errors.append(exc.code)
            raise


def test_a_folder_that_was_rolled_back_after_its_shares_sends_no_second_payload(tmp_path: Path) -> None:
    """All its files agree with each other, so the device notices nothing. The coordinator accepts no byte."""

    async def main() -> None:
        place = open_place(tmp_path)
        whole = plan_of("secagg", NUM_DEVICES, NUM_DEVICES - 1, max_rounds=2, dropout_fraction=0.2)
        await start(place.runs, synthetic_bundle(tmp_path / "bundle", PUBLISHER, SHAPES), whole)
        devices = [device_of(place.coordinator, index) for index in range(NUM_DEVICES - 1)]
        line, trainer = Cut(fleet=place.coordinator, device="rolled-back", latency_s=0.01), Forgetful()
        trainer.graph_format = SyntheticTrainer(partition=0, num_examples=1).graph_format
        victim = VirtualDevice(line, trainer, (PUBLISHER.public,), Random("rolled back"), lambda rng, _: 1.0)
        trainer.folder = victim.folder
        tasks = [asyncio.create_task(device.run()) for device in (*devices, victim)]
        async with asyncio.timeout(10_000.0):
            await line.was_cut.wait()
            tasks[-1].cancel()
            with suppress(asyncio.CancelledError):
                await tasks[-1]
            vars(victim.folder).update(trainer.copies[0])
            victim.restart()
            tasks[-1] = asyncio.create_task(victim.run())
            await await_rest(place)
        assert not any(task.done() for task in tasks), "a device has ended"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        outcome = await outcome_of(place)
        await place.coordinator.stop()
        await place.runs.stop()
        first, second = line.payloads[:2]
        assert first != second
        assert line.errors[1] == "FN-1724"
        assert "rolled-back" not in outcome.closed[0]
        assert outcome.failures == ()

    run_virtual(main())

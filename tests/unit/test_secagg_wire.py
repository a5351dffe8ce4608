"""What a device with masks shows on the wire: nothing that depends on its data, but masked bytes."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from google.protobuf.message import Message
from house.tree import ROOT
from support.secagg import await_rest, device_of, plan_of
from support.virtual import bundle_in, open_place, start

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.protos import messages as m
from fanin.protos.wire import to_proto
from fanin.simulation import SyntheticTrainer, run_virtual
from fanin.simulation.federation.loopback import Fleet
from fanin.v1 import fleet_pb2

PAGE = ROOT / "docs" / "howto" / "secure-aggregation.md"
SECTION = "## What the coordinator sees"
OF_THE_DATA = {
    "UploadRequest.header.payload.sha256",
    "UploadRequest.header.payload.chunks.sha256",
    "UploadRequest.piece.data",
}
"""The masked bytes, and their digests."""
OF_THE_RUN = {f"{name}.assignment_id" for name in ("DownloadRequest", "ExchangeRequest", "UploadRequest.header")}
"""The key of a Run is random."""


@dataclass
class RecordingFleet:
    """A coordinator that records the messages of one device as they are on the wire."""

    fleet: Fleet
    device: str
    messages: list[Message] = field(default_factory=list)

    def note(self, device: str, message: Message) -> None:
        if device == self.device:
            self.messages.append(message)

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        self.note(device, to_proto(check_in, fleet_pb2.CheckInRequest))
        return await self.fleet.check_in(device, check_in)

    def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        self.note(device, to_proto(download, fleet_pb2.DownloadRequest))
        return self.fleet.download(device, download)

    def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        self.note(device, to_proto(m.UploadRequest(part=header), fleet_pb2.UploadRequest))

        async def noted() -> AsyncIterator[m.Piece]:
            async for piece in pieces:
                self.note(device, to_proto(m.UploadRequest(part=piece), fleet_pb2.UploadRequest))
                yield piece

        return self.fleet.upload(device, header, noted())

    async def exchange(self, device: str, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        self.note(device, to_proto(request, fleet_pb2.ExchangeRequest))
        return await self.fleet.exchange(device, request)

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        self.note(device, to_proto(report, fleet_pb2.ReportRequest))
        return await self.fleet.report(device, report)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A trainer of many steps, whose losses and examples are facts about its data."""

    drawn: SyntheticTrainer
    num_steps: int
    runtime: str = "synthetic 1"
    graph_format: str = "onnx"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        return replace(self.drawn.train(model, assignment, should_continue), num_steps=self.num_steps)


def sent_by(folder: Path, protocol: str, trainer: Steps) -> list[Message]:
    """Return the messages of the first of three devices in a Run of one Round."""

    async def main() -> list[Message]:
        place = open_place(folder)
        await start(place.runs, bundle_in(folder), plan_of(protocol, 3, 3))
        fleet = RecordingFleet(fleet=place.coordinator, device="device-0")
        devices = [device_of(fleet, 0, trainer), device_of(fleet, 1), device_of(fleet, 2)]
        tasks = [asyncio.create_task(device.run()) for device in devices]
        async with asyncio.timeout(10_000.0):
            await await_rest(place)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await place.coordinator.stop()
        await place.runs.stop()
        return fleet.messages

    return run_virtual(main())


def fields_of(message: Message, name: str) -> Iterator[tuple[str, object]]:
    """Yield the fields that a message has, with their values, by their path."""
    for descriptor, value in message.ListFields():
        path = f"{name}.{descriptor.name}"
        if descriptor.message_type is None:
            yield path, tuple(value) if descriptor.is_repeated else value
        elif descriptor.message_type.GetOptions().map_entry:
            yield path, dict(value)
        else:
            for each in value if descriptor.is_repeated else (value,):
                yield from fields_of(each, path)


def rows(messages: list[Message]) -> list[tuple[str, object]]:
    return [row for message in messages for row in fields_of(message, type(message).__name__)]


SMALL = Steps(drawn=SyntheticTrainer(partition=0, num_examples=10), num_steps=3)
LARGE = Steps(
    drawn=SyntheticTrainer(partition=7, scale=0.1, num_examples=900, counts={m.TRAIN_LOSS: 12345}), num_steps=300
)


def differences(before: list[Message], after: list[Message]) -> set[str]:
    """Return the fields that differ between two devices."""
    pairs = zip(rows(before), rows(after), strict=True)
    return {path for (path, value), (_, other) in pairs if value != other}


def test_no_field_but_masked_bytes_depends_on_the_data(tmp_path: Path) -> None:
    small, large = (sent_by(tmp_path / str(each.num_steps), "secagg", each) for each in (SMALL, LARGE))
    assert differences(small, large) - OF_THE_RUN == OF_THE_DATA
    # In the clear, the same devices differ in more.
    plain = [dict(rows(sent_by(tmp_path / f"plain-{each.num_steps}", "plain", each))) for each in (SMALL, LARGE)]
    assert plain[0]["UploadRequest.header.statistics.counts"] != plain[1]["UploadRequest.header.statistics.counts"]


def test_the_page_lists_each_field_of_a_device_on_the_wire(tmp_path: Path) -> None:
    _, _, after = PAGE.read_text().partition(SECTION)
    section = after.partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([A-Za-z.0-9_]+)`", section, re.MULTILINE))
    assert {path for path, _ in rows(sent_by(tmp_path, "secagg", SMALL))} == listed

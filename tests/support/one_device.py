"""A coordinator for one virtual device: a Round for each Version, without a server."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from fanin.clients.operator import ref_of
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.versions import sign_version
from fanin.edge.tensors import encode_parameters
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of, cut
from fanin.simulation import VirtualDevice, run_virtual, synthetic_bundle
from support.values import GRID, PUBLISHER, assignment

SHAPES = {"a": (2, 3), "b": (4,)}


@dataclass
class Rounds:
    """A coordinator for one device: a Round for each Version, then a check-in without an answer."""

    bundle: Bundle
    works: list[m.Assignment]
    chunks: dict[str, bytes]
    faults: dict[str, BaseException] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        self._fail("check_in")
        if not self.works:
            self.done.set()
            await asyncio.Event().wait()
        return m.Assigned(assignment=self.works[0])

    async def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        self._fail("download")
        yield self.chunks[download.sha256]

    async def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        self._fail("upload")
        self.works.pop(0)
        yield m.UploadReply(round_state=m.RoundState.CLOSED, update_state=m.UpdateState.ACCEPTED)

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        self._fail("report")
        self.failures.append(report.failure)
        self.works.pop(0)
        return m.UploadReply(round_state=m.RoundState.OPEN, update_state=m.UpdateState.DISCARDED)

    def _fail(self, call: str) -> None:
        if call in self.faults:
            raise self.faults.pop(call)


def rounds(folder: Path, num: int) -> Rounds:
    """Return a Run of ``num`` Rounds, each from another Version."""
    bundle = synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES)
    table, parent, works = bundle.manifest.table, None, []
    files = [bundle.signed.data, *(bundle.artifact(name) for name in bundle.manifest.artifacts)]
    for number in range(num):
        data = encode_parameters(table, bundle.initial_parameters() + number)
        files.append(data)
        parent = sign_version(
            PUBLISHER, parent=parent, run_id="run", bundle_sha256=bundle.sha256, parameters=artifact_of(data)
        )
        work = replace(assignment(number + 1), bundle=ref_of(bundle.signed), version=parent, grid=GRID[:2])
        works.append(work)
    chunks = {ref.sha256: piece for data in files for ref, piece in cut(data)}
    return Rounds(bundle=bundle, works=works, chunks=chunks)


def take_part(fleet: Rounds, device: VirtualDevice) -> None:
    """Let the device run until all Rounds are done."""

    async def run() -> None:
        tasks = {asyncio.create_task(device.run()), asyncio.create_task(fleet.done.wait())}
        finished, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task in finished:
            task.result()

    run_virtual(run())

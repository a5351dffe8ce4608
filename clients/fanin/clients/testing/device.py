"""A device on the event loop's clock."""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from typing import assert_never

from fanin.clients.device.models import (
    OpenedModel,
    graph_chunks,
    manifest_chunks,
    open_bundle,
    open_parameters,
    verify_version,
)
from fanin.clients.device.session import events as e
from fanin.clients.device.session import machine as s
from fanin.clients.device.session.outcomes import event_of
from fanin.clients.device.updates import Trainer, make_update
from fanin.clients.testing.loopback import LoopbackTransport
from fanin.edge.codecs.fixed import CODECS
from fanin.protos import messages as m
from fanin.protos.chunks import ChunkRef
from fanin.protos.errors import Conflict, FaninError, InvalidInput


class VirtualDevice:
    """A device on the event loop's clock: the production session, an in-memory cache and a Trainer.

    ``work_s`` draws the seconds that a training takes. ``trusted`` are the publishers' public keys. The cache holds
    only the Chunks of the newest Assignment, so its size does not grow with the Rounds.
    """

    def __init__(
        self,
        line: LoopbackTransport,
        trainer: Trainer,
        trusted: Collection[str],
        rng: random.Random,
        work_s: Callable[[random.Random], float],
    ) -> None:
        self._line = line
        self._trainer = trainer
        self._trusted = trusted
        self._rng = rng
        self._work_s = work_s
        self._chunks: dict[str, bytes] = {}
        self._seen: dict[str, int] = {}
        self._model: OpenedModel | None = None
        self._update: tuple[m.UpdateHeader, bytes] | None = None
        self._bytes_downloaded = 0
        self.session = s.Session()

    async def run(self) -> None:
        """Take part until cancelled. Raises Conflict if the coordinator rejects this device permanently."""
        step = self.session.begin()
        while True:
            await asyncio.sleep(step.pause_s)
            if isinstance(step.action, e.EndSession):
                raise Conflict(step.action.reason)
            event = await self._attempt(step.action)
            self.session, step = self.session.step(event, self._rng)
            if step.forget:
                self._update = None

    @property
    def cached(self) -> frozenset[str]:
        """The digests of the Chunks in the cache."""
        return frozenset(self._chunks)

    def restart(self) -> None:
        """Simulate a kill: only the cache survives, with its Chunks and its Update."""
        self.session, self._model = s.Session(num_accepted=self.session.num_accepted), None

    async def _attempt(self, action: e.SessionAction) -> e.SessionEvent:
        try:
            return await self._do(action)
        except FaninError as exc:
            return event_of(action, exc)

    async def _do(self, action: e.SessionAction) -> e.SessionEvent:
        match action:
            case e.Enroll():
                return e.Enrolled()
            case e.Poll():
                capabilities = m.Capabilities(
                    codecs=tuple(CODECS),
                    runtimes=(self._trainer.runtime,),
                    graph_formats=(self._trainer.graph_format,),
                )
                check_in = m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=40.0)
                return e.Answered(answer=await self._line.check_in(check_in))
            case e.Refresh():
                raise AssertionError("only a device that serves is offered a newer version")
            case e.Fetch():
                await self._fetch(action.assignment)
                return e.Fetched()
            case e.Train():
                await self._train(action.assignment)
                return e.UpdateStored()
            case e.Send():
                assert self._update is not None, "sending comes after training"
                return e.Replied(reply=await self._line.upload(*self._update))
            case e.Abandon():
                report = m.Report(assignment_id=action.assignment.assignment_id, failure=action.reason)
                return e.Replied(reply=await self._line.report(report))
            case e.EndSession():
                raise AssertionError("run ends at EndSession")
            case _:
                assert_never(action)

    async def _fetch(self, assignment: m.Assignment) -> None:
        self._bytes_downloaded = 0
        needed: list[ChunkRef] = []
        try:
            self._model = await self._fetch_model(assignment, needed)
        finally:
            # After a failure too: the next try continues with what it needs, and the rest must not pile up.
            keep = {ref.sha256 for ref in needed}
            self._chunks = {name: data for name, data in self._chunks.items() if name in keep}

    async def _fetch_model(self, assignment: m.Assignment, needed: list[ChunkRef]) -> OpenedModel:
        """Return the Assignment's model, verified; ``needed`` receives its Chunks before they are downloaded."""
        publication = assignment.publication
        needed += manifest_chunks(publication)
        await self._get(assignment, needed)
        bundle = open_bundle(publication, self._trusted, self._read)
        verify_version(publication, bundle, self._seen.get(assignment.run_id, -1))
        graphs = graph_chunks(bundle, self._trainer.graph_format)
        needed += (*graphs, *assignment.version.parameters.chunks)
        await self._get(assignment, needed)
        parameters = open_parameters(publication, bundle, self._read)
        self._seen[assignment.run_id] = assignment.version.number
        return OpenedModel(bundle=bundle, parameters=parameters)

    async def _get(self, assignment: m.Assignment, refs: Sequence[ChunkRef]) -> None:
        for ref in refs:
            if ref.sha256 not in self._chunks:
                self._chunks[ref.sha256] = await self._line.download(assignment.assignment_id, ref.sha256)
                self._bytes_downloaded += len(self._chunks[ref.sha256])

    def _read(self, sha256: str) -> bytes:
        return self._chunks[sha256]

    async def _train(self, assignment: m.Assignment) -> None:
        assert self._model is not None, "training comes after fetching"
        if self._update is not None and self._update[0].assignment_id == assignment.assignment_id:
            return
        await asyncio.sleep(self._work_s(self._rng))
        try:
            outcome = self._trainer.train(self._model, assignment, self._bytes_downloaded)
            self._update = make_update(assignment, self._model.bundle.manifest.table, outcome)
        except ValueError as exc:
            raise InvalidInput(f"training: {exc}") from exc

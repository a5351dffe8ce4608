"""A device on the event loop's clock."""

import asyncio
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from fanin.clients.device.conditions import Conditions, ShouldContinue
from fanin.clients.device.downloads import StoreChunk
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.session import events as e
from fanin.clients.device.session.machine import Session
from fanin.clients.device.session.protocols import DeviceIdentity, identity_of
from fanin.clients.device.session_driver import DriverParts, SessionDriver
from fanin.clients.device.updates import Change, Trainer
from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m
from fanin.protos.chunks import ChunkRef
from fanin.protos.errors import FaninError, NotFound
from fanin.simulation.federation.loopback import LoopbackTransport
from fanin.simulation.federation.memory import MemoryFolder

WorkTime = Callable[[random.Random, m.Assignment], float]
"""Draws the seconds that the training of an Assignment takes."""


class EarlyTrainer(ABC):
    """Base class of a Trainer that can begin before its result is needed: other trainings run at the same time.

    It is a class and not a Protocol: a Trainer of an app may have a method ``begin`` for another purpose.
    """

    @abstractmethod
    def begin(self, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0) -> None:
        """Begin the training that ``train`` will be called for, at the virtual time ``due_s``."""

    def delay_s(self, assignment: m.Assignment, now_s: float) -> float:
        """Return the seconds after which ``train`` shall be called, at the virtual time ``now_s``; 0 for at once."""
        return 0.0


class VirtualDevice:
    """A device on the event loop's clock: the production session and driver, a folder in memory and a Trainer.

    ``work_s`` draws the seconds of each training. ``trusted`` are the publishers' public keys. ``folder`` has the
    Chunks, the Update and the states of stages.
    """

    def __init__(
        self,
        line: LoopbackTransport,
        trainer: Trainer,
        trusted: Collection[str],
        rng: random.Random,
        work_s: WorkTime,
    ) -> None:
        self.folder = MemoryFolder()
        conditions = Conditions(lambda: True, _now)
        self._parts = DriverParts(
            host=_VirtualHost(line, trainer, _Working(rng=rng, work_s=work_s, conditions=conditions)),
            calls=_VirtualCalls(line),
            store=self.folder,
            trainer=trainer,
            trusted=trusted,
            rng=rng,
            conditions=conditions,
            identity=_identity(line.device, rng),
        )
        self._driver = SessionDriver(self._parts)

    @property
    def session(self) -> Session:
        """The state of the session."""
        return self._driver.session

    async def run(self) -> None:
        """Take part until cancelled. Raises Conflict if the coordinator rejects this device permanently."""
        await self._driver.run()

    def restart(self) -> None:
        """Simulate a kill: only the folder survives."""
        self._driver = SessionDriver(self._parts, Session(num_accepted=self.session.num_accepted))


def _identity(device: str, rng: random.Random) -> DeviceIdentity:
    """Return the identity of a simulated device: its name, and a key that follows from it."""
    key = SigningKey(hashlib.sha256(f"fanin simulation {device}".encode()).digest())
    return replace(identity_of(key, rng.randbytes), device_id=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Working:
    """The duration of a training, and what ends it early."""

    rng: random.Random
    work_s: WorkTime
    conditions: Conditions


class _VirtualHost:
    """The ``SessionHost`` on the event loop's clock. An unexpected error ends the device, and so the test."""

    def __init__(self, line: LoopbackTransport, trainer: Trainer, working: _Working) -> None:
        self._line = line
        self._working = working
        self._is_over = asyncio.Event()
        self._following = ""
        self._heartbeat: asyncio.Task[None] | None = None
        self._trainer = trainer
        self._early = trainer if isinstance(trainer, EarlyTrainer) else None

    def now(self) -> float:
        return _now()

    async def pause(self, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        return True

    async def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        work_s = self._working.work_s(self._working.rng, assignment)
        if self._early is not None:
            self._early.begin(model, assignment, self.now() + work_s)
        while not self._is_over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), work_s)
            work_s = 0.0 if self._early is None else self._early.delay_s(assignment, self.now())
            if not work_s:
                break
        self._working.conditions.check_assignment()
        return self._trainer.train(model, assignment, should_continue)

    def follow(self, assignment: m.Assignment | None) -> None:
        following = "" if assignment is None else assignment.assignment_id
        if following == self._following:
            return
        self._following = following
        # A new one: a later event loop may drive this device.
        self._is_over = asyncio.Event()
        self._working.conditions.begin_assignment()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None
        if assignment is not None and assignment.progress_s:
            self._heartbeat = asyncio.get_running_loop().create_task(self._beat(assignment))

    async def _beat(self, assignment: m.Assignment) -> None:
        report = m.Report(assignment_id=assignment.assignment_id, progress=m.TrainingProgress())
        while True:
            await asyncio.sleep(assignment.progress_s)
            reason = ""
            try:
                if (await self._line.report(report)).round_state is m.RoundState.CLOSED:
                    reason = "the round has closed, or does not need this update"
            except NotFound as exc:
                reason = str(exc)
            except FaninError:
                # The session notices a broken connection by its own calls.
                continue
            if reason:
                self._working.conditions.end_assignment(f"the assignment is over: {reason}")
                self._is_over.set()
                return

    def observe(self, session: Session, action: e.SessionAction, event: e.SessionEvent) -> None:
        """The coordinator's log has the outcome."""

    async def guard(self, action: e.SessionAction, work: Awaitable[e.SessionEvent]) -> e.SessionEvent:
        return await work


class _VirtualCalls:
    """The ``DeviceCalls`` of an enrolled device, without a network."""

    def __init__(self, line: LoopbackTransport) -> None:
        self._line = line

    async def enroll(self) -> None:
        """A simulated device is known to its coordinator."""

    async def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        return await self._line.check_in(check_in)

    async def download(self, download_id: str, missing: tuple[ChunkRef, ...], store: StoreChunk) -> None:
        for ref in missing:
            data = await self._line.download(download_id, ref.sha256)
            store(ref, partial(_rest, data))

    async def upload(self, header: m.UpdateHeader, read: Callable[[int, int], bytes]) -> m.UploadReply:
        return await self._line.upload(header, read)

    async def exchange(self, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        return await self._line.exchange(request)

    async def report(self, report: m.Report) -> m.UploadReply:
        return await self._line.report(report)


def _rest(data: bytes, offset: int) -> Iterator[bytes]:
    yield data[offset:]


def _now() -> float:
    return asyncio.get_running_loop().time()

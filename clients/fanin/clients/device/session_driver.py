"""The driver of a session: it carries out the session's actions, both in a process and in a simulation.

    session --action--> driver --calls, training, folder--> event --> session

Three Protocols hide the differences between the two: ``DeviceCalls``, ``SessionHost`` (clock and errors) and
``DeviceFolder`` (the folder). The driver is a coroutine. A simulation awaits on its virtual clock. In a process every
call blocks its thread, so no await suspends, and ``client.run_blocking`` needs no event loop.
"""

import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol, assert_never

import numpy as np

from fanin.clients.device.conditions import AssignmentOver, Conditions, Interrupted, ShouldContinue
from fanin.clients.device.downloads import DeviceCalls, Downloader, Wanted
from fanin.clients.device.exchanges import DeviceExchanges
from fanin.clients.device.models import OpenedModel, file_chunks, served_files, trained_files
from fanin.clients.device.serving import Serving
from fanin.clients.device.session import events as e
from fanin.clients.device.session.known import protocol_of, reported_failure
from fanin.clients.device.session.machine import Session
from fanin.clients.device.session.outcomes import UnfitBundle, event_of
from fanin.clients.device.session.protocols import DeviceIdentity
from fanin.clients.device.storage.personal import keep_local, local_values, trim_local
from fanin.clients.device.storage.protocols import DeviceFolder
from fanin.clients.device.storage.seeds import device_seed
from fanin.clients.device.training.statistics import capabilities_of
from fanin.clients.device.training.tuner import DeviceTuner, TuningCalls
from fanin.clients.device.updates import (
    Change,
    Trainer,
    UnfitExamples,
    apply_stages,
    begin_stages,
    downlink_names,
    header_of,
    row_sizes,
    state_label,
)
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.codecs.codec import codec_of
from fanin.edge.codecs.stage import Stage
from fanin.edge.codecs.stages import layout_of, stages_of
from fanin.edge.floors.floor import POLICY_CODES
from fanin.protos import messages as m
from fanin.protos.chunks import ChunkRef
from fanin.protos.errors import Conflict, Diverged, FaninError, InvalidBundle, InvalidInput, NotFound, Unavailable
from fanin.protos.release import __version__

LOG = logging.getLogger("fanin.clients")
CHECK_IN_WAIT_S: Final = 40.0
"""Seconds that a check-in waits for work; common proxies cut an idle connection after 60 s."""


class SessionHost(Protocol):
    """The environment of a session: a clock, and the handling of errors."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""
        ...

    async def pause(self, seconds: float) -> bool:
        """Wait. Returns False if the session is to end."""
        ...

    async def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Call the trainer."""
        ...

    def follow(self, assignment: m.Assignment | None) -> None:
        """Report every ``progress_s`` seconds that this device works for an Assignment. None ends that.

        If a reply says that the Assignment is over, ``conditions`` end the work for it.
        """
        ...

    def observe(self, session: Session, action: e.SessionAction, event: e.SessionEvent) -> None:
        """Log the outcome of an action, before the session processes it."""
        ...

    async def guard(self, action: e.SessionAction, work: Awaitable[e.SessionEvent]) -> e.SessionEvent:
        """Await the work on an action. Its unexpected errors become events, or end the session."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverParts:
    """The parts of a driver.

    Attributes:
        host: The clock, and the handling of errors.
        calls: The calls to the coordinator.
        store: The device's folder.
        trainer: Names its runtime and its graph format.
        trusted: Public keys (hex) of the publishers whose Bundles the device runs.
        rng: Source of the session's random pauses.
        conditions: Whether the device may work now.
        serving: The model for ``predict``; None for a device that only trains.
        tuner: Fine-tunes the last Version of a Run; None for a device that does not.
        partition: The number of the device's part of all data, for the telemetry; None if its operator gave it none.
        condition: Returns battery and network of the device, for check-ins; None: they are not reported.
        identity: The device, for protocols with messages; None without a key.
    """

    host: SessionHost
    calls: DeviceCalls
    store: DeviceFolder
    trainer: Trainer
    trusted: Collection[str]
    rng: random.Random
    conditions: Conditions
    serving: Serving | None = None
    tuner: DeviceTuner | None = None
    partition: int | None = None
    condition: Callable[[], m.DeviceCondition | None] = lambda: None
    identity: DeviceIdentity | None = None


class SessionDriver:
    """Drives one session. ``session`` is its current state."""

    def __init__(self, parts: DriverParts, session: Session | None = None) -> None:
        self.session = session or Session()
        self._parts, self._secret = parts, parts.store.secret
        self._model: OpenedModel | None = None
        self._stages: Mapping[str, Stage] = {}
        self._unfit: UnfitBundle | None = None
        self._exchanges = DeviceExchanges(parts.identity, parts.store)
        self._downloader = Downloader(parts.calls, parts.store, parts.trusted, parts.trainer.graph_format)

    async def run(self) -> None:
        """Take part until the host ends the session. Raises Conflict if the session stops."""
        try:
            await self._run()
        finally:
            self._parts.host.follow(None)

    async def _run(self) -> None:
        host, conditions = self._parts.host, self._parts.conditions
        step = self.session.begin()
        pause_s = step.pause_s
        while await host.pause(pause_s):
            if not conditions.hold():
                pause_s = conditions.recheck_s
                continue
            if isinstance(step.action, e.EndSession):
                raise Conflict(step.action.reason, code=step.action.code)
            known = self._unfit
            event = await host.guard(step.action, self._attempt(step.action))
            if isinstance(event, e.Unable):
                self._skip(step.action)
            if known is None or known is not self._unfit or not known.is_repeated_by(step.action, event):
                host.observe(self.session, step.action, event)
            self.session, step = self.session.step(event, self._parts.rng)
            is_at_work = self.session.phase is not e.SessionPhase.REPORTING and not self.session.is_accepted
            host.follow(self.session.assignment if is_at_work else None)
            pause_s = step.pause_s
            if step.forget:
                self._forget_updates()

    def _forget_updates(self) -> None:
        try:
            self._parts.store.updates.clear()
            self._exchanges.forget()
            self._forget_training()
        except OSError as exc:
            # The next training removes them before it begins, and retries until it succeeds.
            LOG.warning("updates cannot be removed (%s); the client tries again before it trains", exc)

    def _forget_training(self) -> None:
        if self._parts.store.trainings is not None:
            self._parts.store.trainings.clear()

    async def _attempt(self, action: e.SessionAction) -> e.SessionEvent:
        """Carry out one action and return its outcome as an event."""
        try:
            self._parts.conditions.check_assignment()
            return await self._do(action)
        except AssignmentOver as exc:
            return e.Moot(reason=str(exc))
        except Interrupted as exc:
            return e.WorkPaused(reason=str(exc))
        except (FaninError, OSError) as exc:
            event = event_of(action, exc)
            if not isinstance(event, e.Unable):
                return event
            return replace(event, is_lasting=self._unfit is not None or event.code in POLICY_CODES)

    def _skip(self, action: e.SessionAction) -> None:
        """Do not request this Version again, if it did not verify."""
        if isinstance(action, e.Refresh) and self._parts.serving is not None:
            self._parts.serving.skip(action.publication)

    async def _do(self, action: e.SessionAction) -> e.SessionEvent:
        calls = self._parts.calls
        match action:
            case e.Enroll():
                await calls.enroll()
                return e.Enrolled()
            case e.Poll():
                return e.Answered(answer=await calls.check_in(self._check_in()))
            case e.Refresh():
                await self._fetch(action.publication, Wanted(files=self._served_files))
                return e.Refreshed()
            case e.Tune():
                assert self._parts.tuner is not None, "no other device awaits the end of a Run"
                tuning = TuningCalls(self._fetch_tuned, self._parts.host.train, self._parts.conditions.should_continue)
                return await self._parts.tuner.tune(action.training, tuning)
            case e.Fetch():
                self._parts.store.guard.check_assignment(action.assignment)
                self._check_fit(action.assignment)
                # The codec is also opened later, but a training for an unknown one would be in vain.
                codec_of(action.assignment.codec)
                protocol = protocol_of(action.assignment.round_protocol)
                self._stages = stages_of(action.assignment.stages)
                names = downlink_names(action.assignment, self._stages)
                files = partial(self._trained_files, action.assignment)
                await self._fetch(action.assignment.publication, Wanted(files=files, auxiliary=names))
                assert self._model is not None, "it is fetched"
                self._exchanges.begin(action.assignment, self._model.bundle.manifest, self._stages)
                phases = [tuple(step.phase for step in steps) for steps in (protocol.before, protocol.after)]
                return e.Fetched(before=phases[0], after=phases[1])
            case e.SendMessage():
                work, phase = action.assignment, action.phase
                return e.Exchanged(outcome=await self._exchanges.exchange(calls, work, phase, CHECK_IN_WAIT_S))
            case e.Train():
                return await self._train(action.assignment)
            case e.Send():
                return e.Replied(reply=await self._send(action.assignment))
            case e.Abandon():
                failure = reported_failure(action.assignment, action.reason)
                report = m.Report(assignment_id=action.assignment.assignment_id, failure=failure)
                return e.Replied(reply=await calls.report(report))
            case e.EndSession():
                raise AssertionError("run ends at EndSession")
            case _:
                assert_never(action)

    def _check_fit(self, assignment: m.Assignment) -> None:
        """Raise InvalidInput if the examples did not fit this Bundle and have not changed since."""
        if self._unfit is None:
            return
        if self._unfit.is_of(assignment) and not self._unfit.has_changed():
            raise InvalidInput(self._unfit.reason, code="FN-0843")
        self._unfit = None

    @contextmanager
    def _reporting_unfit(self, bundle: Bundle) -> Iterator[None]:
        """Raise InvalidInput for examples that do not fit a Bundle, also for its next Assignments (``_check_fit``)."""
        try:
            yield
        except UnfitExamples as exc:
            reason = f"training: {exc}"
            self._unfit = UnfitBundle(bundle_sha256=bundle.sha256, reason=reason, has_changed=exc.has_changed)
            raise InvalidInput(reason, code="FN-0843") from exc

    def _check_in(self) -> m.CheckIn:
        serving, tuner = self._parts.serving, self._parts.tuner
        return m.CheckIn(
            protocol=m.PROTOCOL,
            capabilities=capabilities_of(self._parts.trainer),
            wait_s=CHECK_IN_WAIT_S,
            served=None if serving is None else serving.latest,
            condition=self._parts.condition(),
            fanin_version=__version__,
            awaits_end=tuner is not None and tuner.awaits_end,
        )

    def _served_files(self, bundle: Bundle) -> frozenset[str]:
        return served_files(bundle, self._parts.trainer.graph_format)

    def _trained_files(self, assignment: m.Assignment, bundle: Bundle) -> frozenset[str]:
        trainer = self._parts.trainer
        self._parts.store.guard.check_manifest(assignment, bundle.manifest)
        with self._reporting_unfit(bundle):
            sizes = row_sizes(trainer, bundle)
        files = trained_files(bundle, trainer.graph_format, assignment.training.batch_size, sizes)
        return files if self._parts.serving is None else files | self._served_files(bundle)

    async def _fetch(self, publication: m.Publication, wanted: Wanted) -> None:
        needed: list[ChunkRef] = []
        serving, should_continue = self._parts.serving, self._parts.conditions.should_continue
        try:
            model = await self._downloader.fetch(publication, needed, should_continue, wanted)
            local = local_values(self._parts.store.locals, model.bundle, publication.run_id)
            self._model = replace(model, local=local)
            if serving is not None and model.bundle.manifest.query is None:
                serving.offer(publication, self._model)
        finally:
            # Also after a failure: otherwise failed Assignments would fill this disk. The Chunks that the next try
            # resumes from are kept.
            keep = [ref.sha256 for ref in needed]
            served = () if serving is None else serving.chunks
            self._parts.store.chunks.trim((*keep, *(f"{sha256}.part" for sha256 in keep), *served))

    async def _fetch_tuned(self, publication: m.Publication, assignment: m.Assignment) -> OpenedModel:
        await self._fetch(publication, Wanted(files=partial(self._trained_files, assignment)))
        assert self._model is not None, "it is fetched"
        return self._model

    async def _train(self, assignment: m.Assignment) -> e.UpdateStored:
        store, stored = self._parts.store, e.UpdateStored()
        if store.updates.header(assignment.assignment_id) is None:
            store.updates.clear()
            stored = await self._make_update(assignment)
        if self._stages:
            # The Round may still fail. Then the next Assignment names the initial state of this one.
            store.states.keep(assignment.run_id, (assignment.state.round, assignment.round))
        trim_local(store.locals, assignment)
        return stored

    async def _make_update(self, assignment: m.Assignment) -> e.UpdateStored:
        """Train, and store the Update with the states and the personal parameters after it.

        The Update exists with its header, which is written last. A crash before that leaves the state that this
        Assignment names, and the repeated Assignment starts from it.
        """
        host, store, model = self._parts.host, self._parts.store, self._model
        assert model is not None, "training comes after fetching"
        seed = None if self._secret is None else device_seed(self._secret, assignment)
        model = replace(model, device_seed=seed)
        started_s = host.now()
        try:
            staging = begin_stages(assignment, self._stages, model, store.states)
            local = local_values(store.locals, model.bundle, assignment.run_id, before=assignment.round)
            saved = None if store.trainings is None else store.trainings.open(assignment)
            prepared = replace(model, local=local, inputs=staging.inputs(), saved=saved)
            with self._reporting_unfit(model.bundle):
                try:
                    change = await host.train(prepared, assignment, self._parts.conditions.should_continue)
                except Diverged:
                    if assignment.privacy is None:
                        raise
                    # A device that gives up reports that its data diverge. It sends no change instead.
                    zeros = np.zeros(staging.table.num_values, np.float32)
                    kept = prepared.kept_values(assignment.training)
                    change = Change(values=zeros, counts={m.EXAMPLES: 1}, local=kept)
            if not isinstance(change, Change):
                raise InvalidInput(
                    f"training: the trainer returned {type(change).__name__}, expected a Change", code="FN-0841"
                )
            telemetry = self._telemetry(change, host.now() - started_s)
            staged = apply_stages(assignment, change, staging)
            counted = replace(change, counts={**change.counts, **staged.counts})
            header = header_of(assignment, staged.encoded, counted, telemetry)
            num_values = layout_of(staging.table, self._stages).total_table.num_values
            header, payload = self._exchanges.masked(assignment, header, staged.encoded.payload, num_values)
            keep_local(store.locals, model.bundle, assignment, change.local)
        except InvalidBundle:
            # A graph was damaged on this disk after its download: the next try downloads it again.
            files = model.bundle.manifest.files(self._parts.trainer.graph_format)
            store.chunks.remove_damaged(file_chunks(model.bundle, files))
            raise
        except ValueError as exc:
            raise InvalidInput(f"training: {exc}", code="FN-0842") from exc
        if staging.has_state:
            store.states.put(state_label(assignment, assignment.round), staged.states)
        store.updates.put(header, payload)
        self._forget_training()
        return e.UpdateStored(num_saturated=staged.encoded.num_saturated, num_values=num_values, counts=change.counts)

    def _telemetry(self, change: Change, train_s: float) -> m.Telemetry:
        return m.Telemetry(
            runtime=self._parts.trainer.runtime,
            train_s=train_s,
            num_steps=change.num_steps,
            bytes_downloaded=self._downloader.num_bytes,
            bytes_resumed=self._downloader.num_bytes_resumed,
            fanin_version=__version__,
            partition=self._parts.partition,
        )

    async def _send(self, assignment: m.Assignment) -> m.UploadReply:
        header = self._parts.store.updates.header(assignment.assignment_id)
        if header is None:
            raise NotFound(f"update of {assignment.assignment_id}: it is no longer in the cache", code="FN-0823")
        self._parts.store.guard.release(assignment, header)
        interruptions: list[Interrupted] = []

        def read(offset: int, size_bytes: int) -> bytes:
            try:
                self._parts.conditions.should_continue()
            except Interrupted as exc:
                # A transport may read on its own thread, which handles only the transport's errors.
                interruptions.append(exc)
                raise Unavailable(str(exc), code="FN-0844") from exc
            return self._parts.store.updates.read(assignment.assignment_id, offset, size_bytes)

        try:
            return await self._parts.calls.upload(header, read)
        except FaninError:
            if interruptions:
                raise interruptions[0] from None
            raise

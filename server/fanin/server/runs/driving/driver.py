"""The driver of one Run: it carries out the effects of the round machine and opens one Round after another.

The machine is stepped on the event loop, so its state is always consistent. Effects pass through one queue and one
worker, in order. The worker repeats a failed effect as long as that may help. After that the Round fails with the
reason in its record, and the Run opens the next Round or rests.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Final, assert_never

from fanin.edge.codecs.scaffold import declared_devices
from fanin.edge.scopes import about_run
from fanin.protos.messages import (
    MAX_LIVE_DEVICES,
    MAX_NUMBER,
    LiveRound,
    RunRested,
    RunState,
    RunWarned,
    devices_gone,
    round_extended,
)
from fanin.server.protocols import events as e
from fanin.server.protocols.phases import FAILING
from fanin.server.rounds.effects import RoundWork
from fanin.server.rounds.messages import RoundMessages
from fanin.server.rounds.opening import (
    NEW,
    RoundHistory,
    clear_spool,
    open_next_round,
    opened_again,
    recall,
    recall_history,
    recall_participation,
)
from fanin.server.rounds.recent import OpenedRound
from fanin.server.rounds.setup import RunSetup
from fanin.server.rounds.targets import rest_of_record
from fanin.server.rounds.worker import QueuedEffect
from fanin.server.runs.driving.absences import Absences
from fanin.server.runs.driving.course import Course
from fanin.server.runs.driving.intake import Intake, Parked
from fanin.server.runs.driving.participants import Participants
from fanin.server.runs.driving.shortage import failures_of, shortage_of, storage_trouble_of
from fanin.server.runs.driving.stopping import History
from fanin.server.runs.driving.updates import UpdateDecisions
from fanin.server.runs.driving.warnings import UpdateWarnings
from fanin.server.runs.publications import Publications
from fanin.server.runs.view import LiveRun
from fanin.server.storage.records import RoundMark, RoundRecord, RunRecord, Shortage
from fanin.server.storage.stores import DriverStores, Files

LOG: Final = logging.getLogger("fanin.server.runs.driving.driver")


class RunDriver:
    """The driver of one Run in this process.

    ``start`` continues the Run where its record ends, so no crash loses an accepted Update. Commands change the record
    first; ``refresh`` then makes the driver follow it.

    Args:
        course: The state of the Run. The driver is the only one that moves it from Round to Round.
        publications: The Run's Versions for devices without an Assignment.
        stores: The record of the Run.
        files: Payloads and blobs.
        parked: The check-ins that wait for work, by device.

    Attributes:
        course: The state of the Run.
        intake: Answers the check-ins of devices.
        updates: The Updates of devices.
        messages: The messages of devices in the phases of Rounds.
    """

    def __init__(
        self,
        course: Course,
        publications: Publications,
        stores: DriverStores,
        files: Files,
        parked: Mapping[str, Parked],
    ) -> None:
        self.course, self._publications, self._stores, self._files = course, publications, stores, files
        self.intake, self._participants = Intake(course, stores, parked), Participants(course, stores)
        self.updates = UpdateDecisions(course, stores, files, self._participants)
        self.messages = RoundMessages(course.setup, stores, files)
        self._absences = Absences(course, self.intake, stores, parked)
        self._history, self._warnings = History(course.run.start.plan.stop), UpdateWarnings(course.run.start.plan)
        self._knows_participation = False

    @property
    def run(self) -> RunRecord:
        """The last read record of the Run."""
        return self.course.run

    @property
    def run_id(self) -> str:
        """The Run's id."""
        return self.course.run_id

    @property
    def setup(self) -> RunSetup:
        """The parts of the Run that never change."""
        return self.course.setup

    @property
    def recent_rounds(self) -> tuple[tuple[str, int], ...]:
        """The Rounds whose Updates count now, as pairs of Run id and number."""
        return tuple((self.run_id, opened.record.round) for opened in self.course.recent)

    @property
    def is_idle(self) -> bool:
        """Whether no Round is under way."""
        return self.course.work is None

    @property
    def is_stuck(self) -> bool:
        """Whether a failed effect is being repeated."""
        return bool(self.course.worker.trouble)

    @property
    def trouble(self) -> str:
        """The obstacle to the Run's progress, other than missing Updates; empty without one."""
        uploads = storage_trouble_of(self.course) if self.course.is_open else ""
        return uploads or self.course.worker.trouble or shortage_of(self.course)

    @property
    def live(self) -> LiveRun:
        """The facts for operators that the Run's record does not have."""
        course = self.course
        machine, work = course.round, course.work
        if machine is None or work is None:
            return LiveRun(trouble=self.trouble)
        live = LiveRound(round=work.record.round, phase=machine.phase.name)
        if not machine.is_open:
            return LiveRun(trouble=self.trouble, round=live)
        # Not all of them are sorted: a cohort of a million would hold the event loop.
        at_work = tuple(sorted(islice(machine.cohort.at_work, MAX_LIVE_DEVICES)))
        reports = {device: last for device in at_work if (last := course.presence.of(device)) is not None}
        live = replace(
            live,
            num_at_work=len(machine.cohort.at_work),
            at_work=at_work,
            deadline_s=0.0 if machine.deadline is None else max(machine.deadline - course.now(), 0.0),
            num_waiting=self.intake.num_waiting,
            num_gave_up=course.num_gave_up,
            num_refused=len(course.refused),
            failures=course.failures.counts(),
            progress=MappingProxyType(reports),
            trouble=self.trouble,
        )
        return LiveRun(trouble=self.trouble, round=live)

    async def start(self) -> None:
        """Continue the Run where its record ends."""
        course = self.course
        # The previous driver may have written until this one took the lease.
        await self._reload()
        await recall(self.run_id, course.recent, self._stores)
        record = await self._stores.rounds.unfinished(self.run_id)
        if record is not None:
            await self._resume(record)
        await self._clear_spool(record)
        if record is None and self.run.state is RunState.RUNNING:
            course.worker.put(None, e.GoOn())
        course.worker.start(self._carry_out, self._give_up, course.leave)
        if self._stores.devices.num_devices or self.run.start.plan.participants.required:
            course.watch_devices()

    async def stop(self) -> None:
        """Stop at once. All that is durable stays, and ``start`` continues from there."""
        self.course.is_leaving = True
        self.course.announce()
        self.course.stop()
        await self.course.worker.stop()

    async def refresh(self) -> None:
        """Follow the record after a command changed it, and open a Round if one is due. Safe to call at any time."""
        await self._follow_record()
        # Queued like every effect: if the disk is full now, the Run must still open its Round later.
        self.course.worker.put(None, e.GoOn())
        self.course.worker.hurry()
        self.course.announce()

    def warn(self, warning: RunWarned) -> None:
        """Record a warning, unless this driver has recorded it before."""
        if self._warnings.is_new(warning):
            self._warnings.note((warning,))
            self.course.worker.put(None, e.Warn(warning=warning))

    # Effects.

    async def _carry_out(self, queued: QueuedEffect) -> None:
        work, effect = queued
        if isinstance(effect, e.GoOn):
            await self._end_round()
        elif isinstance(effect, e.Warn):
            await self._warn((effect.warning,))
        elif isinstance(effect, e.LookForAbsent):
            await self._absences.look()
        elif work is not None and self._is_wanted(work, effect):
            await self._carry_out_for(work, effect)

    def _is_wanted(self, work: RoundWork, effect: e.Effect) -> bool:
        machine = self.course.round
        if machine is None or machine.has_ended or work is not self.course.work:
            # The Round of this effect was stopped.
            return False
        return machine.phase is not FAILING or isinstance(effect, e.Fail)

    async def _carry_out_for(self, work: RoundWork, effect: e.Effect) -> None:
        match effect:
            case e.Assign() | e.GoOn() | e.Warn() | e.LookForAbsent():
                raise AssertionError("assignments are answered at once, and the others belong to no round")
            case e.KeepDeadline():
                await self._keep_deadline(work.record, effect)
            case e.RecordExtension():
                extended = round_extended(work.record.round, effect.extension_s, effect.devices)
                await self._stores.writer.note(extended, self._stores.wall())
                self.course.announce()
            case e.RecordLack():
                await self._participants.record_lack(work.record.round)
            case e.RecordGone():
                event = devices_gone(work.record.round, effect.devices)
                await self._stores.writer.note(event, self._stores.wall())
                self.course.announce()
            case e.Accumulate():
                await work.accumulate(effect.device)
            case e.Freeze():
                roster = await self._stores.writer.freeze(
                    work.record.round,
                    effect.phase,
                    quorum=effect.quorum,
                    now_s=self._stores.wall(),
                    others_wait=self.intake.others_wait,
                )
                self.course.report(work, e.Failed() if roster is None else e.RosterFrozen(devices=roster.devices))
                self.course.announce()
            case e.Close():
                machine = self.course.round
                if machine is not None and machine.lack:
                    # The set only grows, so a set that is complete here is complete in the record.
                    reason = await self._participants.text_of(machine.lack)
                    self._follow(work, await work.fail(reason))
                    return
                lacks_quorum = machine is not None and len(machine.cohort.accepted) < machine.rules.quorum
                causes = filter(None, (storage_trouble_of(self.course), failures_of(self.course)))
                shortage = Shortage(cause="; ".join(causes), others_wait=lacks_quorum and self.intake.others_wait)
                self._follow(work, await work.close(shortage))
            case e.Fold():
                await work.fold(effect.accepted)
                self.course.report(work, e.ParametersStored())
            case e.Publish():
                record = await work.publish(self._participants.coverage(work.facts))
                await self._warn(self._warnings.of_round(work.record.round, work.facts))
                await self._warn(self._warnings.of_strategy(work.unsaved))
                await self._warn(self._warnings.of_ranges(work.record.round, work.measured))
                await self._warn_of_devices(work.record.round, has_ended=False)
                self._follow(work, record)
            case e.Fail():
                self._follow(work, await work.fail(effect.reason))
            case _:
                assert_never(effect)

    def _follow(self, work: RoundWork, record: RoundRecord) -> None:
        """Report to the machine how far the record of its Round has come."""
        match record.mark:
            case RoundMark.OPEN:
                raise AssertionError("the record of a round that was to close or end is still open")
            case RoundMark.CLOSED:
                self.course.report(work, e.Closed(accepted=record.accepted))
            case RoundMark.PUBLISHED:
                self.course.report(work, e.Published())
            case RoundMark.FAILED:
                self.course.report(work, e.Failed())
            case _:
                assert_never(record.mark)
        self.course.announce()

    async def _give_up(self, queued: QueuedEffect, reason: str) -> None:
        """Fail the Round of an effect that cannot be carried out or, if no Round is under way, the Run."""
        work, effect = queued
        if work is not None and self._is_wanted(work, effect):
            self.course.report(work, e.Broken(reason=reason))
            self.course.announce()
        elif isinstance(effect, e.GoOn) and (self.course.round is None or self.course.round.has_ended):
            rested = RunRested(state=RunState.FAILED, reason=reason)
            await self._stores.writer.rest(rested, self._stores.wall(), next_sequence=MAX_NUMBER)
            await self._reload()
            self.course.announce()

    async def _keep_deadline(self, record: RoundRecord, effect: e.KeepDeadline) -> None:
        now_s = self._stores.wall()
        at_s = now_s + effect.deadline - self.course.now()
        await self._stores.writer.set_deadline(record.round, at_s, now_s, num_rosters=effect.num_rosters)

    async def _warn(self, warnings: tuple[RunWarned, ...]) -> None:
        for warning in warnings:
            about_run(LOG, self.run_id).warning("%s%s", "no longer: " * warning.is_over, warning.text)
        if warnings:
            await self._stores.writer.warn(warnings, self._stores.wall())
            self._warnings.note(warnings)

    async def _warn_of_devices(self, round_number: int, *, has_ended: bool) -> None:
        # Counting takes time for each Update of the Run, so it is done after Rounds 1, 2, 4, 8 and so on.
        is_due = has_ended or not round_number & (round_number - 1)
        if is_due and declared_devices(self.run.start.plan.stages) is not None:
            contributors = await self._stores.rounds.contributors(self.run_id)
            await self._warn(self._warnings.of_devices(contributors, has_ended=has_ended))

    # From Round to Round.

    async def _end_round(self) -> None:
        course = self.course
        # If this effect was queued twice, the next Round is open already.
        if course.round is None or course.round.has_ended:
            course.end()
            await self._continue_run()
            # A command may have changed the record in the meantime.
            await self._follow_record()
            course.announce()
        await self._clear_spool(None if course.work is None else course.work.record)

    async def _clear_spool(self, current: RoundRecord | None) -> None:
        try:
            await clear_spool(self.run, current, self.course.recent, self._stores, self._files)
        except OSError as exc:
            # The files cost only space, and the next Round's end tries again.
            about_run(LOG, self.run_id).warning("files that are no longer needed stay: %s", exc)

    async def _follow_record(self) -> None:
        course = self.course
        await self._reload()
        last = await self._stores.rounds.last(self.run_id)
        if course.work is None or course.round is None or course.round.has_ended or last is None:
            return
        if last.round == course.work.record.round and last.mark is RoundMark.FAILED:
            course.step(e.Failed())
        elif self.run.state is RunState.PAUSED:
            course.step(e.Paused())
        elif self.run.state is RunState.RUNNING:
            course.step(e.Resumed())

    async def _reload(self) -> None:
        self.course.run = (await self._publications.read()).record

    async def _continue_run(self) -> None:
        history = self._history
        while True:
            await self._reload()
            if self.run.state is not RunState.RUNNING:
                return
            while page := await self._stores.runs.event_page(self.run_id, history.next_sequence):
                history.add(page)
            rested = history.rest_of(self.run.max_rounds)
            rested = rested or await rest_of_record(self.setup, history.begun_after, self._stores, self._files)
            if rested is None:
                await self._open_next()
                return
            if rested.state is RunState.FINISHED:
                await self._warn_of_devices(self.run.max_rounds, has_ended=True)
            await self._stores.writer.rest(rested, self._stores.wall(), next_sequence=history.next_sequence)

    async def _open_next(self) -> None:
        course, stores = self.course, self._stores
        record = await stores.rounds.unfinished(self.run_id)
        if record is not None:
            # An earlier try recorded the Round and then failed.
            await self._resume(record)
            return
        await self._recall_participation()
        course.recent.lineage = await stores.runs.lineage_start(self.run_id)
        await self._participants.refresh()
        opened = await open_next_round(self.setup, stores, self._files)
        if opened is not None:
            self._begin(opened)

    async def _resume(self, record: RoundRecord) -> None:
        """Continue a recorded Round: what is recorded of it becomes the machine's events again, in its order."""
        await self._recall_participation()
        opened = await opened_again(self.setup, record, self._stores, self._files)
        history = await recall_history(self.run, record, self.setup.protocol, self._stores)
        await self._participants.refresh()
        self._begin(opened, history)

    async def _recall_participation(self) -> None:
        # Before the first Round of this process, so that a Run that rests costs nothing at the start.
        if not self._knows_participation:
            await recall_participation(self.run_id, self.course.participation, self._stores)
            self._knows_participation = True

    def _begin(self, opened: OpenedRound, history: RoundHistory = NEW) -> None:
        work = RoundWork(opened, self.course.recent, self.setup, self._stores, self._files)
        self.course.begin(opened, work, self._stores.wall(), history)

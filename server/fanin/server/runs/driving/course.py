"""The state of one Run in this process: its record, the machine of its Round, and the devices at work.

The driver changes this state. ``intake`` answers check-ins from it, and ``updates`` decides about Updates. All of them
use it on the event loop only, so it is consistent between two awaits.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from fanin.edge.scopes import about_run
from fanin.protos.errors import Superseded
from fanin.protos.messages import EXAMPLES, TRAINED, RunState, TrainingProgress
from fanin.protos.texts import counted
from fanin.server.protocols import events as e
from fanin.server.protocols.machine import Round
from fanin.server.protocols.phases import CLOSING, FAILED
from fanin.server.rounds.assignments import Assignments
from fanin.server.rounds.decision import Facts
from fanin.server.rounds.effects import RoundWork
from fanin.server.rounds.opening import NEW, Moment, RoundHistory, begin_round, recorded_deadline
from fanin.server.rounds.recent import AtWork, OpenedRound, RecentRounds, WorkTimes
from fanin.server.rounds.setup import RunSetup
from fanin.server.rounds.troubles import StorageWait
from fanin.server.rounds.worker import Worker
from fanin.server.runs.view import Failures
from fanin.server.selection.coverage import Lack, Members
from fanin.server.selection.participation import Participation
from fanin.server.selection.presence import Presence, interval_of
from fanin.server.selection.standing import Standing
from fanin.server.storage.records import CommittedUpdate, Roster, RoundMark, RunRecord

LOG: Final = logging.getLogger("fanin.server.runs.driving.course")
SWEEP_S: Final = 1.0
"""Shortest time between two looks at silent devices. All that are gone by then are one event of the record."""

LOOK_S: Final = 300.0
"""Seconds between two looks for absent devices, which are noticed after half an hour at the earliest."""


class Course:
    """The state of one Run.

    Args:
        run: The Run's record.
        setup: The parts of the Run that never change.
        worker: Carries out the effects of the Run's Rounds.
        on_change: Called after each change that devices or operators may wait for.
        on_superseded: Called when another driver has taken the Run.

    Attributes:
        round: The machine of the Round under way, None between two Rounds.
        work: The work on that Round, None between two Rounds.
        assignments: The Assignments of the Run, by their ids.
        recent: The Rounds whose Updates count.
        at_work: The devices that hold an Assignment.
        times: When they began, None if this process did not open the Round.
        participation: The last Rounds of the devices.
        presence: The devices at work that report progress.
        standing: The faults of the devices.
        is_leaving: Whether the coordinator is about to end, or another one drives the Run.
        storage: Whether uploads wait for the disk.
        passed_over: Devices that waited while the selection policy chose no device for the open Round.
        refused: Devices that lost their place in the open Round because their Update was refused.
        failures: Why devices gave up or were refused in the open Round.
        members: The devices that the Plan requires.
        lack_text: The missing participants for which an overdue Round waits.
        changed: Set, and replaced by a new event, at each change.
    """

    def __init__(
        self,
        run: RunRecord,
        setup: RunSetup,
        worker: Worker,
        on_change: Callable[[], None],
        on_superseded: Callable[[Superseded], None],
    ) -> None:
        self.run = run
        self.setup = setup
        self.worker = worker
        self.round: Round | None = None
        self.work: RoundWork | None = None
        self.assignments = Assignments(setup)
        self.recent = RecentRounds(run.start.plan.aggregation.max_staleness)
        self.at_work = AtWork()
        self.times: WorkTimes | None = None
        self.participation = Participation()
        cohort = run.start.plan.cohort
        self.presence = Presence(interval_of(cohort))
        self.standing = Standing(cohort.deadline_s)
        self.is_leaving = False
        self.storage = StorageWait()
        self.passed_over: set[str] = set()
        self.refused: set[str] = set()
        self.failures = Failures()
        self.members = Members(run.start.plan.participants)
        self.lack_text = ""
        self.changed = asyncio.Event()
        self._on_change = on_change
        self._announces_places = False
        self._on_superseded = on_superseded
        self._timer: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._wake_at: float | None = None

    @property
    def run_id(self) -> str:
        """The Run's id."""
        return self.run.start.run_id

    @property
    def is_open(self) -> bool:
        """Whether a Round accepts Updates."""
        return self.round is not None and self.round.is_open

    @property
    def num_places(self) -> int:
        """Number of devices that the open Round can assign now."""
        return 0 if self.round is None else self.round.num_places(self.now())

    @property
    def num_gave_up(self) -> int:
        """Number of devices that gave up in the open Round, without those that were refused."""
        return 0 if self.round is None else len(self.round.cohort.gave_up) - len(self.refused)

    def now(self) -> float:
        """Return the time on the machine's clock, in seconds."""
        return asyncio.get_running_loop().time()

    def announce(self) -> None:
        """Wake all watchers of the Run and all devices that wait for work."""
        self.changed.set()
        self.changed = asyncio.Event()
        self._on_change()

    def announce_places(self) -> None:
        """Wake the devices that wait for work in the next iteration of the event loop, because a place became free.

        Selection examines all waiting devices. So all places that become free in one iteration are announced once.
        """
        if not self._announces_places:
            self._announces_places = True
            asyncio.get_running_loop().call_soon(self._announce_places)

    def _announce_places(self) -> None:
        self._announces_places = False
        self._on_change()

    def step(self, event: e.Event) -> tuple[e.Effect, ...]:
        """Apply an event to the machine and queue its effects. Return the effects."""
        before, now = self.round, self.now()
        assert before is not None, f"{event} without a round"
        self.round, effects = before.step(event, now)
        if before.assigns and self.round.phase is CLOSING:
            self._note_late(self.round, now)
        self._queue(effects)
        self._set_timer()
        return effects

    def facts(self, round_number: int, device: str, recorded: CommittedUpdate | None = None) -> Facts:
        """Return the facts about the Update of a device for a Round.

        Args:
            round_number: The Round of its Assignment.
            device: The device.
            recorded: The Update that the record has for the Assignment.
        """
        recent, machine, work = self.recent, self.round, self.work
        is_current = work is not None and work.record.round == round_number
        is_left_out = is_current and machine is not None and machine.leaves_out(device)
        return Facts(
            state=self.run.state,
            max_staleness=recent.max_staleness,
            lineage=recent.lineage,
            current=self.work.record if self.work is not None and self.is_open else None,
            origin=recent.get(round_number),
            is_over=recent.is_over(round_number, device) or is_left_out,
            is_leaving=self.is_leaving,
            recorded=recorded,
        )

    def place(self, device: str) -> bool:
        """Give a device one of the free places. Return whether it has a place, also if it had it before."""
        if self.work is None or self.round is None or not self.round.assigns:
            return False
        is_new = not self.round.holds(device)
        if is_new and self.num_places <= self.num_kept(device, self.open_lack):
            return False
        if e.Assign(device=device) not in self.step(e.CheckedIn(device=device)):
            return False
        # After a restart, the machine knows the devices of a roster before they return.
        if is_new or (device in self.round.cohort.at_work and self.at_work.round_of(device) is None):
            self.at_work.begin(device, self.work.record.round, self.now() + self.round.rules.deadline_s)
            if self.times is not None:
                self.times.begin(device, self.now())
            self.recent.begin_assignment(self.work.record.round, device)
            self.participation.note(device, self.work.record.round)
        return True

    def watch(self, device: str, progress: TrainingProgress) -> None:
        """Note that a device at work reported progress, and look at the silent devices in time."""
        self.presence.note(device, self.now(), progress)
        self._set_sweep()

    def stop_working(self, device: str) -> None:
        """Note that a device has finished its Assignment, or never will."""
        self.at_work.end(device)
        self.presence.end(device)

    def report(self, work: RoundWork, event: e.Event) -> None:
        """Apply the result of an effect, unless its Round has ended in the meantime."""
        if work is self.work and self.round is not None and not self.round.has_ended:
            self.step(event)

    def begin(
        self,
        opened: OpenedRound,
        work: RoundWork,
        wall_s: float,
        history: RoundHistory = NEW,
    ) -> None:
        """Start the machine of a Round.

        Args:
            opened: The Round.
            work: Carries out its effects.
            wall_s: The wall time, in seconds.
            history: What is known of the Round already.
        """
        self.recent.add(opened)
        moment = Moment(now=self.now(), wall_s=wall_s)
        self.times = WorkTimes(moment.now) if history.extension_s is None else None
        carried = self.at_work.carry(self.recent, opened.record, moment.now)
        self.presence.keep(carried)
        self._set_sweep()
        self.work = work
        protocol, history = self.setup.protocol, replace(history, carried=carried, only=opened.only)
        self.round, effects = begin_round(self.run, protocol, opened.record, moment, history)
        self._queue(effects)
        self._freeze(history.before_close(protocol))
        for update in history.committed:
            work.add_committed(update)
            self.participation.note(update.device_id, update.header.round)
            # A deadline that passed while no coordinator ran closes the Round. Then the record has the other Updates.
            if self.round.accepts_updates:
                self.step(self.committed(update))
        if opened.record.mark is RoundMark.CLOSED:
            # The record has the set of Updates. It must be folded, and not be determined a second time.
            self.worker.drop_all()
            self.step(e.Closed(accepted=opened.record.accepted))
        self._freeze(history.after_close(protocol))
        if self.round.num_rosters and self.round.num_rosters == opened.record.deadline_rosters:
            self.round = replace(self.round, deadline=recorded_deadline(self.round, opened.record, moment))
        for device in history.senders.get(self.round.working.name, ()):
            self.step(e.MessageCommitted(device=device))
        self._set_timer()

    def _freeze(self, rosters: Sequence[Roster]) -> None:
        """Apply recorded rosters to the machine. Only the effects of the last one are left to carry out."""
        for roster in rosters:
            self.worker.drop_all()
            self.step(e.RosterFrozen(devices=roster.devices))

    def committed(self, update: CommittedUpdate) -> e.UpdateCommitted:
        """Return the event of a recorded Update."""
        counts = update.header.statistics.counts
        examples = counts.get(TRAINED, counts.get(EXAMPLES, 0))
        return e.UpdateCommitted(
            device=update.device_id, meets=self.members.met_by(update.device_id), examples=max(examples, 0)
        )

    def num_kept(self, device: str, lack: Lack) -> int:
        """Return the places that a device may not take, because required participants lack."""
        if lack.num_places and not self.members.met_by(device).isdisjoint(lack.missing):
            return 0
        return lack.num_places

    @property
    def open_lack(self) -> Lack:
        """The required participants that the open Round lacks, besides those at work."""
        if self.round is None:
            return Lack()
        lack = self.round.lack
        for device in self.round.cohort.at_work if lack.num_places else ():
            lack = lack.after(self.members.met_by(device))
        return lack

    def note_storage(self, problem: str) -> None:
        """Note why an upload could not be stored just now, or that one is. Operators read it as an alarm."""
        if (warning := self.storage.note(problem, self.now())) is not None:
            self.worker.put(None, e.Warn(warning=warning))

    def end(self) -> None:
        """Leave a Round that has ended."""
        if self.round is not None and self.round.phase is FAILED:
            # A device that missed the deadline does not keep its place.
            self.at_work = AtWork()
        self.work, self.round = None, None
        self.note_storage("")
        self.lack_text = ""
        self.passed_over.clear()
        self.refused.clear()
        self.failures = Failures()

    def leave(self, superseded: Superseded) -> None:
        """Leave the Run to the driver that has taken it. Devices resume their uploads there."""
        if not self.is_leaving:
            self.is_leaving = True
            self.stop()
            self._on_superseded(superseded)
            self.announce()

    def stop(self) -> None:
        """Cancel all timers."""
        self._stop_clock()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def watch_devices(self) -> None:
        """Look for the devices that the Run expects, now and every ``LOOK_S``, while it is running."""
        if self.is_leaving:
            return
        if self._look is not None:
            self._look.cancel()
        if self.run.state is RunState.RUNNING:
            self.worker.put(None, e.LookForAbsent())
        self._look = asyncio.get_running_loop().call_later(LOOK_S, self.watch_devices)

    def _note_late(self, closing: Round, now: float) -> None:
        """Note the devices for which a Round waited in vain."""
        rules, cohort = closing.rules, closing.cohort
        if rules.late_counts or len(cohort.accepted) >= rules.buffer:
            return
        is_deadline = closing.deadline is not None and now >= closing.deadline
        note = self.standing.miss if is_deadline else self.standing.be_late
        for device in cohort.at_work:
            note(device, now)

    def _set_sweep(self) -> None:
        gone_at = self.presence.gone_at
        if self._sweep is None and gone_at is not None and not self.is_leaving:
            self._sweep = asyncio.get_running_loop().call_at(max(gone_at, self.now() + SWEEP_S), self._look_at_presence)

    def _look_at_presence(self) -> None:
        self._sweep = None
        if not self.is_open:
            # The next Round looks again.
            return
        now = self.now()
        if gone := self.presence.pop_gone(now):
            for device in gone:
                self.at_work.end(device)
                self.standing.miss(device, now)
            log = about_run(LOG, self.run_id, 0 if self.work is None else self.work.record.round)
            log.warning(
                "the round no longer waits for %s: %.200s",
                counted(len(gone), "silent device"),
                ", ".join(gone),
            )
            self.step(e.Gone(devices=gone))
            self.announce_places()
        self._set_sweep()

    def _stop_clock(self) -> None:
        """Cancel the timer of the deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_at = None

    def _queue(self, effects: tuple[e.Effect, ...]) -> None:
        for effect in effects:
            if not isinstance(effect, e.Assign):
                self.worker.put(self.work, effect)

    def _set_timer(self) -> None:
        wake_at = None if self.round is None else self.round.wake_at
        if wake_at == self._wake_at and self._timer is not None and not self._timer.cancelled():
            return
        self._stop_clock()
        if wake_at is not None:
            self._timer = asyncio.get_running_loop().call_at(wake_at, self._look_at_time)
            self._wake_at = wake_at

    def _look_at_time(self) -> None:
        # This timer is used up: the next step sets another one, even for the same moment.
        self._stop_clock()
        now = self.now()
        extends = self.round is not None and self.round.may_extend(now)
        is_blocked = self.round is not None and self.storage.is_blocked(now, self.round.rules.deadline_s)
        progressing = self.presence.progressing(now) if extends else ()
        self.step(e.TimePassed(progressing=progressing, is_blocked=is_blocked))

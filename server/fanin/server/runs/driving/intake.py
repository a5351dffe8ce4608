"""The devices' side of one Run: Assignments, whether an Update counts, and the fate of an Update.

Every answer follows from the Run's state at that moment (``course``), or from the record.
"""

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import islice
from typing import Final

from rpds import HashTrieSet

from fanin.protos import messages as m
from fanin.protos.errors import Superseded, Unavailable
from fanin.server.rounds import events as e
from fanin.server.rounds.assignments import Assignments
from fanin.server.rounds.recent import OpenedRound
from fanin.server.rounds.troubles import SEE_LOG
from fanin.server.runs.driving.course import Course
from fanin.server.runs.driving.ranges import DeviceRanges
from fanin.server.runs.driving.shortage import starvation_of
from fanin.server.runs.parking import Parked
from fanin.server.runs.setups import refusal_of
from fanin.server.selection.policies import BrokenPolicy, WaitingDevice, select
from fanin.server.storage.records import CommittedUpdate
from fanin.server.storage.stores import DriverStores

LOG: Final = logging.getLogger("fanin.server.runs.intake")


class Prospect(Enum):
    """Whether an Update counts."""

    NOW = "now"
    """In the open Round."""
    LATER = "later"
    """Perhaps in the next Round, which is not open yet."""
    NEVER = "never"


class Intake:
    """Answers the devices of one Run.

    Attributes:
        ranges: The check of the values of each device.
    """

    def __init__(self, course: Course, stores: DriverStores, parked: Mapping[str, Parked]) -> None:
        self._course = course
        self._parked = parked
        self._rounds = stores.rounds
        self._writer = stores.writer
        self._assignments = Assignments(course.setup)
        self.ranges = DeviceRanges(course.setup.layout, has_stages=bool(course.setup.stages))
        self._warned_round = 0

    @property
    def num_places(self) -> int:
        """Number of devices that the open Round can assign now."""
        return self._course.num_places

    def holds(self, device: str) -> bool:
        """Return whether a device holds an Assignment in the open Round."""
        machine = self._course.round
        return machine is not None and device in machine.cohort.at_work

    def select(self, waiting: Mapping[str, m.Capabilities], rng: random.Random) -> tuple[str, ...]:
        """Return the waiting devices that the Plan's selection policy chooses for the open Round's free places.

        Devices that cost a Round are chosen last (``Standing``): for the places that the policy leaves free after it
        has chosen among the others. A policy that breaks its contract chooses no device: the Round fails with the
        reason.

        Args:
            waiting: The capabilities of each suitable device that waits.
            rng: The policy's source of randomness.
        """
        course, now = self._course, self._course.now()
        if course.round is None or course.work is None:
            return ()
        candidates = [
            WaitingDevice(
                device_id=device, capabilities=capabilities, last_round=course.participation.last_round(device)
            )
            for device, capabilities in waiting.items()
            if course.round.may_join(device, now) and now >= course.standing.returns_at(device)
        ]
        if not candidates:
            return ()
        groups: tuple[list[WaitingDevice], list[WaitingDevice]] = [], []
        for each in candidates:
            groups[course.standing.is_last(each.device_id, now)].append(each)
        chosen: tuple[WaitingDevice, ...] = ()
        try:
            for group in groups:
                if group and (num_left := self.num_places - len(chosen)):
                    chosen += select(course.setup.policy, group, num_left, course.work.record.round, rng)
        except BrokenPolicy as exc:
            reason = f"the selection policy {course.setup.plan.cohort.selection!r} broke its contract: {exc}"
            LOG.error("run %s: %s", course.run_id, reason, exc_info=exc.__cause__)
            course.step(e.Broken(reason=f"{reason}; {SEE_LOG}"))
            return ()
        self._note_choice(course.work.record.round, candidates, has_chosen=bool(chosen))
        return tuple(device.device_id for device in chosen)

    def _note_choice(self, round_number: int, candidates: Sequence[WaitingDevice], *, has_chosen: bool) -> None:
        course = self._course
        if has_chosen:
            course.passed_over.clear()
            return
        course.passed_over.update(device.device_id for device in candidates)
        if self._warned_round != round_number:
            self._warned_round = round_number
            LOG.warning("run %s: round %d waits: %s", course.run_id, round_number, starvation_of(course))

    def pause_s(self, device: str) -> float:
        """Return the seconds until a device that pauses may receive an Assignment again, 0.0 if it may have one now."""
        return max(self._course.standing.returns_at(device) - self._course.now(), 0.0)

    @property
    def others_wait(self) -> bool:
        """Whether there are enough suitable devices for a quorum: they wait and cost no Round, or sent an Update."""
        machine, standing = self._course.round, self._course.standing
        accepted = HashTrieSet[str]() if machine is None else machine.cohort.accepted
        good = (
            device
            for device, parked in self._parked.items()
            if device not in accepted
            and not standing.has_cost(device)
            and not self.refusal(parked.check_in.capabilities)
        )
        num_missing = self._course.setup.plan.cohort.quorum - len(accepted)
        return sum(1 for _ in islice(good, num_missing)) == num_missing

    def refusal(self, capabilities: m.Capabilities) -> str:
        """Return why a device with these capabilities cannot take part in the Run, or an empty string if it can."""
        return refusal_of(self._course.setup, capabilities)

    def offer(self, device: str, *, reports_progress: bool) -> m.Assignment | None:
        """Return an Assignment for a suitable device, or the one that it holds. Return None if no place is free."""
        course = self._course
        if not self._place(device) or course.round is None:
            return None
        if reports_progress:
            course.watch(device, m.TrainingProgress())
        now, rules = course.now(), course.round.rules
        opened = self.opened(course.at_work.round_of(device) or 0)
        # The deadline starts when a quorum of devices holds Assignments.
        left_s = rules.deadline_s if course.round.deadline is None else course.round.deadline - now
        return self._assignments.assign(device, opened, max(left_s, 0.001), course.recent.lineage)

    def _place(self, device: str) -> bool:
        """Give a device one of the free places. Return whether it has a place, also if it had it before."""
        course = self._course
        if course.work is None or course.round is None or not course.round.assigns:
            return False
        is_new = device not in course.round.cohort.at_work
        if e.Assign(device=device) not in course.step(e.CheckedIn(device=device)):
            return False
        if is_new:
            course.at_work.begin(device, course.work.record.round, course.now() + course.round.rules.deadline_s)
            course.recent.begin_assignment(course.work.record.round, device)
            course.participation.note(device, course.work.record.round)
        return True

    def note_progress(self, round_number: int, device: str, progress: m.TrainingProgress) -> m.UploadReply:
        """Note that a device works for its Assignment of a Round. Nothing is read or written.

        A device that the coordinator no longer knows, because it was silent or because the coordinator was started
        again, gets a place again if one is free.

        Raises:
            Unavailable: Whether the Update counts is undecided.
        """
        course = self._course
        if self.prospect(round_number, device) is Prospect.NEVER:
            return m.UploadReply(round_state=m.RoundState.CLOSED, update_state=m.UpdateState.DISCARDED)
        if course.work is not None and course.round is not None and self._counts_now(round_number):
            cohort = course.round.cohort
            is_back = round_number == course.work.record.round and device not in cohort.accepted
            if device in cohort.at_work or (is_back and self._place(device)):
                course.watch(device, progress)
        return m.UploadReply(round_state=m.RoundState.OPEN, update_state=m.UpdateState.RECEIVING)

    async def with_state(self, device: str, assignment: m.Assignment) -> m.Assignment:
        """Return an Assignment with the Round of the device's initial state, read from the record.

        Nothing is read in a Run whose devices keep no state.
        """
        if not self._assignments.has_state:
            return assignment
        state = assignment.state
        last = await self._rounds.last_folded(assignment.run_id, device, lineage=state.lineage)
        return replace(assignment, state=replace(state, round=last))

    def check_assignment(self, assignment_id: str, device: str) -> int:
        """Return the number of the Round of an Assignment.

        Raises:
            NotFound: This Run has not issued the Assignment, or not to this device.
        """
        return self._assignments.check(assignment_id, device)

    def opened(self, round_number: int) -> OpenedRound:
        """Return a Round whose Updates count."""
        opened = self._course.recent.get(round_number)
        assert opened is not None, "RecentRounds keeps every Round whose Updates count"
        return opened

    @property
    def changed(self) -> asyncio.Event:
        """The event that is set at the next change of the Run."""
        return self._course.changed

    def prospect(self, round_number: int, device: str, *, is_full: bool = False) -> Prospect:
        """Return whether an Update of a device for a Round counts.

        Args:
            round_number: The Round of its Assignment.
            device: The device.
            is_full: Whether the record did not take the Update for the open Round, which was full or had closed.

        Raises:
            Unavailable: This is undecided while the Run is paused between two Rounds or the coordinator is ending.
        """
        course = self._course
        if course.recent.is_over(round_number, device):
            return Prospect.NEVER
        counts_now = self._counts_now(round_number)
        if counts_now and not is_full:
            return Prospect.NOW
        is_between = course.run.state.is_live and not course.is_open and course.recent.get(round_number) is not None
        if not course.recent.max_staleness or not (counts_now or is_between):
            return Prospect.NEVER
        if course.is_suspended:
            raise Unavailable(
                f"run {course.run_id}: paused between two rounds, or the coordinator is stopping; resume the upload "
                "later"
            )
        return Prospect.LATER

    async def commit(self, device: str, header: m.UpdateHeader, resumed_bytes: int = 0) -> m.UpdateHeader | None:
        """Accept an Update whose payload is durable.

        Args:
            device: The device that made the Update.
            header: The Update's header.
            resumed_bytes: Bytes of the payload that an earlier connection had delivered.

        Returns:
            The header of the Update that the record has for this Assignment. It may be an earlier Update of the device.
            None if the open Round does not accept the Update.

        Raises:
            Unavailable: Another coordinator drives the Run. The device uploads again there.
        """
        course = self._course
        work, buffer = course.work, course.run.start.plan.cohort.buffer
        if work is None or not self._counts_now(header.round) or course.recent.is_over(header.round, device):
            return None
        update = CommittedUpdate(device_id=device, round=work.record.round, header=header)
        try:
            committed = await self._writer.commit(update, buffer=buffer)
        except Superseded as exc:
            course.leave(exc)
            raise Unavailable(f"run {course.run_id}: another coordinator drives it; upload again there") from exc
        if committed is None:
            return None
        self._count(committed, resumed_bytes if committed.header is header else 0)
        return committed.header

    def may_fetch(self, sha256: str) -> bool:
        """Return whether a Chunk belongs to the Bundle or to the base Version of a Round whose Updates count."""
        return sha256 in self._course.setup.chunks or self._course.recent.has_base_chunk(sha256)

    async def outcome(self, round_number: int, device: str) -> m.UploadReply:
        """Return the state of a device's Update for a Round, and of the Round.

        Raises:
            Unavailable: The Update was not accepted yet, and the Run is paused between two Rounds, or the coordinator
                is ending.
        """
        accepted = await self._rounds.update(self._course.run_id, round_number, device)
        if accepted is not None:
            # After its commit, an error may have kept the Update from the machine.
            self._count(accepted)
            state = self.round_state(round_number, device)
            return m.UploadReply(round_state=state, update_state=m.UpdateState.ACCEPTED)
        is_open = self.prospect(round_number, device) is not Prospect.NEVER
        return m.UploadReply(
            round_state=m.RoundState.OPEN if is_open else m.RoundState.CLOSED,
            update_state=m.UpdateState.RECEIVING if is_open else m.UpdateState.DISCARDED,
        )

    def round_state(self, round_number: int, device: str) -> m.RoundState:
        """Return the state of the Round of an Update whose own state is known: open if another Update counts now."""
        try:
            is_closed = self.prospect(round_number, device) is Prospect.NEVER
            return m.RoundState.CLOSED if is_closed else m.RoundState.OPEN
        except Unavailable:
            # Nothing counts until the Run is resumed. The device must not wait for that: it may work for other Runs.
            return m.RoundState.CLOSED

    def give_up(self, round_number: int, device: str, failure: str) -> bool:
        """End the Assignment of a device that will not fulfil it, and free its place. The device then pauses.

        Args:
            round_number: The Round of the Assignment.
            device: The device.
            failure: The reason that the device reports.

        Returns:
            Whether it had a place. A repeated report finds none.
        """
        had_place = self._free(round_number, device, failure)
        if had_place:
            self._course.refused.discard(device)
            self._course.standing.give_up(device, self._course.now())
        return had_place

    def refuse(self, round_number: int, device: str, reason: str) -> None:
        """End the Assignment of a device whose Update was refused. Each refused Update makes its pause longer.

        Args:
            round_number: The Round of the Assignment.
            device: The device.
            reason: The error of the Update.
        """
        self._course.standing.refuse(device, self._course.now())
        if self._free(round_number, device, reason) and self._counts_now(round_number):
            self._course.refused.add(device)

    def refuse_any(self, device: str, reason: str) -> None:
        """End the Assignment of a device if it has one: it sent an Update that names no Assignment."""
        round_number = self._course.at_work.round_of(device)
        if round_number is not None:
            self.refuse(round_number, device, reason)

    def _free(self, round_number: int, device: str, failure: str) -> bool:
        course = self._course
        course.recent.end_assignment(round_number, device)
        if course.at_work.round_of(device) != round_number:
            return False
        course.stop_working(device)
        if self._counts_now(round_number):
            course.last_failure = failure
            course.step(e.GaveUp(device=device))
            course.announce_places()
        return True

    def note_storage(self, problem: str) -> None:
        """Note why the last upload could not be stored; empty if it could."""
        self._course.storage_problem = problem

    def _counts_now(self, round_number: int) -> bool:
        """Return whether the open Round counts Updates for a Round."""
        course = self._course
        return course.work is not None and course.is_open and course.recent.counts_in(round_number, course.work.record)

    def _count(self, update: CommittedUpdate, resumed_bytes: int = 0) -> None:
        """Report a recorded Update to the machine, once.

        A Round that has begun to close reads its Updates from the record instead.
        """
        course = self._course
        work, machine = course.work, course.round
        if work is None or machine is None or update.round != work.record.round or not machine.is_open:
            return
        if update.device_id not in machine.cohort.accepted:
            work.add_committed(update.device_id, update.header, resumed_bytes)
            course.stop_working(update.device_id)
            course.standing.clear(update.device_id)
            course.step(e.UpdateCommitted(device=update.device_id))

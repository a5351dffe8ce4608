"""The check-ins of the devices of one Run: who is selected, and the Assignment of a device.

Every answer follows from the Run's state at that moment (``course``), or from the record.
"""

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from fanin.edge.scopes import about_run
from fanin.protos import messages as m
from fanin.server.protocols import events as e
from fanin.server.protocols.machine import Round
from fanin.server.rounds.troubles import SEE_LOG
from fanin.server.runs.driving.course import Course
from fanin.server.runs.driving.shortage import starvation_of
from fanin.server.runs.recorded_setup import refusal_of
from fanin.server.selection.policies import BrokenPolicy, WaitingDevice, select
from fanin.server.storage.stores import DriverStores

LOG: Final = logging.getLogger("fanin.server.runs.driving.intake")


@dataclass(slots=True)
class Parked:
    """A check-in that waits for work, and its answer once there is one. ``fleet.checkins`` answers it."""

    check_in: m.CheckIn
    answer: asyncio.Future[m.CheckInAnswer]


class Intake:
    """Answers the check-ins of the devices of one Run."""

    def __init__(self, course: Course, stores: DriverStores, parked: Mapping[str, Parked]) -> None:
        self._course = course
        self._parked = parked
        self._rounds = stores.rounds
        self._warned_round = 0

    @property
    def num_waiting(self) -> int:
        """Number of devices whose check-in waits for work of any Run."""
        return len(self._parked)

    @property
    def num_places(self) -> int:
        """Number of devices that the open Round can assign now."""
        return self._course.num_places

    def holds(self, device: str) -> bool:
        """Return whether a device holds an Assignment in the open Round."""
        course, machine = self._course, self._course.round
        if machine is None or course.work is None or not machine.holds(device):
            return False
        return device in machine.cohort.at_work or not course.recent.is_over(course.work.record.round, device)

    @property
    def holders(self) -> Iterable[str]:
        """The devices that hold an Assignment in the open Round."""
        machine = self._course.round
        return () if machine is None else machine.cohort.at_work

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
        if course.setup.coins is not None:
            number = course.work.record.round
            return tuple(each.device_id for each in candidates if course.setup.coins.draws(number, each.device_id))
        required, num_reserved = self._required(candidates)
        chosen, taken = required, {each.device_id for each in required}
        groups: tuple[list[WaitingDevice], list[WaitingDevice]] = [], []
        for each in candidates:
            if each.device_id not in taken:
                groups[course.standing.is_last(each.device_id, now)].append(each)
        try:
            for group in groups:
                if group and (num_left := max(self.num_places - num_reserved - len(chosen), 0)):
                    chosen += select(course.setup.policy, group, num_left, course.work.record.round, rng)
        except BrokenPolicy as exc:
            reason = f"the selection policy {course.setup.plan.cohort.selection!r} broke its contract: {exc}"
            about_run(LOG, course.run_id).error("%s", reason, exc_info=exc.__cause__)
            course.step(e.Broken(reason=f"{reason}; {SEE_LOG}"))
            return ()
        self._note_choice(course.work.record.round, candidates, has_chosen=bool(chosen))
        return tuple(device.device_id for device in chosen)

    def _required(self, candidates: Sequence[WaitingDevice]) -> tuple[tuple[WaitingDevice, ...], int]:
        """Return the required participants among the candidates, and the number of places kept for those who lack.

        A policy does not choose among required participants. In the order of their check-ins, each gets a place.
        """
        lack, members = self._course.open_lack, self._course.members
        chosen: list[WaitingDevice] = []
        for each in candidates if lack.num_places else ():
            meets = members.met_by(each.device_id)
            if len(chosen) < self.num_places and not meets.isdisjoint(lack.missing):
                chosen.append(each)
                lack = lack.after(meets)
        return tuple(chosen), lack.num_places

    def _note_choice(self, round_number: int, candidates: Sequence[WaitingDevice], *, has_chosen: bool) -> None:
        course = self._course
        if has_chosen:
            course.passed_over.clear()
            return
        course.passed_over.update(device.device_id for device in candidates)
        if self._warned_round != round_number:
            self._warned_round = round_number
            log = about_run(LOG, course.run_id, round_number)
            log.warning("round %d waits: %s", round_number, starvation_of(course))
        if course.round is not None and course.round.deadline is None and course.open_lack.num_places:
            # The devices that wait for required participants count for the quorum that starts the deadline.
            course.step(e.TimePassed(num_waiting=self._num_joining(course.round)))

    def _num_joining(self, machine: Round) -> int:
        """Return the number of waiting devices that may join a Round, at most as many as its quorum needs."""
        joining = (
            device
            for device, parked in self._parked.items()
            if machine.may_join(device, self._course.now())
            and not self.pause_s(device)
            and not self.refusal(parked.check_in.capabilities)
        )
        return sum(1 for _ in islice(joining, machine.rules.quorum))

    def pause_s(self, device: str) -> float:
        """Return the seconds until a device that pauses may receive an Assignment again, 0.0 if it may have one now."""
        return max(self._course.standing.returns_at(device) - self._course.now(), 0.0)

    @property
    def others_wait(self) -> bool:
        """Whether there are enough suitable devices for a quorum: they wait and cost no Round, or sent an Update."""
        machine, standing = self._course.round, self._course.standing
        if machine is None:
            return False
        accepted, only = machine.cohort.accepted, machine.only
        good = (
            device
            for device, parked in self._parked.items()
            if device not in accepted
            and (only is None or device in only)
            and not standing.has_cost(device)
            and not self.refusal(parked.check_in.capabilities)
        )
        num_missing = machine.rules.quorum - len(accepted)
        return sum(1 for _ in islice(good, num_missing)) == num_missing

    def refusal(self, capabilities: m.Capabilities) -> str:
        """Return why a device with these capabilities cannot take part in the Run, or an empty string if it can."""
        return refusal_of(self._course.setup, capabilities)

    def offer(self, device: str, *, reports_progress: bool) -> m.Assignment | None:
        """Return an Assignment for a suitable device, or the one that it holds. Return None if no place is free."""
        course = self._course
        if not course.place(device) or course.round is None:
            return None
        if reports_progress:
            course.watch(device, m.TrainingProgress())
        now, rules = course.now(), course.round.rules
        number = course.at_work.round_of(device) or (0 if course.work is None else course.work.record.round)
        opened = course.recent.get(number)
        assert opened is not None, "RecentRounds keeps every Round whose Updates count"
        # The deadline starts when a quorum of devices holds Assignments.
        left_s = rules.deadline_s if course.round.deadline is None else course.round.deadline - now
        return course.assignments.assign(device, opened, max(left_s, 0.001), course.recent.lineage)

    async def with_state(self, device: str, assignment: m.Assignment) -> m.Assignment:
        """Return an Assignment with the Round of the device's initial state, read from the record.

        Nothing is read in a Run whose devices keep no state.
        """
        if not self._course.assignments.has_state:
            return assignment
        state = assignment.state
        last = await self._rounds.last_folded(assignment.run_id, device, lineage=state.lineage)
        return replace(assignment, state=replace(state, round=last))

    def may_fetch(self, sha256: str) -> bool:
        """Return whether a Chunk belongs to the Bundle or to the base Version of a Round whose Updates count."""
        return sha256 in self._course.setup.chunks or self._course.recent.has_base_chunk(sha256)

"""What devices ask of one Run: an Assignment, whether an Update counts, what became of one.

Every answer follows from the Run's course at this moment, or from the record.
"""

from fanin.protos import messages as m
from fanin.protos.errors import Unavailable
from fanin.server.fleet.selection import unsuitable
from fanin.server.rounds import events as e
from fanin.server.rounds.assignments import Assignments
from fanin.server.rounds.effects import Tools
from fanin.server.rounds.recent import Made
from fanin.server.runs.course import Course
from fanin.server.runs.publications import Publications
from fanin.server.storage.sqlite.rounds import CommittedUpdate


class Intake:
    """The devices' side of a Run."""

    def __init__(self, course: Course, tools: Tools) -> None:
        model = course.model
        self._course = course
        self._tools = tools
        self._assignments = Assignments(course.run.start, model.bundle, model.run_key)
        self.publications = Publications(self._assignments, model, tools)

    @property
    def num_places(self) -> int:
        """How many devices the open Round can still take."""
        machine = self._course.round
        return 0 if machine is None else machine.num_places

    def holds(self, device: str) -> bool:
        """Whether a device has an Assignment in the open Round."""
        machine = self._course.round
        return machine is not None and device in machine.at_work

    def may_join(self, device: str) -> bool:
        """Whether a device has not had a part in the open Round yet."""
        machine = self._course.round
        return machine is not None and device not in machine.at_work and device not in machine.accepted

    def refusal(self, capabilities: m.Capabilities) -> str:
        """Why a device with these capabilities can take no part in the Run; empty if it can."""
        model = self._course.model
        total = model.download_bytes(capabilities.graph_formats)
        return unsuitable(capabilities, self._course.run.start.plan, model.graph_formats, total)

    def offer(self, device: str) -> m.Assignment | None:
        """An Assignment for a suitable device, or the one it has; None if there is no place."""
        course = self._course
        if course.work is None or course.round is None or not course.round.assigns:
            return None
        is_new = device not in course.round.at_work
        if e.Assign(device=device) not in course.step(e.CheckedIn(device=device)):
            return None
        now, rules = course.now(), course.round.rules
        if is_new:
            course.at_work.begin(device, course.work.record.round, now + rules.deadline_s)
        made = self.made(course.at_work.round_of(device) or 0)
        # Until the quorum is there the clock does not run.
        left_s = rules.deadline_s if course.round.deadline is None else course.round.deadline - now
        return self._assignments.make(device, made, max(left_s, 0.001))

    def check_assignment(self, assignment_id: str, device: str) -> int:
        """The Round of an Assignment of this Run. Raises NotFound unless it was made here for this device."""
        return self._assignments.check(assignment_id, device)

    def takes(self, round_number: int) -> bool:
        """Whether Updates that were made for a Round count in the open one."""
        course = self._course
        return course.work is not None and course.is_open and course.recent.counts_in(round_number, course.work.record)

    def made(self, round_number: int) -> Made:
        """What the Assignments of a Round whose Updates count were made of."""
        made = self._course.recent.get(round_number)
        assert made is not None, "what counts is remembered"
        return made

    def may_count(self, round_number: int) -> bool:
        """Whether Updates that were made for a Round count, in the open one or, while one ends, perhaps in the next.

        Raises Unavailable while nobody can say: the Run is paused between two Rounds, or the coordinator is leaving.
        """
        course = self._course
        if self.takes(round_number):
            return True
        is_remembered = course.recent.get(round_number) is not None
        if not is_remembered or not course.recent.max_staleness or not course.run.state.is_live or course.is_open:
            return False
        if course.is_paused:
            raise Unavailable(f"run {course.run_id}: takes no updates at this moment; go on later")
        return True

    async def commit(self, device: str, header: m.UpdateHeader, resumed_bytes: int = 0) -> m.UpdateHeader | None:
        """Accept an Update whose payload is durable; the header that stands for its Assignment, which may be an earlier
        one, or None: the open Round does not take it."""
        course = self._course
        work, buffer = course.work, course.run.start.plan.cohort.buffer
        if work is None or not self.takes(header.round):
            return None
        update = CommittedUpdate(device_id=device, round=work.record.round, header=header)
        committed = await self._tools.commits.commit(update, buffer=buffer)
        if committed is None:
            return None
        self._count(committed, resumed_bytes if committed.header is header else 0)
        return committed.header

    def is_refused(self, round_number: int) -> bool:
        """Whether an Update that the open Round did not take is refused for good. Raises Unavailable if it may be taken
        after a pause."""
        course = self._course
        if not course.recent.max_staleness or not self.may_count(round_number):
            return True
        if course.is_paused:
            raise Unavailable(f"run {course.run_id}: takes no updates at this moment; go on later")
        return False

    def may_fetch(self, sha256: str) -> bool:
        """Whether a Chunk is one of the Bundle's or of a Version that a Round whose Updates count starts from."""
        return sha256 in self._course.model.chunks or self._course.recent.begins_with(sha256)

    async def outcome(self, round_number: int, device: str) -> m.UploadReply:
        """What became of a device's Update of this Round."""
        tools, run_id = self._tools, self._course.run_id
        accepted = await tools.store_lane(lambda: tools.rounds.update(run_id, round_number, device))
        if accepted is not None:
            # An error after its commit may have kept it from the machine.
            self._count(accepted)
        is_open = self.may_count(round_number)
        missing = m.UpdateState.RECEIVING if is_open else m.UpdateState.DISCARDED
        return m.UploadReply(
            round_state=m.RoundState.OPEN if is_open else m.RoundState.CLOSED,
            update_state=missing if accepted is None else m.UpdateState.ACCEPTED,
        )

    def give_up(self, round_number: int, device: str) -> None:
        """A device will not fulfil its Assignment; its place is free."""
        course = self._course
        if course.at_work.round_of(device) != round_number:
            return
        course.at_work.end(device)
        if self.takes(round_number):
            course.step(e.GaveUp(device=device))
            course.on_change()

    def note_space(self, *, is_lacking: bool) -> None:
        """Whether the last upload found space on the disk."""
        self._course.lacks_space = is_lacking

    def _count(self, update: CommittedUpdate, resumed_bytes: int = 0) -> None:
        """Tell the machine of a recorded Update, once. If its Round has begun to close, the record tells it."""
        course = self._course
        work, machine = course.work, course.round
        if work is None or machine is None or update.round != work.record.round or not machine.is_open:
            return
        if update.device_id not in machine.accepted:
            work.add_committed(update.device_id, update.header, resumed_bytes)
            course.at_work.end(update.device_id)
            course.step(e.UpdateCommitted(device=update.device_id))

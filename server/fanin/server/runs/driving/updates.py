"""The Updates of the devices of one Run: decided, committed, refused and given up.

Every decision is ``rounds.decision.decide`` of the facts that the record and ``course`` have at that moment. ``commit``
is the only way of an Update into the record. The order of its steps ensures that no crash leaves a committed Update
without its payload, or an acknowledged Update without its row:

    1. the payload becomes durable
    2. the values of its tensors with ranges are checked (``ranges``), or their norm (``privacy.noising``)
    3. one row in the database commits the Update to the current Round, and the round machine receives it
    4. the files of the upload are removed
    5. the device receives the decision
"""

from collections import deque
from dataclasses import replace
from functools import partial

from fanin.edge.codecs.fixed import SparseCodec, decoded_pieces
from fanin.edge.ranges import NUM_BINS
from fanin.protos import messages as m
from fanin.protos.errors import Conflict, InvalidUpdate, Superseded, Unavailable
from fanin.server.privacy.noising import CentralNoise
from fanin.server.protocols import events as e
from fanin.server.rounds.decision import Accepted, Decision, Discarded, Later, Receive, decide
from fanin.server.rounds.recent import OpenedRound
from fanin.server.runs.driving.course import Course
from fanin.server.runs.driving.participants import Participants
from fanin.server.runs.driving.ranges import DeviceRanges
from fanin.server.runs.validation import Expected, check_header
from fanin.server.runs.view import policy_code
from fanin.server.selection.coverage import Lack
from fanin.server.storage.protocols.files import Upload
from fanin.server.storage.records import CommittedUpdate
from fanin.server.storage.stores import DriverStores, Files


class UpdateDecisions:
    """The Updates of one Run.

    Args:
        course: The state of the Run.
        stores: The record of the Run.
        files: The spool, and the blobs of the Versions.
        participants: Whether the Plan requires a device.
    """

    def __init__(self, course: Course, stores: DriverStores, files: Files, participants: Participants) -> None:
        self._course = course
        self._rounds, self._writer = stores.rounds, stores.writer
        self._files = files
        self._participants = participants
        self._ranges = DeviceRanges(course.setup.layout, course.setup.codec.codec, has_stages=bool(course.setup.stages))

    async def admit(self, round_number: int, device: str, header: m.UpdateHeader) -> Decision:
        """Return the decision about an Update, before a Chunk of it is received.

        Args:
            round_number: The Round of its Assignment.
            device: The device.
            header: The header of the Update.

        Raises:
            InvalidUpdate: The Update may count, and its header does not match its Assignment.
            Conflict: The Round accepts no Updates yet.
        """
        decision = await self.decide(round_number, device)
        machine = self._course.round
        if isinstance(decision, Receive) and machine is not None and not machine.accepts_updates:
            raise Conflict(
                f"update: round {round_number} is in the phase {machine.working} and accepts no updates yet, "
                "expected an update after the messages; check in again",
                code="FN-1607",
            )
        if isinstance(decision, Receive | Later):
            check_header(header, self._expected(decision.origin))
            if self._course.times is not None:
                self._course.times.upload(device, self._course.now())
        return decision

    async def decide(self, round_number: int, device: str) -> Decision:
        """Return the decision about the Update of a device for a Round, by the record."""
        recorded = await self._rounds.update(self._course.run_id, round_number, device)
        if recorded is not None:
            # After its commit, an error may have kept the Update from the machine.
            self._count(recorded)
        facts = self._course.facts(round_number, device, recorded)
        if recorded is None and facts.origin is None and await self._was_folded(round_number, device):
            return Accepted(is_open=False)
        return decide(facts)

    async def _was_folded(self, round_number: int, device: str) -> bool:
        """Return whether the last folded Update of a device was made for a Round. Its row may be gone."""
        return await self._rounds.last_folded(self._course.run_id, device, lineage=0) == round_number

    def outlook(self, round_number: int, device: str) -> Decision:
        """Return the decision about an Update that is not recorded yet. Nothing is read."""
        return decide(self._course.facts(round_number, device))

    async def commit(self, device: str, upload: Upload) -> Decision:
        """Commit a complete upload, as far as that is possible now. It may be repeated after any failure.

        Returns:
            ``Later`` and ``Undecided`` keep the upload. ``Accepted`` may be for an earlier Update of the device.

        Raises:
            InvalidUpdate: A tensor of the device is out of its range, or the device did not clip. The Update leaves no
                trace.
            StorageFull: The disk is full.
            Unavailable: Another coordinator drives the Run. The device uploads again there.
        """
        header, files, spool = upload.header, self._files, self._files.spool
        decision = self.outlook(header.round, device)
        if isinstance(decision, Receive):
            await files.run(spool.commit, upload, device)
            await self._check_values(header, device, decision.origin)
            recorded = await self._record(device, upload)
            # A full Round has no place for the Update, and the next one may have.
            decision = decide(replace(self._course.facts(header.round, device, recorded), is_full=recorded is None))
            if isinstance(decision, Accepted | Discarded) and (
                recorded is None or recorded.header.payload != header.payload
            ):
                await files.run(spool.withdraw, header, device)
        if isinstance(decision, Accepted | Discarded):
            await files.run(spool.discard, header.assignment_id)
            is_open = isinstance(self.outlook(header.round, device), Receive | Later)
            return replace(decision, is_open=is_open)
        return decision

    def note_progress(self, round_number: int, device: str, progress: m.TrainingProgress) -> Decision:
        """Note that a device works for its Assignment of a Round. Nothing is read or written.

        A device that the coordinator no longer knows, because it was silent or because the coordinator was started
        again, gets a place again if one is free.
        """
        course, decision = self._course, self.outlook(round_number, device)
        if isinstance(decision, Receive) and course.round is not None:
            cohort = course.round.cohort
            is_back = round_number == decision.current.round and device not in cohort.accepted
            if device in cohort.at_work or (is_back and course.place(device)):
                course.watch(device, progress)
        return decision

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
            # A policy would refuse the next Round, too, so the place is better used by another device.
            note = self._course.standing.refuse if policy_code(failure) else self._course.standing.give_up
            note(device, self._course.now())
        return had_place

    def refuse(self, round_number: int, device: str, reason: str) -> None:
        """End the Assignment of a device whose Update was refused. Each refused Update makes its pause longer.

        Args:
            round_number: The Round of the Assignment.
            device: The device.
            reason: The error of the Update.
        """
        self._course.standing.refuse(device, self._course.now())
        if self._free(round_number, device, reason) and self._counts(round_number, device):
            self._course.refused.add(device)

    def refuse_any(self, device: str, reason: str) -> None:
        """End the Assignment of a device if it has one: it sent an Update that names no Assignment."""
        round_number = self._course.at_work.round_of(device)
        if round_number is not None:
            self.refuse(round_number, device, reason)

    def _expected(self, origin: OpenedRound) -> Expected:
        setup = self._course.setup
        table = setup.layout.total_table
        return Expected(
            run_id=self._course.run_id,
            round=origin.record.round,
            version_sha256=origin.base.sha256,
            codec=setup.start.plan.codec,
            payload_bytes=setup.codec.payload_bytes(table) if setup.vector is None else setup.vector.size_bytes,
            table=table,
            num_labels=setup.num_labels,
            statistics=setup.statistics,
            num_range_cells=2 * len(setup.counted) * NUM_BINS,
        )

    async def _check_values(self, header: m.UpdateHeader, device: str, origin: OpenedRound) -> None:
        files, spool, setup = self._files, self._files.spool, self._course.setup
        codec, num_values = setup.codec.codec, setup.layout.total_table.num_values
        try:
            if self._ranges.are_checked:
                await files.run(self._ranges.check, header, device, (origin.record, origin.base), (spool, files.blobs))
            if isinstance(origin.noise, CentralNoise):
                await files.run(origin.noise.check_update, header, spool.read(header, device), codec)
            if isinstance(codec, SparseCodec):
                # Unlike those of other codecs, its bytes can be wrong. A fold that found it out would fail the Round.
                await files.run(partial(deque, maxlen=0), decoded_pieces(codec, spool.read(header, device), num_values))
        except InvalidUpdate:
            await files.run(spool.withdraw, header, device)
            raise

    async def _record(self, device: str, upload: Upload) -> CommittedUpdate | None:
        """Record an Update whose payload is durable, and report it to the machine.

        Returns:
            The Update that the record has for its Assignment. It may be an earlier Update of the device. None if the
            current Round does not accept the Update.
        """
        course, header = self._course, upload.header
        decision = self.outlook(header.round, device)
        if not isinstance(decision, Receive):
            return None
        update = CommittedUpdate(
            device_id=device, round=decision.current.round, header=header, header_proto=upload.header_proto
        )
        if course.run.start.plan.participants.tags:
            await self._participants.learn(device)
        lack = Lack() if course.round is None else course.round.lack
        # The late Update of a device whose place was taken must not fill the Round before a required one.
        buffer = course.run.start.plan.cohort.buffer - course.num_kept(device, lack)
        try:
            recorded = await self._writer.commit(update, buffer=buffer)
        except Superseded as exc:
            course.leave(exc)
            raise Unavailable(
                f"run {course.run_id}: another coordinator drives it; upload again there", code="FN-0013"
            ) from exc
        if recorded is not None:
            self._count(recorded, upload.resumed_bytes if recorded is update else 0)
        return recorded

    def _count(self, update: CommittedUpdate, resumed_bytes: int = 0) -> None:
        """Report a recorded Update to the machine, once.

        A Round that has begun to close reads its Updates from the record instead.
        """
        course = self._course
        work, machine = course.work, course.round
        if work is None or machine is None or update.round != work.record.round or not machine.accepts_updates:
            return
        if update.device_id not in machine.cohort.accepted:
            time = None if course.times is None else course.times.commit(update.device_id, course.now())
            work.add_committed(update, resumed_bytes, time)
            course.stop_working(update.device_id)
            course.standing.clear(update.device_id)
            course.step(course.committed(update))

    def _free(self, round_number: int, device: str, failure: str) -> bool:
        course = self._course
        course.recent.end_assignment(round_number, device)
        if course.at_work.round_of(device) != round_number:
            return False
        course.stop_working(device)
        if self._counts(round_number, device):
            course.failures.note(failure)
            course.step(e.GaveUp(device=device))
            course.announce_places()
        return True

    def _counts(self, round_number: int, device: str) -> bool:
        """Return whether the current Round counts Updates for a Round, also if this device's Assignment is over."""
        return isinstance(decide(replace(self._course.facts(round_number, device), is_over=False)), Receive)

"""Leases in memory, and the writes of drivers."""

from collections.abc import Sequence
from dataclasses import replace

from fanin.protos.errors import Conflict
from fanin.protos.messages import (
    DevicesGone,
    RoundClosed,
    RoundExtended,
    RoundFailed,
    RoundLacks,
    RoundOpened,
    RunRested,
    RunState,
    RunWarned,
    Version,
    VersionPublished,
    round_closed,
)
from fanin.protos.plans import CohortPlan
from fanin.server.storage.decisions import (
    check_lease,
    ended_warnings,
    failure_of,
    lacks_messages,
    left_until,
    new_warnings,
)
from fanin.server.storage.memory.database import MemoryDatabase, RunRows
from fanin.server.storage.memory.ledger import add_charge
from fanin.server.storage.protocols.ledger import PrivacyCharge
from fanin.server.storage.records import (
    UNKNOWN_SHORTAGE,
    CommittedUpdate,
    Lease,
    MeasuredRanges,
    OuterState,
    Roster,
    RoundMark,
    RoundMessage,
    RoundRecord,
    Shortage,
)


class MemoryLeases:
    """``LeaseStore`` in memory."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database

    async def take(self, run_id: str, holder: str, now_s: float) -> "MemoryWriter":
        """See ``LeaseStore.take``."""
        rows = self._database.runs[run_id]
        epoch = 1 if rows.lease is None else rows.lease.epoch + 1
        rows.lease = Lease(run_id=run_id, epoch=epoch, holder=holder)
        return MemoryWriter(rows, rows.lease, self._database)

    async def lease(self, run_id: str) -> Lease | None:
        """See ``LeaseStore.lease``."""
        rows = self._database.runs.get(run_id)
        return None if rows is None else rows.lease


class MemoryWriter:
    """``RunWriter`` in memory."""

    def __init__(self, rows: RunRows, lease: Lease, database: MemoryDatabase) -> None:
        self.lease = lease
        self._rows = rows
        self._database = database

    async def open(self, record: RoundRecord) -> bool:
        """See ``RoundWriter.open``."""
        rows = self._fenced()
        known = rows.rounds.get(record.round)
        if known is not None:
            return known.mark is RoundMark.OPEN
        if rows.record.state is not RunState.RUNNING:
            return False
        rows.rounds[record.round] = record
        rows.add_event(RoundOpened(round=record.round, base_version=record.base_version), record.opened_at_s)
        return True

    async def set_deadline(
        self, round_number: int, deadline_at_s: float, now_s: float, *, num_rosters: int = 0
    ) -> None:
        """See ``RoundWriter.set_deadline``."""
        rows = self._fenced()
        record = replace(rows.rounds[round_number], deadline_rosters=num_rosters)
        if rows.record.state is RunState.PAUSED:
            rows.rounds[round_number] = replace(record, left_s=left_until(deadline_at_s, now_s))
        else:
            rows.rounds[round_number] = replace(record, deadline_at_s=deadline_at_s, left_s=None)

    async def add_message(self, message: RoundMessage) -> RoundMessage | None:
        """See ``RoundWriter.add_message``."""
        rows = self._fenced()
        messages, key = rows.messages[message.round], (message.phase, message.device_id)
        record = rows.rounds.get(message.round)
        is_frozen = any(roster.phase == message.phase for roster in rows.rosters[message.round])
        if key not in messages and (record is None or record.mark.is_final or is_frozen):
            return None
        return messages.setdefault(key, message)

    async def freeze(
        self, round_number: int, phase: str, *, quorum: int, now_s: float, others_wait: bool = False
    ) -> Roster | None:
        """See ``RoundWriter.freeze``."""
        rows = self._fenced()
        if rows.rounds[round_number].mark.is_final:
            return None
        for roster in rows.rosters[round_number]:
            if roster.phase == phase:
                return roster
        devices = tuple(device for name, device in rows.messages[round_number] if name == phase)
        if len(devices) < quorum:
            failure = lacks_messages(round_number, phase, len(devices), quorum, others_wait=others_wait)
            rows.fail_round(failure, now_s)
            return None
        rows.rosters[round_number].append(Roster(phase=phase, devices=devices))
        return rows.rosters[round_number][-1]

    async def commit(self, update: CommittedUpdate, *, buffer: int) -> CommittedUpdate | None:
        """See ``RoundWriter.commit``."""
        rows, device = self._fenced(), update.device_id
        updates = rows.updates_by_assigned_round[update.header.round]
        if device in updates:
            return updates[device]
        record, committed = rows.rounds.get(update.round), rows.updates[update.round]
        if record is None or record.mark is not RoundMark.OPEN or len(committed) >= buffer or device in committed:
            return None
        committed[device] = updates[device] = update
        return update

    async def close(
        self,
        round_number: int,
        *,
        cohort: CohortPlan,
        now_s: float,
        shortage: Shortage = UNKNOWN_SHORTAGE,
        charge: PrivacyCharge | None = None,
    ) -> RoundRecord:
        """See ``RoundWriter.close``."""
        rows = self._fenced()
        record = rows.rounds[round_number]
        if record.mark is not RoundMark.OPEN:
            return record
        accepted = tuple(rows.updates[round_number])
        event: RoundClosed | RoundFailed = round_closed(round_number, accepted)
        mark = RoundMark.CLOSED
        if len(accepted) < cohort.quorum:
            mark = RoundMark.FAILED
            event = failure_of(round_number, len(accepted), cohort, shortage)
        elif charge is not None and not add_charge(self._database, self.lease.run_id, round_number, charge, now_s):
            return record
        rows.rounds[round_number] = replace(record, mark=mark, accepted=accepted)
        rows.add_event(event, now_s)
        return rows.rounds[round_number]

    async def publish(
        self,
        version: Version,
        event: VersionPublished,
        *,
        next_grid: Sequence[int],
        outer_state: OuterState,
        now_s: float,
    ) -> RoundRecord:
        """See ``RoundWriter.publish``."""
        rows = self._fenced()
        record = rows.rounds[event.round]
        if record.mark.is_final:
            return record
        if version.number in rows.versions:
            raise Conflict(
                f"the record already has this entry (version {version.number} of run {version.run_id}); read the state "
                "again, then decide",
                code="FN-0509",
            )
        rows.add_version(version, event, now_s)
        rows.outer_states[event.round] = dict(outer_state)
        rows.rounds[event.round] = replace(record, mark=RoundMark.PUBLISHED, next_grid=tuple(next_grid))
        rows.add_event(event, now_s)
        rows.erase_old_seeds(event.round, now_s)
        return rows.rounds[event.round]

    async def fail(self, round_number: int, *, reason: str, now_s: float) -> RoundRecord:
        """See ``RoundWriter.fail``."""
        rows = self._fenced()
        record = rows.rounds[round_number]
        return (
            record if record.mark.is_final else rows.fail_round(RoundFailed(round=round_number, reason=reason), now_s)
        )

    async def keep_ranges(self, round_number: int, measured: MeasuredRanges) -> RoundRecord:
        """See ``RunWriter.keep_ranges``."""
        rows = self._fenced()
        record = rows.rounds[round_number]
        if record.mark is RoundMark.CLOSED and record.measured is None:
            rows.rounds[round_number] = replace(record, measured=measured)
        return rows.rounds[round_number]

    async def rest(self, rested: RunRested, now_s: float, *, next_sequence: int) -> bool:
        """See ``RunWriter.rest``."""
        rows = self._fenced()
        if rows.record.state is not RunState.RUNNING or rows.newest_sequence >= next_sequence:
            return False
        rows.rest(rested, now_s)
        return True

    async def warn(self, warnings: Sequence[RunWarned], now_s: float) -> None:
        """See ``RunWriter.warn``."""
        rows = self._fenced()
        known = {(each.code, each.subject) for each in rows.warnings}
        ended = ended_warnings(warnings, known)
        known -= {(each.code, each.subject) for each in ended}
        for warning in (*ended, *new_warnings(warnings, known)):
            rows.add_event(warning, now_s)

    async def note(self, event: DevicesGone | RoundExtended | RoundLacks, now_s: float) -> None:
        """See ``RunWriter.note``."""
        self._fenced().add_event(event, now_s)

    def _fenced(self) -> RunRows:
        """Return the rows of the Run. Raises Superseded if another driver has taken it."""
        assert self._rows.lease is not None, "a lease is recorded when it is taken"
        check_lease(self.lease, self._rows.lease)
        return self._rows

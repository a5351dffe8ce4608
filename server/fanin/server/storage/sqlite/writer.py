"""The writes of drivers. Each transaction compares its epoch with the newest one first (``decisions.check_lease``).

The database decides which Updates are accepted. ``commit_all`` counts the places and inserts in one transaction, so a
Round never has more than ``buffer`` Updates.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from sqlalchemy import Connection, Engine, delete, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from fanin.protos.errors import Superseded
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
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.engine import writing
from fanin.server.storage.sqlite.ledger.rows import add_charge, note_rows
from fanin.server.storage.sqlite.ledger.seeds import erase_old_seeds
from fanin.server.storage.sqlite.messages import add_message, add_roster, find_roster, find_senders
from fanin.server.storage.sqlite.rounds import (
    add_outer_state,
    fail_round,
    find_round,
    find_update,
    is_round,
    measured_text,
)
from fanin.server.storage.sqlite.runs import add_event, add_version, newest_sequence, run_state, set_run

Verdict = CommittedUpdate | RoundMessage | Superseded | None
"""What is recorded, the refusal of its driver, or None if the Round does not accept it."""


class SqliteLeases:
    """The leases of Runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def take(self, run_id: str, holder: str, now_s: float) -> Lease:
        """Record the next lease of a Run and return it."""
        table = schema.leases
        with writing(self._engine) as connection:
            before = find_lease(connection, run_id)
            lease = Lease(run_id=run_id, epoch=1 if before is None else before.epoch + 1, holder=holder)
            values = {"epoch": lease.epoch, "holder": holder, "taken_at": now_s}
            row = upsert(table).values(run_id=run_id, **values)
            connection.execute(row.on_conflict_do_update(index_elements=[table.c.run_id], set_=values))
        return lease

    def lease(self, run_id: str) -> Lease | None:
        """See ``LeaseStore.lease``."""
        with self._engine.connect() as connection:
            return find_lease(connection, run_id)


class SqliteWriter:
    """The writes of the driver that holds a lease. The methods are those of ``RunWriter``, without ``commit``."""

    def __init__(self, engine: Engine, lease: Lease) -> None:
        self.lease = lease
        self._engine = engine

    def open(self, record: RoundRecord) -> bool:
        """See ``RoundWriter.open``."""
        assert record.run_id == self.lease.run_id, "a driver opens rounds of its own run"
        with self._fenced() as connection:
            known = find_round(connection, record.run_id, record.round)
            if known is not None:
                return known.mark is RoundMark.OPEN
            if run_state(connection, record.run_id) is not RunState.RUNNING:
                return False
            connection.execute(
                insert(schema.rounds).values(
                    run_id=record.run_id,
                    round=record.round,
                    base_version=record.base_version,
                    grid=json.dumps(record.grid),
                    state=RoundMark.OPEN.value,
                    opened_at=record.opened_at_s,
                )
            )
            opened = RoundOpened(round=record.round, base_version=record.base_version)
            add_event(connection, record.run_id, opened, record.opened_at_s)
            return True

    def set_deadline(self, round_number: int, deadline_at_s: float, now_s: float, *, num_rosters: int = 0) -> None:
        """See ``RoundWriter.set_deadline``."""
        run_id = self.lease.run_id
        with self._fenced() as connection:
            is_paused = run_state(connection, run_id) is RunState.PAUSED
            left_s = left_until(deadline_at_s, now_s)
            values = {"left_s": left_s} if is_paused else {"deadline_at": deadline_at_s, "left_s": None}
            values["deadline_rosters"] = num_rosters
            connection.execute(update(schema.rounds).where(is_round(run_id, round_number)).values(values))

    def freeze(
        self, round_number: int, phase: str, *, quorum: int, now_s: float, others_wait: bool = False
    ) -> Roster | None:
        """See ``RoundWriter.freeze``."""
        run_id = self.lease.run_id
        with self._fenced() as connection:
            record = self._round(connection, round_number)
            roster = find_roster(connection, run_id, round_number, phase)
            if roster is not None or record.mark.is_final:
                return None if record.mark.is_final else roster
            devices = find_senders(connection, run_id, round_number, phase)
            if len(devices) < quorum:
                failure = lacks_messages(round_number, phase, len(devices), quorum, others_wait=others_wait)
                fail_round(connection, run_id, failure, now_s)
                return None
            return add_roster(connection, run_id, round_number, Roster(phase=phase, devices=devices))

    def close(
        self,
        round_number: int,
        *,
        cohort: CohortPlan,
        now_s: float,
        shortage: Shortage = UNKNOWN_SHORTAGE,
        charge: PrivacyCharge | None = None,
    ) -> RoundRecord:
        """See ``RoundWriter.close``."""
        run_id = self.lease.run_id
        with self._fenced() as connection:
            record = self._round(connection, round_number)
            if record.mark is not RoundMark.OPEN:
                return record
            table = schema.updates
            in_round = (table.c.run_id == run_id) & (table.c.round == round_number)
            devices = select(table.c.device_id).where(in_round).order_by(table.c.sequence)
            accepted = tuple(connection.execute(devices).scalars())
            event: RoundClosed | RoundFailed = round_closed(round_number, accepted)
            mark = RoundMark.CLOSED
            if len(accepted) < cohort.quorum:
                mark = RoundMark.FAILED
                event = failure_of(round_number, len(accepted), cohort, shortage)
            elif charge is not None and not add_charge(connection, run_id, round_number, charge, now_s):
                return record
            values = {"state": mark.value, "accepted": json.dumps(accepted)}
            connection.execute(update(schema.rounds).where(is_round(run_id, round_number)).values(values))
            add_event(connection, run_id, event, now_s)
        if charge is not None and mark is RoundMark.CLOSED:
            note_rows(self._engine)
        return replace(record, mark=mark, accepted=accepted)

    def publish(
        self,
        version: Version,
        event: VersionPublished,
        *,
        next_grid: Sequence[int],
        outer_state: OuterState,
        now_s: float,
    ) -> RoundRecord:
        """See ``RoundWriter.publish``."""
        with self._fenced() as connection:
            record = self._round(connection, event.round)
            if record.mark.is_final:
                return record
            add_version(connection, version, event, now_s)
            add_outer_state(connection, version.run_id, event.round, outer_state)
            connection.execute(
                update(schema.rounds)
                .where(is_round(version.run_id, event.round))
                .values(state=RoundMark.PUBLISHED.value, next_grid=json.dumps(list(next_grid)))
            )
            add_event(connection, version.run_id, event, now_s)
            erase_old_seeds(connection, version.run_id, event.round, now_s)
            return replace(record, mark=RoundMark.PUBLISHED, next_grid=tuple(next_grid))

    def fail(self, round_number: int, *, reason: str, now_s: float) -> RoundRecord:
        """See ``RoundWriter.fail``."""
        with self._fenced() as connection:
            record = self._round(connection, round_number)
            if record.mark.is_final:
                return record
            fail_round(connection, self.lease.run_id, RoundFailed(round=round_number, reason=reason), now_s)
            return replace(record, mark=RoundMark.FAILED)

    def keep_ranges(self, round_number: int, measured: MeasuredRanges) -> RoundRecord:
        """See ``RunWriter.keep_ranges``."""
        with self._fenced() as connection:
            record = self._round(connection, round_number)
            if record.mark is not RoundMark.CLOSED or record.measured is not None:
                return record
            values = {"measured": measured_text(measured)}
            connection.execute(update(schema.rounds).where(is_round(self.lease.run_id, round_number)).values(values))
            return replace(record, measured=measured)

    def rest(self, rested: RunRested, now_s: float, *, next_sequence: int) -> bool:
        """See ``RunWriter.rest``."""
        run_id = self.lease.run_id
        with self._fenced() as connection:
            if (
                run_state(connection, run_id) is not RunState.RUNNING
                or newest_sequence(connection, run_id) >= next_sequence
            ):
                return False
            set_run(connection, run_id, state=rested.state, reason=rested.reason)
            add_event(connection, run_id, rested, now_s)
            return True

    def warn(self, warnings: Sequence[RunWarned], now_s: float) -> None:
        """See ``RunWriter.warn``."""
        run_id, table = self.lease.run_id, schema.warnings
        recorded = select(table.c.code, table.c.subject).where(table.c.run_id == run_id)
        with self._fenced() as connection:
            known = {(row.code, row.subject) for row in connection.execute(recorded)}
            for warning in ended_warnings(warnings, known):
                add_event(connection, run_id, warning, now_s)
                known.remove((warning.code, warning.subject))
                ended = (table.c.code == warning.code) & (table.c.subject == warning.subject)
                connection.execute(delete(table).where((table.c.run_id == run_id) & ended))
            for warning in new_warnings(warnings, known):
                add_event(connection, run_id, warning, now_s)
                key = {"run_id": run_id, "code": warning.code, "subject": warning.subject}
                connection.execute(insert(table).values(**key, sequence=newest_sequence(connection, run_id)))

    def note(self, event: DevicesGone | RoundExtended | RoundLacks, now_s: float) -> None:
        """See ``RunWriter.note``."""
        with self._fenced() as connection:
            add_event(connection, self.lease.run_id, event, now_s)

    @contextmanager
    def _fenced(self) -> Iterator[Connection]:
        """A transaction of the lease's holder. Raises Superseded."""
        with writing(self._engine) as connection:
            _check(connection, self.lease)
            yield connection

    def _round(self, connection: Connection, round_number: int) -> RoundRecord:
        record = find_round(connection, self.lease.run_id, round_number)
        assert record is not None, "a driver closes, publishes and fails only recorded rounds"
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An Update to commit, the number of places of its Round, and the lease of its driver."""

    update: CommittedUpdate
    buffer: int
    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCandidate:
    """A message of a phase to record, and the lease of its driver."""

    message: RoundMessage
    lease: Lease


AnyCandidate = Candidate | MessageCandidate


def commit_all(engine: Engine, candidates: Sequence[AnyCandidate]) -> list[Verdict]:
    """Commit Updates and messages in one durable transaction: each if its Round is open and has a free place.

    Returns:
        The verdict on each Update. A driver that was superseded does not keep the Updates of others from their commit.
    """
    with writing(engine) as connection:
        return [_commit(connection, candidate) for candidate in candidates]


def find_lease(connection: Connection, run_id: str) -> Lease | None:
    """Return the newest lease of a Run within the caller's transaction, or None without one."""
    table = schema.leases
    row = connection.execute(select(table.c.epoch, table.c.holder).where(table.c.run_id == run_id)).first()
    return None if row is None else Lease(run_id=run_id, epoch=row.epoch, holder=row.holder)


def _check(connection: Connection, lease: Lease) -> None:
    newest = find_lease(connection, lease.run_id)
    assert newest is not None, "a lease is recorded when it is taken"
    check_lease(lease, newest)


def _commit(connection: Connection, candidate: AnyCandidate) -> Verdict:
    try:
        _check(connection, candidate.lease)
    except Superseded as exc:
        return exc
    if isinstance(candidate, MessageCandidate):
        return add_message(connection, candidate.lease.run_id, candidate.message)
    wanted = candidate.update
    header = wanted.header
    earlier = find_update(connection, header.run_id, header.round, wanted.device_id)
    if earlier is not None:
        return earlier
    state = connection.execute(select(schema.rounds.c.state).where(is_round(header.run_id, wanted.round))).scalar()
    if state != RoundMark.OPEN.value or not _has_place(connection, wanted, candidate.buffer):
        return None
    connection.execute(
        insert(schema.updates).values(
            run_id=header.run_id,
            round=wanted.round,
            made_for=header.round,
            device_id=wanted.device_id,
            header_proto=wanted.header_proto,
        )
    )
    return wanted


def _has_place(connection: Connection, wanted: CommittedUpdate, buffer: int) -> bool:
    table = schema.updates
    in_round = (table.c.run_id == wanted.header.run_id) & (table.c.round == wanted.round)
    count = select(func.count()).select_from(table).where(in_round)
    own = select(table.c.sequence).where(in_round, table.c.device_id == wanted.device_id)
    return connection.execute(count).scalar_one() < buffer and connection.execute(own).first() is None

"""Commands of operators: each is one transaction with the change, its events and the id of the command.

A repeated command changes nothing more, even if the Run has changed since. A refused command is not recorded.
"""

from collections.abc import Collection

from sqlalchemy import Connection, Engine, case, delete, insert, select, update

from fanin.edge.tensors import sha256_hex
from fanin.protos.messages import (
    Command,
    Reclaim,
    RoundFailed,
    RunRested,
    RunResumed,
    RunState,
    Version,
    VersionPublished,
)
from fanin.protos.wire import to_proto
from fanin.server.storage.decisions import (
    by_text,
    changes_on_pause,
    changes_on_resume,
    check_charged,
    check_next,
    check_not_restored,
    check_publication,
    check_same_command,
    marks_to_fail_on_stop,
    reclaimed_text,
)
from fanin.server.storage.records import Newest, RoundMark
from fanin.server.storage.retention import RemovedKind, check_has_parameters
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.engine import writing
from fanin.server.storage.sqlite.ledger.rows import find_uncharged
from fanin.server.storage.sqlite.ledger.seeds import leave_out
from fanin.server.storage.sqlite.rounds import fail_round
from fanin.server.storage.sqlite.runs import add_event, add_version, find_version, run_state, set_run
from fanin.v1 import control_pb2, fleet_pb2


class SqliteCommands:
    """The transactions of commands."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def is_done(self, command: Command) -> bool:
        """See ``CommandStore.is_done``."""
        with self._engine.connect() as connection:
            return _is_done(connection, command)

    def pause(self, command: Command, now_s: float) -> None:
        """See ``CommandStore.pause``."""
        with writing(self._engine) as connection:
            before = _begin(connection, command, now_s)
            if before is None or not changes_on_pause(command.run_id, before):
                return
            rested = RunRested(state=RunState.PAUSED, reason=by_text(command), by=command.by)
            set_run(connection, command.run_id, state=rested.state, reason=rested.reason)
            _halt_deadline(connection, command.run_id, now_s)
            add_event(connection, command.run_id, rested, now_s)

    def resume(self, command: Command, num_rounds: int, now_s: float) -> None:
        """See ``CommandStore.resume``."""
        with writing(self._engine) as connection:
            before = _begin(connection, command, now_s)
            _check_not_restored(connection, command.run_id)
            _check_charged(connection, command.run_id)
            if before is None or not changes_on_resume(command.run_id, before, num_rounds):
                return
            set_run(connection, command.run_id, state=RunState.RUNNING, more_rounds=num_rounds)
            _start_deadline(connection, command.run_id, now_s)
            add_event(connection, command.run_id, RunResumed(rounds=num_rounds, by=command.by), now_s)

    def stop(self, command: Command, now_s: float, *, is_stuck: bool = False) -> None:
        """See ``CommandStore.stop``."""
        with writing(self._engine) as connection:
            before = _begin(connection, command, now_s)
            if before is None:
                return
            marks = marks_to_fail_on_stop(command.run_id, before, is_stuck=is_stuck)
            _fail_rounds(connection, command.run_id, marks, f"stopped {by_text(command)}", now_s)
            if before is RunState.STOPPED:
                return
            rested = RunRested(state=RunState.STOPPED, reason=by_text(command), by=command.by)
            set_run(connection, command.run_id, state=rested.state, reason=rested.reason)
            add_event(connection, command.run_id, rested, now_s)

    def publish(self, run_id: str, newest: Newest, now_s: float, command: Command | None = None) -> None:
        """See ``CommandStore.publish``."""
        with writing(self._engine) as connection:
            if command is not None and _is_done(connection, command):
                return
            _check_not_restored(connection, run_id)
            if newest.event.adopted_run_id:
                check_adoptable(connection, newest.event.adopted_run_id, newest.event.adopted_number)
            _check_publication(connection, newest.version)
            if command is not None:
                _remember(connection, command, now_s)
            _fail_rounds(connection, run_id, (RoundMark.OPEN,), f"version {newest.version.number} was published", now_s)
            add_version(connection, newest.version, newest.event, now_s)
            if newest.event.rounds:
                set_run(connection, run_id, state=RunState.RUNNING, more_rounds=newest.event.rounds)
            add_event(connection, run_id, newest.event, now_s)

    def reclaim(self, reclaim: Reclaim, event: VersionPublished, now_s: float) -> None:
        """See ``CommandStore.reclaim``."""
        version, run_id = reclaim.version, reclaim.version.run_id
        with writing(self._engine) as connection:
            newest = _newest(connection, run_id)
            check_next(version, newest, newest.epoch + 1)
            reason = f"the publisher reclaimed the run with version {version.number}"
            _fail_rounds(connection, run_id, (RoundMark.OPEN, RoundMark.CLOSED), reason, now_s)
            check_adoptable(connection, event.adopted_run_id, event.adopted_number)
            add_version(connection, version, event, now_s)
            keys, runs = schema.run_keys, schema.runs
            connection.execute(delete(keys).where(keys.c.run_id == run_id, keys.c.epoch < version.epoch))
            was_restored = _restored_at(connection, run_id) is not None
            delegation = to_proto(reclaim.delegation, fleet_pb2.Delegation).SerializeToString()
            connection.execute(
                update(runs).where(runs.c.run_id == run_id).values(delegation_proto=delegation, restored_at=None)
            )
            if not was_restored:
                # A restore has marked the Run already, and it may be charged. Otherwise, somebody else with the Run's
                # key may have released what this ledger does not have.
                is_private = (runs.c.run_id == run_id) & runs.c.population.is_not(None)
                connection.execute(update(runs).where(is_private).values(uncharged_at=now_s))
            if reclaim.rounds:
                set_run(connection, run_id, state=RunState.RUNNING, more_rounds=reclaim.rounds)
            elif was_restored and run_state(connection, run_id) is RunState.PAUSED:
                set_run(connection, run_id, state=RunState.PAUSED, reason=reclaimed_text(run_id))
            add_event(connection, run_id, event, now_s)


def _newest(connection: Connection, run_id: str) -> Version:
    newest = find_version(connection, run_id)
    assert newest is not None, "a run has at least version 0"
    return newest


def _begin(connection: Connection, command: Command, now_s: float) -> RunState | None:
    """Record a command and return the Run's state, or None if the command was carried out before."""
    if _is_done(connection, command):
        return None
    _remember(connection, command, now_s)
    return run_state(connection, command.run_id)


def _is_done(connection: Connection, command: Command) -> bool:
    table = schema.commands
    query = select(table.c.command_sha256).where(table.c.command_id == command.command_id)
    return check_same_command(command.command_id, _digest(command), connection.execute(query).scalar())


def _remember(connection: Connection, command: Command, now_s: float) -> None:
    row = {
        "command_id": command.command_id,
        "command_sha256": _digest(command),
        "carried_out_at": now_s,
        "principal": None if command.by is None else str(command.by),
    }
    connection.execute(insert(schema.commands).values(row))


def _check_not_restored(connection: Connection, run_id: str) -> None:
    check_not_restored(run_id, _restored_at(connection, run_id))


def _restored_at(connection: Connection, run_id: str) -> float | None:
    table = schema.runs
    return connection.execute(select(table.c.restored_at).where(table.c.run_id == run_id)).scalar()


def _check_charged(connection: Connection, run_id: str) -> None:
    table = schema.runs
    name = connection.execute(select(table.c.population).where(table.c.run_id == run_id)).scalar()
    if name is not None:
        check_charged(run_id, name, find_uncharged(connection, name))


def _digest(command: Command) -> str:
    return sha256_hex(to_proto(command, control_pb2.CommandRequest).SerializeToString(deterministic=True))


def _check_publication(connection: Connection, version: Version) -> None:
    rounds, run_id = schema.rounds, version.run_id
    states = connection.execute(select(rounds.c.state).where(rounds.c.run_id == run_id).distinct()).scalars()
    marks = {RoundMark(state) for state in states}
    check_publication(version, _newest(connection, run_id), run_state(connection, run_id), marks)


def _fail_rounds(connection: Connection, run_id: str, marks: Collection[RoundMark], reason: str, now_s: float) -> None:
    table = schema.rounds
    query = select(table.c.round).where(table.c.run_id == run_id, table.c.state.in_([mark.value for mark in marks]))
    for number in connection.execute(query).scalars().all():
        fail_round(connection, run_id, RoundFailed(round=number, reason=reason), now_s)


def _halt_deadline(connection: Connection, run_id: str, now_s: float) -> None:
    table = schema.rounds
    left_s = table.c.deadline_at - now_s
    connection.execute(
        update(table)
        .where(table.c.run_id == run_id, table.c.state == RoundMark.OPEN.value, table.c.deadline_at.is_not(None))
        .values(left_s=case((left_s > 0.0, left_s), else_=0.0), deadline_at=None)
    )


def _start_deadline(connection: Connection, run_id: str, now_s: float) -> None:
    table = schema.rounds
    connection.execute(
        update(table)
        .where(table.c.run_id == run_id, table.c.state == RoundMark.OPEN.value, table.c.left_s.is_not(None))
        .values(deadline_at=table.c.left_s + now_s, left_s=None)
    )


def mark_restored(engine: Engine, reason: str, now_s: float) -> tuple[str, ...]:
    """Let every Run wait until its publisher reclaims it. Return their ids.

    Devices may have seen later Versions than this database has. An open Round fails, because its Updates may be lost.
    """
    runs, rounds = schema.runs, schema.rounds
    with writing(engine) as connection:
        run_ids = tuple(connection.execute(select(runs.c.run_id).order_by(runs.c.started_at, runs.c.run_id)).scalars())
        for run_id in run_ids:
            unfinished = rounds.c.state.in_([RoundMark.OPEN.value, RoundMark.CLOSED.value])
            query = select(rounds.c.round).where(rounds.c.run_id == run_id, unfinished)
            for number in connection.execute(query).scalars().all():
                fail_round(connection, run_id, RoundFailed(round=number, reason=reason), now_s)
            connection.execute(update(runs).where(runs.c.run_id == run_id).values(restored_at=now_s))
            is_private = (runs.c.run_id == run_id) & runs.c.population.is_not(None)
            connection.execute(update(runs).where(is_private).values(uncharged_at=now_s))
            state = run_state(connection, run_id)
            if state in (RunState.RUNNING, RunState.PAUSED):
                set_run(connection, run_id, state=RunState.PAUSED, reason=reason)
            if state is RunState.RUNNING:
                add_event(connection, run_id, RunRested(state=RunState.PAUSED, reason=reason), now_s)
    return run_ids


def leave_out_private(engine: Engine, now_s: float) -> None:
    """Leave the seeds of noise and the Updates of Runs with privacy out of a copy of the database for a backup.

    A Round of such a Run that is under way fails in the copy, because its Updates will be missing there. Its row of the
    ledger stays if it had closed.
    """
    with writing(engine) as connection:
        for run_id, number in leave_out(connection, now_s):
            reason = "a backup has no updates of a run with privacy"
            fail_round(connection, run_id, RoundFailed(round=number, reason=reason), now_s)


def check_adoptable(connection: Connection, run_id: str, number: int) -> None:
    """Raise Conflict if the parameters of a Version were removed, within the transaction that adopts it."""
    table = schema.removals
    query = select(table.c.removed_at).where(
        table.c.run_id == run_id, table.c.kind == RemovedKind.PARAMETERS.value, table.c.number == number
    )
    check_has_parameters(run_id, number, connection.execute(query).scalar())

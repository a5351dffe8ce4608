"""Commands of operators: each is one transaction with the change, its events and the id of the command.

A repeated command changes nothing more, even if the Run has changed since. A refused command is not recorded.
"""

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, case, func, insert, select, update

from fanin.edge.tensors import sha256_hex
from fanin.protos.control import (
    Command,
    RoundFailed,
    RunRested,
    RunResumed,
    RunState,
    VersionPublished,
)
from fanin.protos.convert_control import command_to_proto
from fanin.protos.errors import Conflict
from fanin.protos.messages import Version
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.rounds import RoundMark, fail_round
from fanin.server.storage.sqlite.runs import add_event, add_version, run_state, set_run


def by_text(command: Command) -> str:
    """Return who sent a command, for reasons that operators read."""
    return f"by {command.by}" if command.by is not None else "by an operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """A Version from outside that becomes the newest one. Its event has the number of Rounds to open from it."""

    version: Version
    event: VersionPublished


class ControlStore:
    """The transactions of commands."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def is_done(self, command: Command) -> bool:
        """Return whether a command was carried out before. Raises Conflict if another command used its id."""
        with self._engine.connect() as connection:
            return _is_done(connection, command)

    def pause(self, command: Command, now_s: float) -> None:
        """Pause a Run. Raises Conflict if it is neither running nor paused."""
        with self._engine.begin() as connection:
            before = _begin(connection, command, now_s)
            if before is None or before is RunState.PAUSED:
                return
            if before is not RunState.RUNNING:
                raise Conflict(f"run {command.run_id}: it is {before.value}, there is nothing to pause")
            rested = RunRested(state=RunState.PAUSED, reason=by_text(command), by=command.by)
            set_run(connection, command.run_id, state=rested.state, reason=rested.reason)
            _halt_deadline(connection, command.run_id, now_s)
            add_event(connection, command.run_id, rested, now_s)

    def resume(self, command: Command, num_rounds: int, now_s: float) -> None:
        """Resume a Run.

        Args:
            command: The command.
            num_rounds: Rounds to open from now on; 0 keeps the number that is left.
            now_s: Wall time, in seconds.

        Raises:
            Conflict: The Run is running and ``num_rounds`` is not 0, or it has ended and ``num_rounds`` is 0.
        """
        with self._engine.begin() as connection:
            before = _begin(connection, command, now_s)
            if before is None or (before is RunState.RUNNING and not num_rounds):
                return
            if before is RunState.RUNNING:
                raise Conflict(f"run {command.run_id}: it is running; pause it to give it another number of rounds")
            if before in (RunState.FINISHED, RunState.STOPPED) and not num_rounds:
                raise Conflict(f"run {command.run_id}: is {before.value}; pass --rounds N to continue it")
            set_run(connection, command.run_id, state=RunState.RUNNING, max_rounds=num_rounds)
            _start_deadline(connection, command.run_id, now_s)
            add_event(connection, command.run_id, RunResumed(rounds=num_rounds, by=command.by), now_s)

    def stop(self, command: Command, now_s: float, *, is_stuck: bool = False) -> None:
        """Stop a Run and fail its open Round.

        A closed Round still publishes its Version, unless the Run ``is_stuck``. Then the closed Round fails too, even
        if the Run was stopped before.

        Raises:
            Conflict: The Run has ended.
        """
        with self._engine.begin() as connection:
            before = _begin(connection, command, now_s)
            if before is None:
                return
            if not before.is_live and before is not RunState.STOPPED:
                raise Conflict(f"run {command.run_id}: it is {before.value}, there is nothing to stop")
            marks = (RoundMark.OPEN, RoundMark.CLOSED) if is_stuck else (RoundMark.OPEN,)
            _fail_rounds(connection, command.run_id, marks, f"stopped {by_text(command)}", now_s)
            if before is RunState.STOPPED:
                return
            rested = RunRested(state=RunState.STOPPED, reason=by_text(command), by=command.by)
            set_run(connection, command.run_id, state=rested.state, reason=rested.reason)
            add_event(connection, command.run_id, rested, now_s)

    def publish(self, run_id: str, newest: Newest, now_s: float, command: Command | None = None) -> None:
        """Add a Version from outside, and resume the Run if the event has a number of Rounds.

        A paused Round fails.

        Raises:
            Conflict: The Run is running, a Round is being folded, or the Version is not the next one.
        """
        with self._engine.begin() as connection:
            if command is not None and _is_done(connection, command):
                return
            if run_state(connection, run_id) is RunState.RUNNING:
                raise Conflict(f"run {run_id}: a round is open; publish when the run rests, or pause it")
            _check_next(connection, run_id, newest.version)
            if command is not None:
                _remember(connection, command, now_s)
            _fail_rounds(connection, run_id, (RoundMark.OPEN,), f"version {newest.version.number} was published", now_s)
            add_version(connection, newest.version, round_number=0)
            if newest.event.rounds:
                set_run(connection, run_id, state=RunState.RUNNING, max_rounds=newest.event.rounds)
            add_event(connection, run_id, newest.event, now_s)


def _begin(connection: Connection, command: Command, now_s: float) -> RunState | None:
    """Record a command and return the Run's state, or None if the command was carried out before."""
    if _is_done(connection, command):
        return None
    _remember(connection, command, now_s)
    return run_state(connection, command.run_id)


def _is_done(connection: Connection, command: Command) -> bool:
    table = schema.commands
    query = select(table.c.command_sha256).where(table.c.command_id == command.command_id)
    known = connection.execute(query).scalar()
    if known is not None and known != _digest(command):
        raise Conflict(f"command {command.command_id}: the id is taken by another command; choose another")
    return known is not None


def _remember(connection: Connection, command: Command, now_s: float) -> None:
    row = {
        "command_id": command.command_id,
        "command_sha256": _digest(command),
        "carried_out_at": now_s,
        "principal": None if command.by is None else str(command.by),
    }
    connection.execute(insert(schema.commands).values(row))


def _digest(command: Command) -> str:
    return sha256_hex(command_to_proto(command).SerializeToString(deterministic=True))


def _check_next(connection: Connection, run_id: str, version: Version) -> None:
    rounds, versions = schema.rounds, schema.versions
    folding = (rounds.c.run_id == run_id) & (rounds.c.state == RoundMark.CLOSED.value)
    if connection.execute(select(rounds.c.round).where(folding)).first() is not None:
        raise Conflict(f"run {run_id}: a round is being folded; publish again when its version is there")
    newest = connection.execute(select(func.max(versions.c.number)).where(versions.c.run_id == run_id)).scalar_one()
    if version.number != newest + 1:
        raise Conflict(f"run {run_id}: got version {version.number}, expected {newest + 1}; another one came first")


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

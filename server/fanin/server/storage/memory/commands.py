"""Commands of operators in memory."""

from collections.abc import Collection
from dataclasses import replace

from fanin.edge.tensors import sha256_hex
from fanin.protos.messages import (
    Command,
    Reclaim,
    RoundFailed,
    RunRested,
    RunResumed,
    RunState,
    VersionPublished,
)
from fanin.protos.plans import MAX_TIMES
from fanin.protos.wire import to_proto
from fanin.server.storage.decisions import (
    by_text,
    changes_on_pause,
    changes_on_resume,
    check_next,
    check_publication,
    check_same_command,
    left_until,
    marks_to_fail_on_stop,
)
from fanin.server.storage.memory.database import MemoryDatabase, RunRows
from fanin.server.storage.records import Newest, RoundMark
from fanin.v1 import control_pb2


class MemoryCommands:
    """``CommandStore`` in memory."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database

    async def is_done(self, command: Command) -> bool:
        """See ``CommandStore.is_done``."""
        return self._is_done(command)

    async def pause(self, command: Command, now_s: float) -> None:
        """See ``CommandStore.pause``."""
        rows = self._database.runs[command.run_id]
        if self._is_done(command):
            return
        changes = changes_on_pause(command.run_id, rows.record.state)
        self._remember(command)
        if changes:
            _halt_deadline(rows, now_s)
            rows.rest(RunRested(state=RunState.PAUSED, reason=by_text(command), by=command.by), now_s)

    async def resume(self, command: Command, num_rounds: int, now_s: float) -> None:
        """See ``CommandStore.resume``."""
        rows = self._database.runs[command.run_id]
        if self._is_done(command):
            return
        changes = changes_on_resume(command.run_id, rows.record.state, num_rounds)
        self._remember(command)
        if changes:
            _set_going(rows, num_rounds)
            _start_deadline(rows, now_s)
            rows.add_event(RunResumed(rounds=num_rounds, by=command.by), now_s)

    async def stop(self, command: Command, now_s: float, *, is_stuck: bool = False) -> None:
        """See ``CommandStore.stop``."""
        rows = self._database.runs[command.run_id]
        if self._is_done(command):
            return
        before = rows.record.state
        marks = marks_to_fail_on_stop(command.run_id, before, is_stuck=is_stuck)
        self._remember(command)
        _fail_rounds(rows, marks, f"stopped {by_text(command)}", now_s)
        if before is not RunState.STOPPED:
            rows.rest(RunRested(state=RunState.STOPPED, reason=by_text(command), by=command.by), now_s)

    async def publish(self, run_id: str, newest: Newest, now_s: float, command: Command | None = None) -> None:
        """See ``CommandStore.publish``."""
        rows, version = self._database.runs[run_id], newest.version
        if command is not None and self._is_done(command):
            return
        marks = {record.mark for record in rows.rounds.values()}
        if newest.event.adopted_run_id:
            self._database.runs[newest.event.adopted_run_id].check_adoptable(newest.event.adopted_number)
        check_publication(version, rows.newest, rows.record.state, marks)
        if command is not None:
            self._remember(command)
        _fail_rounds(rows, (RoundMark.OPEN,), f"version {version.number} was published", now_s)
        rows.add_version(version, newest.event, now_s)
        if newest.event.rounds:
            _set_going(rows, newest.event.rounds)
        rows.add_event(newest.event, now_s)

    async def reclaim(self, reclaim: Reclaim, event: VersionPublished, now_s: float) -> None:
        """See ``CommandStore.reclaim``."""
        version = reclaim.version
        rows, keys = self._database.runs[version.run_id], self._database.run_keys
        check_next(version, rows.newest, rows.newest.epoch + 1)
        rows.check_adoptable(event.adopted_number)
        reason = f"the publisher reclaimed the run with version {version.number}"
        _fail_rounds(rows, (RoundMark.OPEN, RoundMark.CLOSED), reason, now_s)
        rows.add_version(version, event, now_s)
        for run_id, epoch in tuple(keys):
            if run_id == version.run_id and epoch < version.epoch:
                del keys[run_id, epoch]
        rows.record = replace(rows.record, reclaimed=reclaim.delegation)
        if rows.record.start.plan.privacy:
            self._database.uncharged.add(version.run_id)
        if reclaim.rounds:
            _set_going(rows, reclaim.rounds)
        rows.add_event(event, now_s)

    def _is_done(self, command: Command) -> bool:
        known = self._database.commands.get(command.command_id)
        return check_same_command(command.command_id, _digest(command), known)

    def _remember(self, command: Command) -> None:
        self._database.commands[command.command_id] = _digest(command)


def _digest(command: Command) -> str:
    return sha256_hex(to_proto(command, control_pb2.CommandRequest).SerializeToString(deterministic=True))


def _set_going(rows: RunRows, num_rounds: int) -> None:
    max_rounds = rows.record.max_rounds
    if num_rounds:
        max_rounds = min(rows.num_published + num_rounds, MAX_TIMES)
    rows.record = replace(rows.record, state=RunState.RUNNING, reason="", max_rounds=max_rounds)


def _fail_rounds(rows: RunRows, marks: Collection[RoundMark], reason: str, now_s: float) -> None:
    for record in tuple(rows.rounds.values()):
        if record.mark in marks:
            rows.fail_round(RoundFailed(round=record.round, reason=reason), now_s)


def _halt_deadline(rows: RunRows, now_s: float) -> None:
    for number, record in rows.rounds.items():
        if record.mark is RoundMark.OPEN and record.deadline_at_s is not None:
            rows.rounds[number] = replace(record, deadline_at_s=None, left_s=left_until(record.deadline_at_s, now_s))


def _start_deadline(rows: RunRows, now_s: float) -> None:
    for number, record in rows.rounds.items():
        if record.mark is RoundMark.OPEN and record.left_s is not None:
            rows.rounds[number] = replace(record, deadline_at_s=record.left_s + now_s, left_s=None)

"""A Run with an open Round in a store, and reads and writes of its record."""

from sqlalchemy import Engine

from fanin.protos import messages as m
from fanin.protos.plans import CohortPlan
from fanin.server.storage.records import CommittedUpdate, RoundMark, RoundRecord, recorded_header
from fanin.server.storage.sqlite.rounds import SqliteRounds
from fanin.server.storage.sqlite.runs import SqliteRuns
from fanin.server.storage.sqlite.writer import Candidate, SqliteLeases, SqliteWriter, Verdict, commit_all
from support.values import DELEGATION, RUN, assignment, plan, update, version

FIRST = version()
START = m.StartRun(run_id=RUN, plan=plan(buffer=2), version=FIRST, delegation=DELEGATION)
OPEN = RoundRecord(run_id=RUN, round=1, base_version=0, grid=(-30, -28), mark=RoundMark.OPEN, opened_at_s=10.0)


def committed_update(device: str, examples: int = 10) -> CommittedUpdate:
    header, _ = update(assignment(device=device), examples=examples)
    return CommittedUpdate(device_id=device, round=header.round, header=header, header_proto=recorded_header(header))


class Driven(SqliteRounds, SqliteWriter):
    """The store of a driver: its reads and writes."""

    def __init__(self, engine: Engine, run_id: str = RUN) -> None:
        SqliteRounds.__init__(self, engine)
        SqliteWriter.__init__(self, engine, SqliteLeases(engine).take(run_id, "here", 1.0))

    def commit(self, candidate: CommittedUpdate, buffer: int) -> Verdict:
        """Commit one Update in its own transaction."""
        (verdict,) = commit_all(self._engine, [Candidate(update=candidate, buffer=buffer, lease=self.lease)])
        return verdict


def commit(rounds: Driven, candidate: CommittedUpdate, buffer: int) -> Verdict:
    """Commit one Update in its own transaction."""
    return rounds.commit(candidate, buffer)


def events(engine: Engine) -> list[tuple[int, m.RunEvent]]:
    return [(entry.sequence, entry.event) for entry in SqliteRuns(engine).events(RUN)]


def close(rounds: Driven, *, quorum: int, round_number: int = 1) -> RoundRecord:
    """Close a Round with this quorum."""
    cohort = CohortPlan(concurrency=9, buffer=9, quorum=quorum, deadline_s=60.0)
    return rounds.close(round_number, cohort=cohort, now_s=20.0)


def published_event(number: int) -> m.VersionPublished:
    return m.VersionPublished(number=number, version_sha256=FIRST.sha256, parent=number - 1, round=number)

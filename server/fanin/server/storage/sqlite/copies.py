"""What a copy of the database names, and the marks of a restored one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlalchemy import Engine, select, update

from fanin.edge.bundles.manifest_json import parse_manifest
from fanin.protos.chunks import Artifact
from fanin.protos.messages import RoundFailed, RunRested, RunState
from fanin.server.storage.records import RoundMark
from fanin.server.storage.retention import RemovedKind
from fanin.server.storage.spool import payload_name
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.engine import writing
from fanin.server.storage.sqlite.rounds import SqliteRounds, fail_round
from fanin.server.storage.sqlite.runs import SqliteRuns, add_event, run_state, set_run


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file that a database names.

    Attributes:
        path: Its path in the folder of the coordinator.
        sha256: The digest of its content.
        size_bytes: Its size.
    """

    path: str
    sha256: str
    size_bytes: int


def named_files(engine: Engine, read: Callable[[Artifact], bytes]) -> Iterator[StoredFile]:
    """Yield every file that a database names, Chunks first. ``read`` returns the manifest of a Bundle.

    Raises:
        Corrupted: A record is damaged.
    """
    runs, rounds = SqliteRuns(engine), SqliteRounds(engine)
    known: set[str] = set()
    for artifact in _artifacts(runs, read):
        for ref in artifact.chunks:
            if ref.sha256 not in known:
                known.add(ref.sha256)
                path = f"blobs/{ref.sha256[:2]}/{ref.sha256}"
                yield StoredFile(path=path, sha256=ref.sha256, size_bytes=ref.size_bytes)
    for run_id, number in _stored_rounds(engine):
        for each in rounds.updates(run_id, number):
            payload = each.header.payload
            path = f"updates/{payload_name(each.header, each.device_id)}"
            yield StoredFile(path=path, sha256=payload.sha256, size_bytes=payload.size_bytes)


def _artifacts(runs: SqliteRuns, read: Callable[[Artifact], bytes]) -> Iterator[Artifact]:
    for bundle in runs.bundles():
        yield bundle.manifest
        yield from parse_manifest(read(bundle.manifest)).artifacts.values()
    sequence: int | None = 0
    while sequence is not None:
        page, sequence = runs.artifact_page(sequence)
        yield from page


def _stored_rounds(engine: Engine) -> list[tuple[str, int]]:
    """Return the Rounds whose Updates are stored: neither failed, nor removed by retention."""
    rounds, removals = schema.rounds, schema.removals
    failed = rounds.c.state == RoundMark.FAILED.value
    gone = select(removals.c.run_id, removals.c.number).where(removals.c.kind == RemovedKind.UPDATES.value)
    with engine.connect() as connection:
        removed = {(run_id, number) for run_id, number in connection.execute(gone)}
        stored = connection.execute(select(rounds.c.run_id, rounds.c.round).where(~failed)).all()
    return [(run_id, number) for run_id, number in stored if (run_id, number) not in removed]


def mark_restored(engine: Engine, reason: str, now_s: float) -> tuple[str, ...]:
    """Let every Run wait until its publisher reclaims it. Return their ids.

    Devices may have seen later Versions than this database has. An open Round fails, because its Updates may be lost.
    """
    runs, rounds = schema.runs, schema.rounds
    with writing(engine) as connection:
        run_ids = tuple(connection.execute(select(runs.c.run_id).order_by(runs.c.started_at, runs.c.run_id)).scalars())
        for run_id in run_ids:
            text = reason.replace("RUN", run_id)
            unfinished = rounds.c.state.in_([RoundMark.OPEN.value, RoundMark.CLOSED.value])
            query = select(rounds.c.round).where(rounds.c.run_id == run_id, unfinished)
            for number in connection.execute(query).scalars().all():
                fail_round(connection, run_id, RoundFailed(round=number, reason=text), now_s)
            connection.execute(update(runs).where(runs.c.run_id == run_id).values(restored_at=now_s))
            if run_state(connection, run_id) is RunState.RUNNING:
                set_run(connection, run_id, state=RunState.PAUSED, reason=text)
                add_event(connection, run_id, RunRested(state=RunState.PAUSED, reason=text), now_s)
    return run_ids

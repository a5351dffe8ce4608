"""The store: the decisions of the database, and their durability after it is reopened."""

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import BigInteger, Engine, Integer, create_engine, text
from sqlalchemy.dialects import postgresql
from support.errors import raises
from support.stored import FIRST, OPEN, START, Driven, close, commit, committed_update, events, published_event
from support.values import BUNDLE, RUN, version

from fanin.protos import messages as m
from fanin.protos.errors import Conflict, Corrupted, StorageFull
from fanin.protos.messages import NewToken, Role
from fanin.protos.wire import to_proto
from fanin.server.storage.disk import Durability
from fanin.server.storage.records import (
    EnrolledDevice,
    Newest,
    RoundMark,
    RoundRecord,
    RunRecord,
)
from fanin.server.storage.sqlite import engine as engine_module
from fanin.server.storage.sqlite.commands import SqliteCommands
from fanin.server.storage.sqlite.devices import SqliteDevices
from fanin.server.storage.sqlite.engine import migrate, open_engine
from fanin.server.storage.sqlite.rounds import SqliteRounds
from fanin.server.storage.sqlite.runs import SqliteRuns
from fanin.server.storage.sqlite.schema import METADATA
from fanin.v1 import fleet_pb2

TOKEN = NewToken(name="a", role=Role.DEVICE, sha256="a" * 64)
MIGRATIONS = Path(engine_module.__file__).parent / "migrations"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    db_engine = open_engine(tmp_path / "fanin.db", Durability.PROCESS)
    yield db_engine
    db_engine.dispose()


@pytest.fixture
def rounds(engine: Engine) -> Driven:
    """The store of a started Run with an open Round."""
    SqliteRuns(engine).add_run(START, 5.0)
    store = Driven(engine)
    store.open(OPEN)
    return store


def test_the_schema_equals_the_result_of_the_migrations(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, METADATA) == []


def test_numbers_have_64_bits() -> None:
    columns = [column for table in METADATA.tables.values() for column in table.columns]
    numbers = {str(column): column.type for column in columns if isinstance(column.type, (Integer, BigInteger))}
    assert len(numbers) > 10
    narrow = [name for name, kind in numbers.items() if kind.compile(dialect=postgresql.dialect()) != "BIGINT"]
    assert narrow == []


def test_the_last_round_of_a_device_is_read_from_an_index(engine: Engine) -> None:
    query = "SELECT max(round) FROM updates WHERE run_id = 'run' AND device_id = 'a'"
    with engine.connect() as connection:
        steps = [row.detail for row in connection.execute(text(f"EXPLAIN QUERY PLAN {query}"))]
    assert steps == ["SEARCH updates USING COVERING INDEX updates_of_device (run_id=? AND device_id=?)"]


def test_the_migration_widens_the_numbers_of_other_databases() -> None:
    """SQLite's integers have always had 64 bits."""
    statements = io.StringIO()
    options = {"as_sql": True, "output_buffer": statements}
    context = MigrationContext.configure(dialect_name="postgresql", opts=options)
    script = ScriptDirectory(str(MIGRATIONS))
    with Operations.context(context):
        script.get_revision("0004").module.upgrade()
    columns = re.findall(r"ALTER TABLE (\w+) ALTER COLUMN (\w+) TYPE BIGINT", statements.getvalue())
    assert [f"{table}.{column}" for table, column in columns] == [
        *("runs.max_rounds", "versions.number", "versions.round", "rounds.round", "rounds.base_version"),
        *("outer_states.round", "updates.sequence", "updates.round", "updates.made_for"),
    ]


@pytest.mark.parametrize(("durability", "synchronous"), [(Durability.HOST, 2), (Durability.PROCESS, 1)])
def test_with_host_durability_every_commit_is_synced(tmp_path: Path, durability: Durability, synchronous: int) -> None:
    db_engine = open_engine(tmp_path / "fanin.db", durability)
    with db_engine.connect() as connection:
        assert connection.execute(text("PRAGMA synchronous")).scalar() == synchronous
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1
    db_engine.dispose()


def test_a_database_that_cannot_grow_raises_an_error_and_continues_later(engine: Engine, rounds: Driven) -> None:
    with engine.connect() as connection:
        pages = connection.execute(text("PRAGMA page_count")).scalar_one()
        connection.execute(text(f"PRAGMA max_page_count = {pages}"))
    with pytest.raises(StorageFull, match="FN-0014"):
        for index in range(1000):
            commit(rounds, committed_update(f"device-{index}"), 1000)
    num_updates = len(rounds.updates(RUN, 1))
    assert num_updates < 1000
    with engine.connect() as connection:
        connection.execute(text("PRAGMA max_page_count = 1000000"))
    assert commit(rounds, committed_update("later"), 1000)
    assert len(rounds.updates(RUN, 1)) == num_updates + 1


def test_a_device_has_one_update_in_a_round(rounds: Driven) -> None:
    first = committed_update("a", examples=10)
    assert commit(rounds, committed_update("a", examples=10), 2) == first
    # The commit returns the recorded Update, so the caller knows that the new one did not replace it.
    assert commit(rounds, committed_update("a", examples=99), 2) == first
    assert rounds.updates(RUN, 1) == (committed_update("a", examples=10),)


@pytest.mark.parametrize("numbers", ["round, made_for + 1", "round + 1, made_for"])
def test_the_database_itself_refuses_a_second_update(engine: Engine, rounds: Driven, numbers: str) -> None:
    """The database allows one Update of a device in a Round, and one for an Assignment."""
    commit(rounds, committed_update("a"), 2)
    close(rounds, quorum=1)
    rounds.publish(version(parent=FIRST), published_event(1), next_grid=(1, 2), outer_state={}, now_s=30.0)
    assert rounds.open(replace(OPEN, round=2, base_version=1))
    statement = (
        "INSERT INTO updates (run_id, round, made_for, device_id, header_proto) "
        f"SELECT run_id, {numbers}, device_id, '' FROM updates"
    )
    with pytest.raises(Conflict, match="UNIQUE"), engine.begin() as connection:
        connection.execute(text(statement))


def test_an_update_for_an_earlier_round_is_returned_by_either_round(rounds: Driven) -> None:
    commit(rounds, committed_update("a"), 1)
    close(rounds, quorum=1)
    rounds.publish(version(parent=FIRST), published_event(1), next_grid=(1, 2), outer_state={}, now_s=30.0)
    rounds.open(replace(OPEN, round=2, base_version=1))
    late = replace(committed_update("b"), round=2)
    assert commit(rounds, late, 2) == late
    assert rounds.updates(RUN, 2) == (late,)
    assert rounds.headers_made_for(RUN, 1) == {"a": committed_update("a").header, "b": late.header}
    assert rounds.update(RUN, 1, "b") == late
    # An Update that a later Round counts is already recorded for its Assignment.
    assert commit(rounds, committed_update("b"), 2) == late
    assert [record.round for record in rounds.since(RUN, 1)] == [2]


def test_an_older_database_is_migrated_to_the_newest_form(tmp_path: Path) -> None:
    older = create_engine(f"sqlite:///{tmp_path / 'fanin.db'}")
    header = committed_update("a").header
    row = {"header": to_proto(header, fleet_pb2.UpdateHeader).SerializeToString()}
    with older.connect() as connection:
        migrate(connection, "0001")
        rounds = "INSERT INTO rounds (run_id, round, base_version, grid, state, opened_at) VALUES"
        connection.execute(text(f"{rounds} ('run', 1, 0, '[]', 'open', 1.0)"))
        updates = "INSERT INTO updates (run_id, round, device_id, header_proto) VALUES"
        connection.execute(text(f"{updates} ('run', 1, 'a', :header)"), row)
        connection.execute(text("INSERT INTO run_keys VALUES ('run', x'6b6579')"))
        connection.commit()
    older.dispose()
    with pytest.raises(Corrupted, match="FN-0506"):
        open_engine(tmp_path / "fanin.db", Durability.PROCESS, upgrade=False)
    engine = open_engine(tmp_path / "fanin.db", Durability.PROCESS)
    assert SqliteRounds(engine).headers_made_for(RUN, 1) == {"a": header}
    assert SqliteRuns(engine).run_key(RUN, 1, b"new", 1.0) == b"key"
    engine.dispose()


def test_never_more_updates_than_the_buffer(rounds: Driven) -> None:
    verdicts = [commit(rounds, committed_update(device), 2) is not None for device in "abc"]
    assert verdicts == [True, True, False]
    assert [record.device_id for record in rounds.updates(RUN, 1)] == ["a", "b"]
    # A recorded Update stays accepted, although the buffer is full.
    assert commit(rounds, committed_update("b"), 2)


def test_an_update_for_an_unknown_round_is_not_accepted(rounds: Driven) -> None:
    assert not commit(rounds, replace(committed_update("a"), round=7), 2)


def test_a_closed_round_accepts_no_more_and_keeps_its_first_set(engine: Engine, rounds: Driven) -> None:
    for device in "ba":
        commit(rounds, committed_update(device), 9)
    assert close(rounds, quorum=2).accepted == ("b", "a")
    assert not commit(rounds, committed_update("c"), 9)
    assert commit(rounds, committed_update("a"), 9)
    assert close(rounds, quorum=9).accepted == ("b", "a")
    (record,) = rounds.rounds(RUN)
    assert (record.mark, record.accepted) == (RoundMark.CLOSED, ("b", "a"))
    assert [event for _, event in events(engine) if isinstance(event, m.RoundClosed)] == [m.round_closed(1, ("b", "a"))]


def test_without_a_quorum_the_round_fails_and_accepts_no_more(engine: Engine, rounds: Driven) -> None:
    commit(rounds, committed_update("b"), 9)
    for quorum in (2, 1):
        # A repeated call does not change the recorded result.
        assert close(rounds, quorum=quorum).mark is RoundMark.FAILED
    assert not commit(rounds, committed_update("a"), 9)
    assert rounds.rounds(RUN)[0].mark is RoundMark.FAILED
    failure = m.RoundFailed(round=1, reason="1 update within 60 s, expected at least 2 (cohort.quorum)")
    assert [event for _, event in events(engine) if isinstance(event, m.RoundFailed)] == [failure]


def test_counts_and_the_newest_round_are_read_without_the_other_rounds(rounds: Driven) -> None:
    assert (rounds.last(RUN), rounds.last("other")) == (OPEN, None)
    commit(rounds, committed_update("a"), 9)
    assert [rounds.update(RUN, 1, device) for device in "ab"] == [committed_update("a"), None]
    close(rounds, quorum=1)
    assert rounds.num_published(RUN) == 0
    rounds.publish(version(parent=FIRST), published_event(1), next_grid=(), outer_state={}, now_s=30.0)
    assert rounds.num_published(RUN) == 1


def test_a_deadline_that_is_recorded_while_the_run_is_paused_is_suspended(engine: Engine, rounds: Driven) -> None:
    rounds.set_deadline(1, 70.0, 10.0)
    assert (rounds.rounds(RUN)[0].deadline_at_s, rounds.rounds(RUN)[0].left_s) == (70.0, None)
    rounds.set_deadline(1, 80.0, 10.0)
    assert rounds.rounds(RUN)[0].deadline_at_s == 80.0
    SqliteCommands(engine).pause(m.Command(command_id="1", run_id=RUN, what=m.Pause()), 50.0)
    assert (rounds.rounds(RUN)[0].deadline_at_s, rounds.rounds(RUN)[0].left_s) == (None, 30.0)
    rounds.set_deadline(1, 90.0, 50.0)
    assert (rounds.rounds(RUN)[0].deadline_at_s, rounds.rounds(RUN)[0].left_s) == (None, 40.0)
    SqliteCommands(engine).resume(m.Command(command_id="2", run_id=RUN, what=m.Resume()), 0, 1000.0)
    assert (rounds.rounds(RUN)[0].deadline_at_s, rounds.rounds(RUN)[0].left_s) == (1040.0, None)


def test_a_round_is_published_with_its_version_or_not_at_all(engine: Engine, rounds: Driven) -> None:
    commit(rounds, committed_update("a"), 2)
    close(rounds, quorum=1)
    second = version(parent=FIRST)
    rounds.publish(second, published_event(1), next_grid=(-20, -21), outer_state={}, now_s=30.0)
    before = (rounds.rounds(RUN), events(engine))
    assert before[0][0].mark is RoundMark.PUBLISHED
    assert before[0][0].next_grid == (-20, -21)
    assert SqliteRuns(engine).version(RUN) == SqliteRuns(engine).version(RUN, 1) == second
    # The number is taken: neither the Round's row nor the events change.
    rounds.open(replace(OPEN, round=2, base_version=1))
    before = (rounds.rounds(RUN), events(engine))
    with raises(
        Conflict,
        "the record already has this entry (UNIQUE constraint failed: versions.run_id, versions.number); read the "
        "state again, then decide",
    ):
        rounds.publish(second, published_event(2), next_grid=(0, 0), outer_state={}, now_s=40.0)
    assert (rounds.rounds(RUN), events(engine)) == before


def test_events_are_numbered_from_1_without_gaps_in_each_run(engine: Engine, rounds: Driven) -> None:
    runs = SqliteRuns(engine)
    other = replace(START, run_id="other", version=replace(FIRST, run_id="other"))
    runs.add_run(other, 6.0)
    Driven(engine, "other").open(replace(OPEN, run_id="other"))
    commit(rounds, committed_update("a"), 2)
    close(rounds, quorum=1)
    rounds.publish(version(parent=FIRST), published_event(1), next_grid=(), outer_state={}, now_s=30.0)
    rounds.open(replace(OPEN, round=2, base_version=1))
    close(rounds, quorum=1, round_number=2)
    rounds.rest(m.RunRested(state=m.RunState.FAILED, reason="nobody came"), 50.0, next_sequence=99)
    assert events(engine) == [
        (1, m.RoundOpened(round=1, base_version=0)),
        (2, m.round_closed(1, ("a",))),
        (3, published_event(1)),
        (4, m.RoundOpened(round=2, base_version=1)),
        (5, m.RoundFailed(round=2, reason="0 updates within 60 s, expected at least 1 (cohort.quorum)")),
        (6, m.RunRested(state=m.RunState.FAILED, reason="nobody came")),
    ]
    assert [entry.sequence for entry in runs.event_page(RUN, 5)] == [5, 6]
    assert [entry.sequence for entry in runs.events("other")] == [1]


def test_a_runs_key_is_created_once(engine: Engine) -> None:
    store = SqliteRuns(engine)
    assert store.run_key(RUN, 1, b"first", 1.0) == b"first"
    assert store.run_key(RUN, 1, b"second", 2.0) == b"first"
    assert store.run_key("other", 1, b"third", 3.0) == b"third"


def test_bundles_and_versions_are_read_by_their_names(engine: Engine) -> None:
    store = SqliteRuns(engine)
    store.add_bundle(BUNDLE)
    store.add_bundle(BUNDLE)
    assert store.bundle(BUNDLE.manifest.sha256) == BUNDLE
    assert store.bundle("0" * 64) is None
    assert store.version(RUN) is None
    assert store.run(RUN) is None


def test_an_external_version_restarts_a_run(engine: Engine, rounds: Driven) -> None:
    runs, control = SqliteRuns(engine), SqliteCommands(engine)
    close(rounds, quorum=1)
    rounds.rest(m.RunRested(state=m.RunState.FINISHED, reason="done"), 20.0, next_sequence=99)
    rested = RunRecord(start=START, state=m.RunState.FINISHED, reason="done", max_rounds=3, started_at_s=5.0)
    assert runs.run(RUN) == rested
    second = version(parent=FIRST)
    control.publish(RUN, Newest(version=second, event=replace(published_event(1), round=0)), 30.0)
    assert runs.run_state(RUN) is m.RunState.FINISHED
    third = Newest(version=version(parent=second), event=replace(published_event(2), round=0, rounds=5))
    control.publish(RUN, third, 40.0)
    assert runs.run(RUN) == RunRecord(start=START, state=m.RunState.RUNNING, reason="", max_rounds=5, started_at_s=5.0)
    rounds.rest(m.RunRested(state=m.RunState.FINISHED, reason="done"), 50.0, next_sequence=99)
    with raises(Conflict, "run run: got version 2 made from 1, expected 3 made from 2"):
        control.publish(RUN, third, 60.0)


def test_no_version_is_published_while_a_set_is_being_folded(engine: Engine, rounds: Driven) -> None:
    commit(rounds, committed_update("a"), 2)
    close(rounds, quorum=1)
    rounds.rest(m.RunRested(state=m.RunState.PAUSED, reason="paused"), 20.0, next_sequence=99)
    newest = Newest(version=version(parent=FIRST), event=replace(published_event(1), round=0))
    with raises(Conflict, "run run: a round is being folded; publish again when its version is there"):
        SqliteCommands(engine).publish(RUN, newest, 30.0)


def test_no_round_is_opened_in_a_run_that_rests_and_no_rest_overwrites_another(engine: Engine) -> None:
    runs = SqliteRuns(engine)
    runs.add_run(START, 5.0)
    driver = Driven(engine)
    driver.rest(m.RunRested(state=m.RunState.PAUSED, reason="first"), 20.0, next_sequence=99)
    driver.rest(m.RunRested(state=m.RunState.FINISHED, reason="second"), 30.0, next_sequence=99)
    record = runs.run(RUN)
    assert record is not None and (record.state, record.reason) == (m.RunState.PAUSED, "first")
    second = RoundRecord(run_id=RUN, round=2, base_version=0, grid=(1,), mark=RoundMark.OPEN, opened_at_s=30.0)
    assert not driver.open(second)
    assert [record.round for record in driver.rounds(RUN)] == []


def test_devices_and_tokens(engine: Engine) -> None:
    store = SqliteDevices(engine)
    device = EnrolledDevice(public_key="ab" * 32)
    store.enroll([device], 1.0)
    store.enroll([device], 2.0)
    assert (store.find(device.device_id), store.find("e"), store.num_devices) == (device, None, 1)
    store.add_token(TOKEN, 1.0)
    assert store.find_token(TOKEN.sha256) is not None
    assert store.find_token("b" * 64) is None


def test_everything_survives_reopening(tmp_path: Path, engine: Engine, rounds: Driven) -> None:
    runs, devices = SqliteRuns(engine), SqliteDevices(engine)
    runs.add_bundle(BUNDLE)
    runs.run_key("other", 1, b"first", 1.0)
    rounds.set_deadline(1, 70.0, 10.0)
    commit(rounds, committed_update("a"), 2)
    close(rounds, quorum=1)
    rounds.publish(version(parent=FIRST), published_event(1), next_grid=(1, 2), outer_state={}, now_s=30.0)
    device = EnrolledDevice(public_key="ab" * 32)
    devices.enroll([device], 1.0)

    def facts(db_engine: Engine) -> list[object]:
        run_store, round_store = SqliteRuns(db_engine), SqliteRounds(db_engine)
        return [
            run_store.run_ids(),
            run_store.run(RUN),
            run_store.bundle(BUNDLE.manifest.sha256),
            run_store.run_key("other", 1, b"second", 2.0),
            run_store.version(RUN, 0),
            run_store.version(RUN),
            tuple(run_store.events(RUN)),
            round_store.rounds(RUN),
            round_store.updates(RUN, 1),
            SqliteDevices(db_engine).find(device.device_id),
        ]

    before = facts(engine)
    engine.dispose()
    reopened = open_engine(tmp_path / "fanin.db", Durability.HOST)
    assert facts(reopened) == before
    reopened.dispose()

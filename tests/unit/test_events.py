"""The events of a Run: read page by page, each small enough for one message. The record is complete."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from support.stored import Driven
from support.values import DELEGATION, RUN, plan, version

from fanin.protos import messages as m
from fanin.server.storage.disk import Durability
from fanin.server.storage.protocols.runs import PAGE_EVENTS
from fanin.server.storage.records import RoundMark, RoundRecord
from fanin.server.storage.sqlite.engine import open_engine
from fanin.server.storage.sqlite.rounds import SqliteRounds
from fanin.server.storage.sqlite.runs import SqliteRuns, add_event


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A database with a Run and its open Round."""
    engine = open_engine(tmp_path / "fanin.db", Durability.PROCESS)
    start = m.StartRun(run_id=RUN, plan=plan(), version=version(), delegation=DELEGATION)
    SqliteRuns(engine).add_run(start, 5.0)
    record = RoundRecord(run_id=RUN, round=1, base_version=0, grid=(1,), mark=RoundMark.OPEN, opened_at_s=30.0)
    assert Driven(engine).open(record)
    yield engine
    engine.dispose()


def test_events_are_read_page_by_page_in_their_order(engine: Engine) -> None:
    store = SqliteRuns(engine)
    num_events = 2 * PAGE_EVENTS + 3
    with engine.begin() as connection:
        for number in range(num_events):
            add_event(connection, RUN, m.RoundOpened(round=number, base_version=0), 1.0)
    records = list(store.events(RUN))
    assert [record.event.round for record in records[-num_events:]] == list(range(num_events))
    assert [record.sequence for record in records] == list(range(1, len(records) + 1))
    assert len(store.event_page(RUN, 1)) == PAGE_EVENTS
    assert store.event_page(RUN, 2) == tuple(records[1 : 1 + PAGE_EVENTS])
    assert store.event_page(RUN, records[-1].sequence + 1) == ()


def test_a_round_of_many_devices_is_recorded_in_full_and_its_event_fits_a_message(
    engine: Engine,
) -> None:
    devices = [f"{number:032x}" for number in range(120_000)]
    with engine.begin() as connection:
        connection.execute(text("UPDATE rounds SET accepted = :all"), {"all": json.dumps(devices)})
        add_event(connection, RUN, m.round_closed(1, devices), 1.0)
        largest = connection.execute(text("SELECT max(length(event_proto)) FROM events")).scalar_one()
    assert largest < 50_000
    rounds = SqliteRounds(engine)
    event = list(SqliteRuns(engine).events(RUN))[-1].event
    assert (event.num_accepted, event.accepted) == (120_000, tuple(devices[: m.MAX_LISTED_DEVICES]))
    device_ids: list[str] = []
    while page := rounds.accepted_devices(RUN, 1, len(device_ids)).device_ids:
        assert len(page) <= m.MAX_PAGE_DEVICES
        device_ids += page
    assert device_ids == devices
    assert rounds.accepted_devices(RUN, 9, 0) is None

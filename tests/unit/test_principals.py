"""Principals of commands: the record, the events and the description of a Run name the sender of each command."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from sqlalchemy import Engine, create_engine, text
from support.errors import raises
from support.staleness import settle
from support.stored import START
from support.virtual import PUBLISHER, Place, bundle_in, open_place, plan, start
from support.wire_laws import values

from fanin.clients.versions import next_version
from fanin.edge.bundles.versions import sign_delegation, sign_version
from fanin.protos.errors import Corrupted, InvalidInput
from fanin.protos.messages import (
    Adopt,
    Command,
    DeviceState,
    Pause,
    Principal,
    PrincipalKind,
    Resume,
    Role,
    RoundFailed,
    RunRested,
    RunResumed,
    RunState,
    StartRun,
    Stop,
    TokenInfo,
    VersionPublished,
)
from fanin.protos.wire import to_proto
from fanin.server.storage.disk import Durability
from fanin.server.storage.sqlite.commands import SqliteCommands
from fanin.server.storage.sqlite.devices import SqliteDevices
from fanin.server.storage.sqlite.engine import migrate, open_engine
from fanin.server.storage.sqlite.runs import SqliteRuns
from fanin.simulation import run_virtual
from fanin.v1 import control_pb2

ANNA = Principal(kind=PrincipalKind.OPERATOR, id="a11a")
BEN = Principal(kind=PrincipalKind.OPERATOR, id="be11")


@given(values(Principal, control_pb2.Principal))
def test_a_principal_is_read_from_its_text_form(principal: Principal) -> None:
    assert Principal.parse(str(principal)) == principal


@pytest.mark.parametrize("wrong", ["", "operator", "operator ", "nobody a", "a11a", "operator a b"])
def test_a_text_of_another_form_names_no_principal(wrong: str) -> None:
    with pytest.raises(InvalidInput, match=r"^principal: got "):
        Principal.parse(wrong)


async def command(place: Place, what: Pause | Resume | Stop | Adopt, by: Principal | None, command_id: str) -> None:
    await place.runs.command(Command(command_id=command_id, run_id="run", what=what, by=by))


def test_each_event_of_a_command_names_its_sender(tmp_path: Path) -> None:
    async def main() -> None:
        place, bundle = open_place(tmp_path), bundle_in(tmp_path)
        await start(place.runs, bundle, plan())
        await settle()
        await command(place, Pause(), ANNA, "1")
        # A repeated command keeps its first sender.
        await command(place, Pause(), BEN, "1")
        await command(place, Resume(), BEN, "2")
        await command(place, Stop(), ANNA, "3")
        assert (await place.runs.info("run")).reason == "by operator a11a"
        await command(place, Adopt(number=0), BEN, "4")
        parent = (await place.runs.version("run", None)).version
        version, data = next_version(parent, np.ones(22, np.float32), bundle, PUBLISHER)
        place.state.blobs.put_pieces([data])
        await place.runs.publish_version(version, 1, ANNA)
        await command(place, Stop(), None, "5")
        events = [record.event for record in await place.state.stores.runs.event_page("run", 0)]
        assert [event for event in events if isinstance(event, RunRested | RunResumed)] == [
            RunRested(state=RunState.PAUSED, reason="by operator a11a", by=ANNA),
            RunResumed(by=BEN),
            RunRested(state=RunState.STOPPED, reason="by operator a11a", by=ANNA),
            RunRested(state=RunState.STOPPED, reason="by an operator"),
        ]
        assert [event.by for event in events if isinstance(event, VersionPublished)] == [BEN, ANNA]
        assert next(event.reason for event in events if isinstance(event, RoundFailed)) == "stopped by operator a11a"
        await place.runs.stop()

    run_virtual(main())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = open_engine(tmp_path / "fanin.db", Durability.PROCESS)
    yield engine
    engine.dispose()


def test_the_record_names_the_sender_of_each_run_and_each_command(engine: Engine) -> None:
    runs, control = SqliteRuns(engine), SqliteCommands(engine)
    runs.add_run(START, 5.0, ANNA)
    runs.add_run(replace(START, run_id="other", version=replace(START.version, run_id="other")), 6.0)
    records = [runs.run(run_id) for run_id in runs.run_ids()]
    assert [record and record.started_by for record in records] == [ANNA, None]
    control.pause(Command(command_id="1", run_id=START.run_id, what=Pause(), by=ANNA), 7.0)
    control.resume(Command(command_id="2", run_id=START.run_id, what=Resume(), by=BEN), 0, 8.0)
    control.pause(Command(command_id="3", run_id=START.run_id, what=Pause()), 9.0)
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT command_id, principal FROM commands ORDER BY command_id")).all()
    assert rows == [("1", "operator a11a"), ("2", "operator be11"), ("3", None)]


def test_the_sender_of_a_command_is_no_part_of_it(engine: Engine) -> None:
    """An operator whose token was replaced may repeat a command with the new one."""
    SqliteRuns(engine).add_run(START, 5.0)
    first = Command(command_id="1", run_id=START.run_id, what=Pause(), by=ANNA)
    SqliteCommands(engine).pause(first, 7.0)
    assert SqliteCommands(engine).is_done(replace(first, by=BEN))


def test_a_database_from_before_principals_is_brought_to_the_new_form(tmp_path: Path) -> None:
    path = tmp_path / "fanin.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        migrate(connection, "0004")
    with engine.begin() as connection:
        start = to_proto(START, control_pb2.StartRunRequest).SerializeToString()
        values = {"run_id": START.run_id, "start": start}
        connection.execute(text("INSERT INTO runs VALUES (:run_id, :start, 'running', '', 3, 5.0)"), values)
    engine.dispose()
    engine = open_engine(path, Durability.PROCESS)
    record = SqliteRuns(engine).run(START.run_id)
    assert record is not None and (record.start, record.started_by) == (START, None)
    engine.dispose()


def test_the_tokens_of_a_database_from_before_roles_get_names_and_roles(tmp_path: Path) -> None:
    path = tmp_path / "fanin.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        migrate(connection, "0008")
    with engine.begin() as connection:
        for digest, role in (("a" * 64, "operator"), ("b" * 64, "device")):
            values = {"digest": digest, "role": role}
            connection.execute(text("INSERT INTO tokens VALUES (:digest, :role, 5.0)"), values)
        connection.execute(text("INSERT INTO devices VALUES ('id', :key, 6.0)"), {"key": "ab" * 32})
    engine.dispose()
    engine = open_engine(path, Durability.PROCESS)
    devices = SqliteDevices(engine)
    first, second = devices.find_token("a" * 64), devices.find_token("b" * 64)
    assert first == TokenInfo(name="a" * 12, role=Role.ADMIN, token_id="a" * 12, created_at=5.0)
    assert second == TokenInfo(name="b" * 12, role=Role.DEVICE, token_id="b" * 12, created_at=5.0)
    info = devices.device("id")
    assert (info.label, dict(info.tags), info.ban, info.state) == ("", {}, None, DeviceState.NEW)
    engine.dispose()


def test_a_damaged_principal_is_damage_of_the_database(engine: Engine) -> None:
    runs = SqliteRuns(engine)
    runs.add_run(START, 5.0, ANNA)
    with engine.begin() as connection:
        connection.execute(text("UPDATE runs SET started_by = 'nobody'"))
    with raises(
        Corrupted,
        "fanin.db: run run: the record is damaged (principal: got 'nobody', expected a kind such as operator, and an "
        "id); restore a backup of the folder",
    ):
        runs.run(START.run_id)


def test_a_run_names_its_first_sender_also_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        place, bundle = open_place(tmp_path), bundle_in(tmp_path)
        await start(place.runs, bundle, plan(), "unnamed")
        ids = {"run_id": "named", "bundle_sha256": bundle.sha256}
        initial = bundle.manifest.artifacts[bundle.manifest.initial]
        version = sign_version(PUBLISHER, parent=None, parameters=initial, **ids)
        delegation = sign_delegation(PUBLISHER, run_public_key=await place.runs.prepare_run("named"), **ids)
        request = StartRun(run_id="named", plan=plan(), version=version, delegation=delegation)
        for by in (ANNA, BEN):
            assert (await place.runs.start_run(request, by)).started_by == ANNA
        await place.runs.stop()
        place = open_place(tmp_path)
        await place.runs.start()
        assert {info.run_id: info.started_by for info in (await place.runs.listed()).runs} == {
            "unnamed": None,
            "named": ANNA,
        }
        await place.runs.stop()

    run_virtual(main())

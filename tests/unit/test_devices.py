"""Enrolling many devices at once: all or none, and known devices do not change."""

from pathlib import Path

import pytest
from sqlalchemy import event

from fanin.protos.errors import Unavailable
from fanin.protos.messages import NewToken, Role
from fanin.server.storage.disk import Durability
from fanin.server.storage.records import EnrolledDevice
from fanin.server.storage.sqlite.devices import SqliteDevices
from fanin.server.storage.sqlite.engine import open_engine

DEVICES = [EnrolledDevice(public_key=f"{number:064x}") for number in range(5)]
TOKEN = NewToken(name="a", role=Role.DEVICE, sha256="a" * 64)


@pytest.fixture
def store(tmp_path: Path) -> SqliteDevices:
    """An empty store."""
    return SqliteDevices(open_engine(tmp_path / "fanin.db", Durability.PROCESS))


def test_all_enrolled_devices_are_returned(store: SqliteDevices) -> None:
    store.enroll(DEVICES, 1.0)
    assert store.num_devices == len(DEVICES)
    assert [store.find(device.device_id) for device in DEVICES] == DEVICES


def test_known_devices_are_unchanged(store: SqliteDevices) -> None:
    store.enroll(DEVICES[:1], 1.0)
    store.enroll(DEVICES, 2.0)
    assert store.num_devices == len(DEVICES)
    assert [store.find(device.device_id) for device in DEVICES] == DEVICES


def test_a_device_that_another_store_recorded_is_no_conflict(tmp_path: Path) -> None:
    first, second = (SqliteDevices(open_engine(tmp_path / "fanin.db", Durability.PROCESS)) for _ in range(2))
    first.enroll(DEVICES[:1], 1.0)
    second.enroll(DEVICES[:2], 2.0)
    assert [second.find(device.device_id) for device in DEVICES[:2]] == list(DEVICES[:2])
    third = SqliteDevices(open_engine(tmp_path / "fanin.db", Durability.PROCESS))
    assert third.num_devices == 2


def test_an_empty_list_enrolls_no_device(store: SqliteDevices) -> None:
    store.enroll([], 1.0)
    assert store.num_devices == 0


def test_a_write_that_fails_changes_neither_memory_nor_database(tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "fanin.db", Durability.PROCESS)
    store = SqliteDevices(engine)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only=ON")
    with pytest.raises(Unavailable, match="readonly database"):
        store.enroll(DEVICES, 1.0)
    with pytest.raises(Unavailable, match="readonly database"):
        store.add_token(TOKEN, 1.0)
    assert (store.num_devices, store.find(DEVICES[0].device_id)) == (0, None)
    assert store.find_token(TOKEN.sha256) is None
    engine.dispose()


def test_a_lookup_never_queries_the_database(tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "fanin.db", Durability.PROCESS)
    SqliteDevices(engine).enroll(DEVICES, 1.0)
    SqliteDevices(engine).add_token(TOKEN, 1.0)
    lookup_store = SqliteDevices(engine)
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    assert [lookup_store.find(device.device_id) for device in DEVICES] == DEVICES
    assert (lookup_store.find("0" * 32), lookup_store.num_devices) == (None, len(DEVICES))
    assert lookup_store.find_token(TOKEN.sha256) is not None
    assert lookup_store.find_token("b" * 64) is None
    assert statements == []
    engine.dispose()


@pytest.mark.parametrize("key", ["'zz'", "x'00'", "'abcd'"])
def test_a_damaged_row_refuses_its_device_until_it_enrolls_again_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    engine, (damaged, *others) = open_engine(tmp_path / "fanin.db", Durability.PROCESS), DEVICES
    SqliteDevices(engine).enroll(DEVICES, 1.0)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE devices SET public_key = {key} WHERE device_id = '{damaged.device_id}'")
    store = SqliteDevices(engine)
    (text,) = caplog.messages
    assert f"damaged rows in the table of devices: 1, such as '{damaged.device_id}'; these devices are refused" in text
    assert [store.find(device.device_id) for device in others] == others
    assert (store.find(damaged.device_id), store.num_devices) == (None, len(others))
    store.enroll([damaged], 2.0)
    assert SqliteDevices(engine).num_devices == len(DEVICES)
    assert len(caplog.messages) == 1
    engine.dispose()

"""Enrolling many devices at once: all or none, and harmless for those that are known."""

from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError

from fanin.server.disk import Durability
from fanin.server.store.devices import Device, DeviceStore
from fanin.server.store.engine import open_engine

DEVICES = [Device(device_id=f"device-{number}", public_key=f"{number:064x}") for number in range(5)]


@pytest.fixture
def store(tmp_path: Path) -> DeviceStore:
    """An empty one."""
    return DeviceStore(open_engine(tmp_path / "fanin.db", Durability.PROCESS))


def test_all_are_found(store: DeviceStore) -> None:
    store.enroll_all(DEVICES, 1.0)
    assert store.count() == len(DEVICES)
    assert [store.find(device.device_id) for device in DEVICES] == DEVICES


def test_those_that_are_known_are_left_alone(store: DeviceStore) -> None:
    store.enroll(DEVICES[0], 1.0)
    store.enroll_all([Device(device_id=DEVICES[0].device_id, public_key="f" * 64), *DEVICES[1:]], 2.0)
    assert [store.find(device.device_id) for device in DEVICES] == DEVICES


def test_none_is_nothing(store: DeviceStore) -> None:
    store.enroll_all([], 1.0)
    assert store.count() == 0


def test_one_that_is_none_keeps_out_all(store: DeviceStore) -> None:
    with pytest.raises(IntegrityError):
        # What a caller who ignores the types could do: a device without a key.
        store.enroll_all([*DEVICES, Device(device_id="more", public_key=None)], 1.0)
    assert store.count() == 0

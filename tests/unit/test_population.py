"""All devices in memory: a lookup by full id finds each, whether read at the start or enrolled later."""

import pytest

from fanin.server.storage.population import Population
from fanin.server.storage.records import EnrolledDevice

DEVICES = [EnrolledDevice(public_key=f"{number:064x}") for number in range(200)]
ROWS = [(device.device_id, device.public_key) for device in DEVICES]


def test_devices_read_in_batches_are_found() -> None:
    known = Population([ROWS[:70], ROWS[70:150]])
    assert len(known) == 150
    assert [known.find(device.device_id) for device in DEVICES] == [*DEVICES[:150], *[None] * 50]


def test_devices_added_since_are_found_before_and_after_they_are_sorted_in() -> None:
    known = Population([ROWS[:50]], max_recent=64)
    for number, device in enumerate(DEVICES[50:], 51):
        assert known.find(device.device_id) is None
        known.add(device)
        assert known.find(device.device_id) == device
        assert len(known) == number
    assert [known.find(device.device_id) for device in DEVICES] == DEVICES


def test_ids_that_begin_alike_are_distinguished() -> None:
    # A caller with an enrollment token can search for keys whose ids begin alike.
    first, second, third = DEVICES[:3]
    alike = [(first.device_id[:16] + one.device_id[16:], one.public_key) for one in (second, first, third)]
    known = Population([alike])
    assert known.find(first.device_id) == first
    assert known.find(alike[0][0]) is None


@pytest.mark.parametrize("device_id", ["", "d", "0" * 31, "z" * 32, "0" * 5000, "\n", DEVICES[0].device_id.upper()])
def test_any_text_may_be_looked_for(device_id: str) -> None:
    assert Population([ROWS]).find(device_id) is None


def test_damaged_rows_are_left_out() -> None:
    damaged = [("0" * 32, "0" * 62), ("1" * 32, "z" * 64), ("x", "0" * 64)]
    population = Population([ROWS, [*damaged, *ROWS[:1]]])
    assert population.damaged == ["0" * 32, "1" * 32, "x"]
    assert len(population) == len(ROWS) + 1

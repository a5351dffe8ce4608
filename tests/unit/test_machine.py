"""Battery and network of a machine, from the files of Linux."""

from pathlib import Path

import pytest

from fanin.clients.machine import condition_of
from fanin.protos.messages import DeviceCondition, NetworkKind

LAPTOP = {
    "power_supply/AC/type": "Mains",
    "power_supply/AC/online": "0",
    "power_supply/BAT0/type": "Battery",
    "power_supply/BAT0/capacity": "73",
    "power_supply/BAT0/status": "Discharging",
    "power_supply/mouse/type": "Battery",
    "power_supply/mouse/scope": "Device",
    "power_supply/mouse/capacity": "5",
    "net/lo/operstate": "unknown",
    "net/lo/type": "772",
    "net/wlp2s0/operstate": "up",
    "net/wlp2s0/type": "1",
    "net/wlp2s0/device/x": "",
    "net/wlp2s0/wireless/x": "",
}


def condition(folder: Path, files: dict[str, str]) -> DeviceCondition | None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return condition_of(folder)


def test_a_laptop_on_battery_and_wifi(tmp_path: Path) -> None:
    expected = DeviceCondition(battery_percent=73, is_charging=False, network=NetworkKind.WIFI)
    assert condition(tmp_path, LAPTOP) == expected


def test_a_cable_comes_before_wifi_and_a_charger_counts(tmp_path: Path) -> None:
    files = {"net/eth0/operstate": "up", "net/eth0/type": "1", "net/eth0/device/x": "", "power_supply/AC/online": "1"}
    assert condition(tmp_path, LAPTOP | files) == DeviceCondition(
        battery_percent=73, is_charging=True, network=NetworkKind.ETHERNET
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"net/rmnet_data0/operstate": "unknown"}, NetworkKind.CELLULAR),
        ({"net/wwan0/operstate": "up"}, NetworkKind.CELLULAR),
        ({"net/tun0/operstate": "up", "net/tun0/type": "65534"}, NetworkKind.OTHER),
    ],
)
def test_other_networks(tmp_path: Path, files: dict[str, str], expected: NetworkKind) -> None:
    assert condition(tmp_path, files) == DeviceCondition(network=expected)


@pytest.mark.parametrize("capacity", ["", "many", "-5", "250"])
def test_a_battery_that_reports_nonsense_raises_nothing(tmp_path: Path, capacity: str) -> None:
    files = {"power_supply/B/type": "Battery", "power_supply/B/capacity": capacity, "power_supply/B/status": "Full"}
    found = condition(tmp_path, files)
    assert found is not None
    assert found.battery_percent in (None, 0, 100)


def test_a_machine_that_publishes_nothing_reports_nothing(tmp_path: Path) -> None:
    assert condition_of(tmp_path / "none") is None
    assert condition(tmp_path, {"net/lo/operstate": "unknown", "net/lo/type": "772"}) is None

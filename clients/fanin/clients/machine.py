"""Battery and network of this machine, as a device reports them in its check-ins.

Linux publishes both as small files: ``/sys/class/power_supply`` and ``/sys/class/net``. On other systems, and for what
cannot be read, the fields stay empty. Nothing here identifies the machine, its user or its network.

Reference: Documentation/ABI/testing/sysfs-class-power and sysfs-class-net of the Linux kernel.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

from fanin.protos.messages import DeviceCondition, NetworkKind

SYSTEM: Final = Path("/sys/class")
_ETHERNET: Final = "1"
"""``ARPHRD_ETHER`` of the kernel, also of Wi-Fi, which has a folder ``wireless`` or ``phy80211``."""
_CELLULAR: Final = ("wwan", "rmnet", "ccmni", "ppp")
"""How the names of modems begin: in laptops, in phones with chips of two makers, and of serial modems."""


def condition_of(system: Path = SYSTEM) -> DeviceCondition | None:
    """Return battery and network of this machine, or None if it knows neither.

    Args:
        system: The folder with the kernel's classes.
    """
    percent, is_charging = _battery(system / "power_supply")
    network = _network(system / "net")
    if percent is None and is_charging is None and network is None:
        return None
    return DeviceCondition(battery_percent=percent, is_charging=is_charging, network=network)


def _battery(folder: Path) -> tuple[int | None, bool | None]:
    """Return the charge in percent, and whether a charger is connected."""
    percent: int | None = None
    is_charging: bool | None = None
    for supply in _entries(folder):
        kind = _text(supply / "type")
        # Not the battery of a mouse or a pen.
        if kind == "Battery" and _text(supply / "scope") != "Device":
            with suppress(ValueError):
                percent = min(max(int(_text(supply / "capacity")), 0), 100)
            status = _text(supply / "status")
            if status in ("Charging", "Full", "Not charging", "Discharging"):
                is_charging = bool(is_charging) or status != "Discharging"
        elif kind in ("Mains", "USB") and _text(supply / "online") == "1":
            is_charging = True
    return percent, is_charging


def _network(folder: Path) -> NetworkKind | None:
    """Return the kind of the first interface that is up; cables are before Wi-Fi, and Wi-Fi before modems."""
    kinds = [_kind(interface) for interface in _entries(folder) if _is_up(interface)]
    order = (NetworkKind.ETHERNET, NetworkKind.WIFI, NetworkKind.CELLULAR, NetworkKind.OTHER)
    return next((kind for kind in order if kind in kinds), None)


def _is_up(interface: Path) -> bool:
    # A modem's state is often unknown. The loopback's is too, but it is no network.
    state = _text(interface / "operstate")
    return state == "up" or (state == "unknown" and interface.name.startswith(_CELLULAR))


def _kind(interface: Path) -> NetworkKind:
    if (interface / "wireless").exists() or (interface / "phy80211").exists():
        return NetworkKind.WIFI
    if interface.name.startswith(_CELLULAR):
        return NetworkKind.CELLULAR
    is_hardware = (interface / "device").exists()
    return NetworkKind.ETHERNET if is_hardware and _text(interface / "type") == _ETHERNET else NetworkKind.OTHER


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """Return the content of a small file, or "" if it cannot be read."""
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""

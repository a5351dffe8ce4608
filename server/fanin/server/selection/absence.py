"""Alarms about devices that an operator expects: never came, stopped coming, or come and get no work.

    device_never_came        it is required, and has not checked in since the Run knows of it
    device_stopped_coming    it checked in before, and not for ``window_s``
    device_without_work      it checks in, and something keeps it from work: a ban, its runtime or codec, a pause

Pure: the caller passes the facts of each device and the time. The same facts give the same alarms, so an alarm ends
with its facts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fanin.protos.messages import RunWarned

NEVER_CAME: Final = "device_never_came"
STOPPED_COMING: Final = "device_stopped_coming"
WITHOUT_WORK: Final = "device_without_work"
CODES: Final = frozenset({NEVER_CAME, STOPPED_COMING, WITHOUT_WORK})
DEADLINES: Final = 3
"""Deadlines without a check-in after which a device has stopped coming."""
MIN_WINDOW_S: Final = 1800.0
"""Shortest time for that. A device that must wait checks in again within 15 minutes."""
MAX_OBSTACLE_CHARS: Final = 200


def window_of(deadline_s: float) -> float:
    """Return the seconds without a check-in after which a device has stopped coming."""
    return max(DEADLINES * deadline_s, MIN_WINDOW_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedDevice:
    """What a coordinator knows of a device that it expects. Times are in seconds since the Unix epoch.

    Attributes:
        device_id: Its id.
        label: Its label; "" for none.
        is_enrolled: Whether it has enrolled.
        is_required: Whether the Plan requires it.
        known_since: Since when it is expected: its enrollment, or the start of the Run.
        last_seen: Its last check-in; None for none.
        is_here: Whether it waits for work or is at work now.
        obstacle: What keeps it from work; "" for nothing.
    """

    device_id: str
    label: str = ""
    is_enrolled: bool = True
    is_required: bool = False
    known_since: float
    last_seen: float | None = None
    is_here: bool = False
    obstacle: str = ""

    @property
    def name(self) -> str:
        """The device for operators."""
        return f"{self.label!r} ({self.device_id})" if self.label else self.device_id


def alarms_of(devices: Iterable[ExpectedDevice], now_s: float, window_s: float) -> Mapping[str, RunWarned]:
    """Return the alarms, at most one for each device, by device.

    Args:
        devices: The expected devices.
        now_s: Wall time, in seconds since the Unix epoch.
        window_s: Seconds without a check-in after which a device has stopped coming.
    """
    alarms = {}
    for device in devices:
        found = _alarm_of(device, now_s, window_s)
        if found is not None:
            code, text = found
            alarms[device.device_id] = RunWarned(
                code=code, subject=device.device_id, text=f"device {device.name} {text}"
            )
    return MappingProxyType(alarms)


def _alarm_of(device: ExpectedDevice, now_s: float, window_s: float) -> tuple[str, str] | None:
    """Return code and text of the alarm about a device, None without one."""
    is_recent = device.is_here or (device.last_seen is not None and now_s - device.last_seen < window_s)
    if is_recent and device.obstacle:
        return WITHOUT_WORK, f"checks in and gets no work: {device.obstacle[:MAX_OBSTACLE_CHARS]}"
    if is_recent:
        return None
    if device.last_seen is None:
        if not device.is_required or now_s - device.known_since < window_s:
            return None
        what = "never checked in" if device.is_enrolled else "has not enrolled"
        return NEVER_CAME, f"is required and {what}; run fanin doctor there"
    return STOPPED_COMING, f"has not checked in for {(now_s - device.last_seen) / 3600.0:.1f} hours"

"""Devices as operators see them: label, tags, state, ban, condition; and the changes that operators make."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Final

from fanin.protos.errors import InvalidInput
from fanin.protos.fields import Mark, OneOf, Otherwise
from fanin.protos.messages.principals import check_label_text
from fanin.protos.names import MAX_TAGS, check_name, check_tag_name, check_tags, check_text_line

MAX_PAGE_DEVICE_INFOS: Final = 100
MAX_REASON_CHARS: Final = 500


class NetworkKind(Enum):
    """The network over which a device reaches the coordinator."""

    WIFI = "wifi"
    ETHERNET = "ethernet"
    CELLULAR = "cellular"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCondition:
    """Battery and network of a device at a check-in. None: the device does not know it.

    Attributes:
        battery_percent: Charge, 0 to 100; None also without a battery.
        is_charging: Whether it is connected to a charger.
        network: The network to the coordinator.
    """

    battery_percent: int | None = None
    is_charging: bool | None = None
    network: Annotated[NetworkKind | None, Otherwise(member=NetworkKind.OTHER)] = None

    def __post_init__(self) -> None:
        if self.battery_percent is not None and not 0 <= self.battery_percent <= 100:
            raise InvalidInput(
                f"check-in: got a battery of {self.battery_percent} %, expected 0 to 100", code="FN-1405"
            )


class DeviceState(Enum):
    """What a device is doing now."""

    BANNED = "banned"
    WORKING = "working"
    WAITING = "waiting"
    NEW = "new"
    AWAY = "away"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """The ban of a device: its reason, its time in seconds since the Unix epoch, and the principal that imposed it."""

    reason: str
    time: float
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """A device. Times are in seconds since the Unix epoch.

    Attributes:
        enrolled_by: The name of the enrollment token; "" if it was not recorded.
        ban: None: it is not banned.
        last_seen: The time of its last check-in; None: it never checked in.
        runtimes: What it reported in that check-in, as ``fanin_version`` and ``condition``.
        num_updates: Updates that Rounds have accepted of its key, also before a removal and another enrollment.
        last_rejection: Why a check-in or an Update of it was refused last; "": none was.
    """

    device_id: str
    public_key: Annotated[str, Mark.HEXADECIMAL]
    label: str = ""
    tags: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    state: DeviceState = DeviceState.AWAY
    enrolled_at: float
    enrolled_by: str = ""
    ban: Ban | None = None
    last_seen: float | None = None
    runtimes: tuple[str, ...] = ()
    fanin_version: str = ""
    condition: DeviceCondition | None = None
    num_updates: int = 0
    last_rejection: str = ""
    rejected_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceQuery:
    """The devices of a page.

    Attributes:
        after: Only devices after this id.
        tags: Only devices with all of these tags.
        state: Only devices in this state; None: in any.
        prefix: Only devices whose ids begin so.
        unseen_s: Only devices whose last check-in, or enrollment without one, was more than so many seconds ago.
    """

    after: str = ""
    tags: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    state: DeviceState | None = None
    prefix: str = ""
    unseen_s: float | None = None

    def __post_init__(self) -> None:
        check_tags("devices", self.tags)
        if self.prefix:
            check_name("devices: prefix", self.prefix)
        if self.unseen_s is not None and not 0.0 <= self.unseen_s < math.inf:
            raise InvalidInput(
                f"devices: got unseen for {self.unseen_s} s, expected a finite number of at least 0", code="FN-1474"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePage:
    """A page of devices, in the order of their ids.

    Attributes:
        next: The id after which the next page begins; "": this is the last page.
        num_devices: All devices that have enrolled.
    """

    devices: tuple[DeviceInfo, ...]
    next: str = ""
    num_devices: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelDevice:
    """Set the label of a device; "" removes it."""

    label: str

    def __post_init__(self) -> None:
        check_label_text("device", self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class TagDevice:
    """Set tags of a device, and remove the tags of these names."""

    set: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    remove: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_tags("device", self.set)
        if len(self.remove) > MAX_TAGS:
            raise InvalidInput(
                f"device: got {len(self.remove)} tags to remove, expected at most {MAX_TAGS}", code="FN-1404"
            )
        for name in self.remove:
            check_tag_name("device", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BanDevice:
    """Ban a device."""

    reason: str = ""

    def __post_init__(self) -> None:
        if self.reason:
            check_text_line("ban: reason", self.reason, MAX_REASON_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnbanDevice:
    """Lift the ban of a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveDevice:
    """Delete a device with its key. It must enroll again. A banned device stays: its key is what the ban refuses."""


AnyDeviceChange = LabelDevice | TagDevice | BanDevice | UnbanDevice | RemoveDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChange:
    """A change of a device by an operator."""

    device_id: str
    what: Annotated[
        AnyDeviceChange, OneOf(unknown="device: got the change {}, expected label, tag, ban, unban or remove")
    ]

    def __post_init__(self) -> None:
        check_name("device", self.device_id)

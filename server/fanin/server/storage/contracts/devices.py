"""The contract of a store of devices, and of the tokens that enroll them."""

from typing import Final

from fanin.protos.errors import Conflict, FaninError, NotFound, Unauthenticated
from fanin.protos.messages import (
    MAX_PAGE_DEVICE_INFOS,
    BanDevice,
    DeviceChange,
    DeviceCondition,
    DeviceQuery,
    DeviceState,
    LabelDevice,
    NetworkKind,
    NewToken,
    RemoveDevice,
    Role,
    TagDevice,
    UnbanDevice,
)
from fanin.server.storage.contracts.values import OPERATOR
from fanin.server.storage.protocols.devices import DeviceStore
from fanin.server.storage.records import EnrolledDevice, Sighting

DIGEST: Final = "d" * 64
ONCE: Final = "1" * 64


async def check_devices(devices: DeviceStore) -> None:
    """Check a store of devices and tokens.

    Args:
        devices: An empty store.

    Raises:
        AssertionError: The store breaks the contract. The text says how.
    """
    known = [EnrolledDevice(public_key=f"{number:064x}") for number in range(300)]
    assert devices.num_devices == 0, f"num_devices: got {devices.num_devices} in an empty store"
    await devices.enroll(known[:2], 1.0)
    await devices.enroll([*known, known[5]], 2.0)
    await devices.enroll([], 3.0)
    assert devices.num_devices == len(known), f"num_devices: got {devices.num_devices}, expected {len(known)}"
    for device in known:
        assert devices.find(device.device_id) == device, f"find: did not return device {device.device_id}"
    for unknown in ("", "no hexadecimal", known[0].device_id[:-1], known[0].device_id + "0", "f" * 64):
        assert devices.find(unknown) is None, f"find: returned a device for {unknown!r}"
        assert devices.banned_at(unknown) is None, f"banned_at: {unknown!r} is banned"
        assert not devices.is_removed(unknown), f"is_removed: {unknown!r} was removed"
    devices.add_token(NewToken(name="group", role=Role.DEVICE, sha256=DIGEST), 4.0)
    token = devices.find_token(DIGEST)
    assert token is not None, "find_token: does not know a token that was added"
    assert token.role is Role.DEVICE, f"find_token: got the role {token.role}, expected that of the token"
    assert devices.find_token("e" * 64) is None, "find_token: knows a token that was never added"
    await _check_uses(devices)
    await _check_pages(devices, [device.device_id for device in known])
    await _check_changes(devices, known[0].device_id)
    await _check_sightings(devices, known[1].device_id)


async def _check_uses(devices: DeviceStore) -> None:
    once = NewToken(name="once", role=Role.DEVICE, sha256=ONCE, lifetime_s=10.0, max_uses=1, tags={"site": "a"})
    devices.add_token(once, 4.0)
    first, second = (EnrolledDevice(public_key=f"{number:064x}") for number in (1000, 1001))
    for text, sha256, now_s in (("unknown", "e" * 64, 5.0), ("expired", ONCE, 14.0)):
        assert await _is_refused(devices, first, now_s, sha256), f"enroll: accepts a token that is {text}"
    assert devices.find(first.device_id) is None, "enroll: a refused device is known"
    for now_s in (5.0, 6.0):
        await devices.enroll([first], now_s, ONCE)
    token = devices.find_token(ONCE)
    assert token is not None and token.num_uses == 1, "enroll: a repeated enrollment counts as a use"
    assert await _is_refused(devices, second, 6.0, ONCE), "enroll: accepts a token that is used up"
    assert devices.find(second.device_id) is None, "enroll: a refused device is known"
    info = await devices.device(first.device_id)
    assert (info.enrolled_by, dict(info.tags)) == ("once", {"site": "a"}), "enroll: loses the tags of the token"
    page = await devices.device_page(DeviceQuery(tags={"site": "a"}))
    assert [each.device_id for each in page.devices] == [first.device_id], "device_page: selects other tags"
    await devices.change(DeviceChange(device_id=first.device_id, what=RemoveDevice()), OPERATOR, 7.0)


async def _is_refused(devices: DeviceStore, device: EnrolledDevice, now_s: float, sha256: str) -> bool:
    try:
        await devices.enroll([device], now_s, sha256)
    except Unauthenticated:
        return True
    return False


async def _check_pages(devices: DeviceStore, known: list[str]) -> None:
    after, listed = "", list[str]()
    while True:
        page = await devices.device_page(DeviceQuery(after=after))
        assert len(page.devices) <= MAX_PAGE_DEVICE_INFOS, f"device_page: got {len(page.devices)} devices"
        listed += [info.device_id for info in page.devices]
        after = page.next
        if not after:
            break
    assert listed == sorted(known), "device_page: the pages do not have each device once, in the order of the ids"
    prefix = min(known)[:3]
    begun = await devices.device_page(DeviceQuery(prefix=prefix))
    expected = [each for each in sorted(known) if each.startswith(prefix)]
    assert [info.device_id for info in begun.devices] == expected, "device_page: returns ids with another prefix"
    # All of them enrolled, and none checked in.
    old = [(await devices.device_page(DeviceQuery(), None, before_s)).devices for before_s in (0.5, 1e9)]
    assert [bool(each) for each in old] == [False, True], "device_page: does not select devices by their age"
    few = await devices.device_page(DeviceQuery(), known[:2])
    assert [info.device_id for info in few.devices] == sorted(known[:2]), "device_page: returns other devices"


async def _check_changes(devices: DeviceStore, device_id: str) -> None:
    for what in (LabelDevice(label="<b>"), TagDevice(set={"ward": "3", "site": "a"}), TagDevice(remove=("site",))):
        await devices.change(DeviceChange(device_id=device_id, what=what), OPERATOR, 8.0)
    info = await devices.device(device_id)
    assert (info.label, dict(info.tags)) == ("<b>", {"ward": "3"}), f"change: got {info.label!r} and {info.tags}"
    banned = await devices.change(DeviceChange(device_id=device_id, what=BanDevice(reason="tests")), OPERATOR, 9.0)
    assert banned.ban is not None and banned.ban.by == str(OPERATOR), f"change: got the ban {banned.ban}"
    assert devices.banned_at(device_id) == 9.0, f"banned_at: got {devices.banned_at(device_id)}, expected 9.0"
    assert devices.num_banned == 1, f"num_banned: got {devices.num_banned}, expected 1"
    assert devices.find(device_id) is not None, "find: a banned device is unknown"
    page = await devices.device_page(DeviceQuery(state=DeviceState.BANNED))
    assert [each.device_id for each in page.devices] == [device_id], "device_page: does not select banned devices"
    try:
        await devices.change(DeviceChange(device_id=device_id, what=RemoveDevice()), OPERATOR, 9.0)
    except FaninError as exc:
        assert isinstance(exc, Conflict), f"change: got {exc!r} for the removal of a banned device"
    else:
        raise AssertionError("change: removes a banned device, whose key could enroll again")
    await devices.change(DeviceChange(device_id=device_id, what=UnbanDevice()), OPERATOR, 10.0)
    assert devices.banned_at(device_id) is None, "banned_at: a lifted ban lasts"
    assert devices.num_banned == 0, f"num_banned: got {devices.num_banned}, expected 0 after the ban was lifted"
    await devices.change(DeviceChange(device_id=device_id, what=RemoveDevice()), OPERATOR, 11.0)
    assert devices.find(device_id) is None, "find: returns a device that was removed"
    assert devices.is_removed(device_id), "is_removed: does not know a removal"
    try:
        await devices.device(device_id)
    except FaninError as exc:
        assert isinstance(exc, NotFound), f"device: got {exc!r} for a device that was removed"
    else:
        raise AssertionError("device: returns a device that was removed")


async def _check_sightings(devices: DeviceStore, device_id: str) -> None:
    condition = DeviceCondition(battery_percent=0, network=NetworkKind.WIFI)
    seen = Sighting(seen_at=12.0, runtimes=("a 1",), fanin_version="1", condition=condition)
    await devices.note({device_id: seen, "f" * 32: seen})
    await devices.note({device_id: Sighting(rejection="unsuitable", rejected_at=13.0)})
    info = await devices.device(device_id)
    reported = (info.last_seen, info.runtimes, info.fanin_version, info.condition)
    assert reported == (12.0, ("a 1",), "1", condition), f"note: got {reported}"
    assert (info.last_rejection, info.rejected_at) == ("unsuitable", 13.0), f"note: got {info.last_rejection!r}"
    page = await devices.device_page(DeviceQuery(state=DeviceState.AWAY))
    assert [each.device_id for each in page.devices] == [device_id], "device_page: does not select devices by state"

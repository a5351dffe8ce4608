"""The contract of a store of devices and tokens."""

from fanin.server.storage.protocols.devices import DeviceStore
from fanin.server.storage.records import EnrolledDevice, Role


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
    devices.add_token("digest", Role.DEVICE, 4.0)
    assert devices.has_token("digest", Role.DEVICE), "has_token: does not know a token that was added"
    assert not devices.has_token("digest", Role.OPERATOR), "has_token: a device's token counts as an operator's"
    assert not devices.has_token("other", Role.DEVICE), "has_token: knows a token that was never added"

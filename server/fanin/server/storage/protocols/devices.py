"""Devices and tokens.

Any peer can send any device id and any token, before it is authenticated. So these reads do no input or output: they
are answered from memory, at once, from any thread. That is why they are not async.
"""

from collections.abc import Iterable
from typing import Protocol

from fanin.server.storage.records import EnrolledDevice, Role


class DeviceDirectory(Protocol):
    """Enrolled devices by their keys, and tokens by their digests, as authentication uses them."""

    @property
    def num_devices(self) -> int:
        """Number of enrolled devices."""
        ...

    def find(self, device_id: str) -> EnrolledDevice | None:
        """Return a device.

        Args:
            device_id: The id; any text.

        Returns:
            The device, or None if it is not enrolled.
        """
        ...

    def has_token(self, sha256: str, role: Role) -> bool:
        """Return whether a token with this digest was issued for this role."""
        ...

    def add_token(self, sha256: str, role: Role, now_s: float) -> None:
        """Record a token. This may block: tokens are issued before a coordinator serves.

        Args:
            sha256: The digest of the token. The token itself is never stored.
            role: The calls that it permits.
            now_s: Wall time, in seconds.
        """
        ...


class DeviceStore(DeviceDirectory, Protocol):
    """The directory, and its growth."""

    async def enroll(self, devices: Iterable[EnrolledDevice], now_s: float) -> None:
        """Record devices, all or none of them. Known devices are not changed.

        Args:
            devices: The devices.
            now_s: Wall time, in seconds.
        """
        ...

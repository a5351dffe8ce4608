"""Devices and tokens.

Any peer can send any device id and any token, before it is authenticated. So these reads do no input or output: they
are answered from memory, at once, from any thread. That is why they are not async.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from fanin.protos.messages import DeviceChange, DeviceInfo, DevicePage, DeviceQuery, NewToken, Principal, TokenInfo
from fanin.server.storage.records import EnrolledDevice, Sighting


class DeviceDirectory(Protocol):
    """Enrolled devices by their keys, and tokens by their digests, as authentication uses them."""

    @property
    def num_devices(self) -> int:
        """Number of enrolled devices."""
        ...

    @property
    def num_banned(self) -> int:
        """Number of banned devices."""
        ...

    def find(self, device_id: str) -> EnrolledDevice | None:
        """Return a device.

        Args:
            device_id: The id; any text.

        Returns:
            The device, or None if it is not enrolled.
        """
        ...

    def banned_at(self, device_id: str) -> float | None:
        """Return since when a device is banned; None if it is not. The id may be any text."""
        ...

    def is_removed(self, device_id: str) -> bool:
        """Return whether an operator removed a device that has not enrolled since; the id may be any text."""
        ...

    def find_token(self, sha256: str) -> TokenInfo | None:
        """Return the token with this digest, also a revoked or an expired one; None if there is none."""
        ...

    def add_token(self, new: NewToken, now_s: float) -> None:
        """Record a token of the coordinator itself. This may block: it happens before a coordinator serves.

        Args:
            new: The token, with the digest of its secret. The secret itself is never stored.
            now_s: Wall time, in seconds.
        """
        ...


class DeviceStore(DeviceDirectory, Protocol):
    """The directory, its growth, and what is recorded of each device."""

    async def enroll(self, devices: Iterable[EnrolledDevice], now_s: float, token_sha256: str = "") -> None:
        """Record devices, all or none of them. Known devices are not changed, and count no use of the token.

        Each new device gets label and tags of the token, and an entry in the audit log, in the same transaction.

        Args:
            devices: The devices.
            now_s: Wall time, in seconds.
            token_sha256: The digest of the enrollment token; "": without one.

        Raises:
            Unauthenticated: The token is unknown, revoked, expired or used up.
        """
        ...

    async def device(self, device_id: str) -> DeviceInfo:
        """Return a device, in the state BANNED, NEW or AWAY. Raises NotFound."""
        ...

    async def device_page(
        self, query: DeviceQuery, among: Collection[str] | None = None, seen_before_s: float | None = None
    ) -> DevicePage:
        """Return the devices of a query, in the order of their ids. A page may be short, and has a bounded cost.

        Args:
            query: The selection. ``state`` is BANNED, NEW, AWAY or None: others are not in the record. ``unseen_s`` has
                no meaning here, because a store has no clock.
            among: Only devices with these ids, at most ``MAX_PAGE_DEVICE_INFOS``; None: all.
            seen_before_s: Only devices whose last check-in, or enrollment without one, was before this wall time.
        """
        ...

    async def change(self, change: DeviceChange, by: Principal | None, now_s: float) -> DeviceInfo:
        """Carry out a change and append its entry to the audit log, in one transaction. Return the device after it.

        Raises:
            NotFound: The device is not enrolled.
            InvalidInput: The device would have too many tags.
        """
        ...

    async def note(self, sightings: Mapping[str, Sighting]) -> None:
        """Record what was noticed of devices, by their ids. Devices that are not enrolled are left out."""
        ...

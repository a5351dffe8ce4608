"""Devices and tokens in memory."""

from collections.abc import Iterable

from fanin.server.storage.population import Population
from fanin.server.storage.records import EnrolledDevice, Role


class MemoryDevices:
    """``DeviceStore`` in memory."""

    def __init__(self) -> None:
        self._population = Population()
        self._tokens: set[tuple[str, Role]] = set()

    @property
    def num_devices(self) -> int:
        """See ``DeviceDirectory.num_devices``."""
        return len(self._population)

    def find(self, device_id: str) -> EnrolledDevice | None:
        """See ``DeviceDirectory.find``."""
        return self._population.find(device_id)

    def has_token(self, sha256: str, role: Role) -> bool:
        """See ``DeviceDirectory.has_token``."""
        return (sha256, role) in self._tokens

    def add_token(self, sha256: str, role: Role, now_s: float) -> None:
        """See ``DeviceDirectory.add_token``."""
        self._tokens.add((sha256, role))

    async def enroll(self, devices: Iterable[EnrolledDevice], now_s: float) -> None:
        """See ``DeviceStore.enroll``."""
        for device in devices:
            if self.find(device.device_id) is None:
                self._population.add(device)

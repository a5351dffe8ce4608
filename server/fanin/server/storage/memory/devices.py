"""Devices, and tokens as calls carry them, in memory."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import islice

from fanin.protos.messages import (
    MAX_PAGE_DEVICE_INFOS,
    DeviceChange,
    DeviceInfo,
    DevicePage,
    DeviceQuery,
    NewToken,
    Principal,
    RemoveDevice,
    TokenInfo,
)
from fanin.server.storage.access import change_fact, changed, enrolled, enrollment_fact, resting_state, unknown_device
from fanin.server.storage.memory.administration import MemoryTokens
from fanin.server.storage.memory.database import MemoryDatabase
from fanin.server.storage.population import Population
from fanin.server.storage.records import EnrolledDevice, Sighting


class MemoryDevices:
    """``DeviceStore`` in memory.

    Args:
        database: The Updates of devices; None: no device has any.

    Attributes:
        audit: The audit log.
        tokens: The tokens.
    """

    def __init__(self, database: MemoryDatabase | None = None) -> None:
        self._database = MemoryDatabase() if database is None else database
        self.audit = self._database.audit
        self.tokens = MemoryTokens(self.audit)
        self._population = Population()
        self._infos: dict[str, DeviceInfo] = {}
        self._removed: set[str] = set()

    @property
    def num_devices(self) -> int:
        """See ``DeviceDirectory.num_devices``."""
        return len(self._population)

    def find(self, device_id: str) -> EnrolledDevice | None:
        """See ``DeviceDirectory.find``."""
        return self._population.find(device_id)

    @property
    def num_banned(self) -> int:
        """See ``DeviceDirectory.num_banned``."""
        return sum(info.ban is not None for info in self._infos.values())

    def banned_at(self, device_id: str) -> float | None:
        """See ``DeviceDirectory.banned_at``."""
        info = self._infos.get(device_id)
        return None if info is None or info.ban is None else info.ban.time

    def is_removed(self, device_id: str) -> bool:
        """See ``DeviceDirectory.is_removed``."""
        return device_id in self._removed and self.find(device_id) is None

    def find_token(self, sha256: str) -> TokenInfo | None:
        """See ``DeviceDirectory.find_token``."""
        return self.tokens.find(sha256)

    def add_token(self, new: NewToken, now_s: float) -> None:
        """See ``DeviceDirectory.add_token``."""
        self.tokens.add(new, None, now_s)

    async def enroll(self, devices: Iterable[EnrolledDevice], now_s: float, token_sha256: str = "") -> None:
        """See ``DeviceStore.enroll``."""
        unknown = {one.device_id: one for one in devices if self.find(one.device_id) is None}
        token = self.tokens.use(token_sha256, len(unknown), now_s) if token_sha256 and unknown else None
        for device_id, device in unknown.items():
            self._population.add(device)
            self._infos[device_id] = enrolled(device_id, device.public_key, token, now_s)
            self.audit.add(enrollment_fact(device_id, token), now_s)

    async def device(self, device_id: str) -> DeviceInfo:
        """See ``DeviceStore.device``."""
        return self._counted(self._known(device_id))

    async def device_page(
        self, query: DeviceQuery, among: Collection[str] | None = None, seen_before_s: float | None = None
    ) -> DevicePage:
        """See ``DeviceStore.device_page``."""
        matches = (
            info
            for device_id, info in sorted(self._infos.items())
            if device_id > query.after
            and (among is None or device_id in among)
            and query.tags.items() <= info.tags.items()
            and query.state in (None, info.state)
            and device_id.startswith(query.prefix)
            and (seen_before_s is None or _seen_at(info) < seen_before_s)
        )
        infos = tuple(map(self._counted, islice(matches, MAX_PAGE_DEVICE_INFOS)))
        following = infos[-1].device_id if len(infos) == MAX_PAGE_DEVICE_INFOS else ""
        return DevicePage(devices=infos, next=following, num_devices=self.num_devices)

    async def change(self, change: DeviceChange, by: Principal | None, now_s: float) -> DeviceInfo:
        """See ``DeviceStore.change``."""
        info = changed(self._known(change.device_id), change, by, now_s)
        if isinstance(change.what, RemoveDevice):
            self._population.remove(info.device_id)
            del self._infos[info.device_id]
            self._removed.add(info.device_id)
        else:
            self._infos[info.device_id] = info
        self.audit.add(change_fact(change, by), now_s)
        return self._counted(info)

    async def note(self, sightings: Mapping[str, Sighting]) -> None:
        """See ``DeviceStore.note``."""
        for device_id, one in sightings.items():
            info = self._infos.get(device_id)
            if info is None:
                continue
            if one.seen_at is not None:
                info = replace(
                    info,
                    last_seen=one.seen_at,
                    runtimes=one.runtimes,
                    fanin_version=one.fanin_version,
                    condition=one.condition,
                    state=resting_state(is_banned=info.ban is not None, last_seen=one.seen_at),
                )
            if one.rejected_at is not None:
                info = replace(info, last_rejection=one.rejection, rejected_at=one.rejected_at)
            self._infos[device_id] = info

    def _known(self, device_id: str) -> DeviceInfo:
        info = self._infos.get(device_id)
        if info is None:
            raise unknown_device(device_id)
        return info

    def _counted(self, info: DeviceInfo) -> DeviceInfo:
        rounds = (updates for rows in self._database.runs.values() for updates in rows.updates.values())
        forgotten = (rows.contributions.get(info.device_id, (0, 0, 0))[0] for rows in self._database.runs.values())
        return replace(info, num_updates=sum(info.device_id in updates for updates in rounds) + sum(forgotten))


def _seen_at(info: DeviceInfo) -> float:
    return info.enrolled_at if info.last_seen is None else info.last_seen

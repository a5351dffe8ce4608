"""The devices of a coordinator that serves: the record of each, its state now, and changes that take effect at once."""

from dataclasses import dataclass, replace
from functools import partial

from fanin.protos.errors import FaninError
from fanin.protos.messages import (
    MAX_PAGE_DEVICE_INFOS,
    BanDevice,
    DeviceChange,
    DeviceInfo,
    DevicePage,
    DeviceQuery,
    DeviceState,
    Principal,
    PrincipalKind,
    RemoveDevice,
)
from fanin.server.access.registry import Registry
from fanin.server.fleet.coordinator import Coordinator
from fanin.server.runs.catalog import Runs
from fanin.server.storage.access import banned, removed
from fanin.server.storage.stores import Stores


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices, for operators.

    Attributes:
        stores: The record.
        registry: The calls of devices under way.
        coordinator: Their places, and what was noticed of them.
        runs: The Runs that they work for.
    """

    stores: Stores
    registry: Registry
    coordinator: Coordinator
    runs: Runs

    async def page(self, query: DeviceQuery) -> DevicePage:
        """Return the devices of a query, in the order of their ids."""
        await self.coordinator.activity.flush()
        before_s = None if query.unseen_s is None else self.stores.wall() - query.unseen_s
        if query.state in (DeviceState.WORKING, DeviceState.WAITING):
            following_ids = (device for device in self._busy(query.state) if device > query.after)
            busy = sorted(device for device in following_ids if device.startswith(query.prefix))
            among = busy[:MAX_PAGE_DEVICE_INFOS]
            page = await self.stores.devices.device_page(replace(query, state=None), among, before_s)
            following = among[-1] if len(busy) > len(among) else ""
            page = replace(page, next=following)
        else:
            page = await self.stores.devices.device_page(query, None, before_s)
        devices = map(self._with_state, page.devices)
        return replace(page, devices=tuple(info for info in devices if query.state in (None, info.state)))

    async def device(self, device_id: str) -> DeviceInfo:
        """Return a device. Raises NotFound."""
        await self.coordinator.activity.flush()
        return self._with_state(await self.stores.devices.device(device_id))

    async def change(self, change: DeviceChange, by: Principal) -> DeviceInfo:
        """Carry out a change. A ban or a removal ends the calls of the device and frees its place.

        Raises:
            NotFound: The device is not enrolled.
            InvalidInput: The device would have too many tags.
        """
        await self.coordinator.activity.flush()
        info = await self.stores.devices.change(change, by, self.stores.wall())
        match change.what:
            case BanDevice() if info.ban is not None:
                self._exclude(info.device_id, banned(info.device_id, info.ban.time))
            case RemoveDevice():
                self._exclude(info.device_id, removed(info.device_id))
            case _:
                pass
        for driver in self.runs.running():
            driver.course.watch_devices()
        return self._with_state(info)

    def _exclude(self, device_id: str, error: FaninError) -> None:
        # First the wait for work: the place that becomes free must not go to this device.
        self.coordinator.exclude(device_id, error)
        device = Principal(kind=PrincipalKind.DEVICE, id=device_id)
        self.registry.calls.end(device, partial(type(error), str(error), code=error.code))

    def _busy(self, state: DeviceState) -> set[str]:
        if state is DeviceState.WAITING:
            return set(self.runs.parked)
        return {device for driver in self.runs.running() for device in driver.intake.holders}

    def _with_state(self, info: DeviceInfo) -> DeviceInfo:
        if info.ban is not None:
            return info
        if any(driver.intake.holds(info.device_id) for driver in self.runs.running()):
            return replace(info, state=DeviceState.WORKING)
        if info.device_id in self.runs.parked:
            return replace(info, state=DeviceState.WAITING)
        return info

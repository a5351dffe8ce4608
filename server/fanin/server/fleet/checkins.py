"""Check-ins: long polls of devices that wait for work.

A check-in is parked until a Round has a place for the device, a resting Run has a newer Version, or its time is up. A
device has at most one parked check-in. A check-in without work costs no database access, and an Assignment costs one
only if its Run has stages.
"""

import asyncio
import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fanin.protos import messages as m
from fanin.protos.errors import FaninError
from fanin.server.access.limits import Limits
from fanin.server.access.registry import protocol_problem
from fanin.server.fleet.activity import Activity
from fanin.server.fleet.bulletin import Bulletin
from fanin.server.fleet.observer import FleetObserver, Unobserved
from fanin.server.fleet.retries import retry_window
from fanin.server.runs.catalog import Runs
from fanin.server.runs.driving.driver import RunDriver
from fanin.server.runs.driving.intake import Parked
from fanin.server.storage.protocols.devices import DeviceDirectory

MIN_REPLACED: Final = 3
"""Check-ins of a device within ``WINDOW_S`` that another one of it ended. A bad network hardly breaks so often."""
WINDOW_S: Final = 60.0
MAX_DEVICES: Final = 10_000
"""Devices in the table. A device that leaves it had its first such check-in before all others."""


class CheckIns:
    """The parked check-ins of all devices."""

    def __init__(
        self, runs: Runs, devices: DeviceDirectory, limits: Limits, rng: random.Random, activity: Activity
    ) -> None:
        self._runs = runs
        self.observer: FleetObserver = Unobserved()
        self._bulletin = Bulletin(runs)
        self._devices = devices
        self._limits = limits
        self._rng = rng
        self._activity = activity
        self._parked = runs.parked
        self._doubles = Doubles()

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        """Wait until there is work for a device, and return its Assignment.

        Args:
            device: The device's id.
            check_in: Its capabilities, the Version that it serves, and the seconds that it is willing to wait.

        Returns:
            Assigned with an Assignment, Wait with a retry window, or Rejected with a reason. Wait and Rejected carry
            the newest Version if the device serves an older one.
        """
        self._activity.see(device, check_in)
        answer = await self._answer(device, check_in)
        self.observer.answered(device, answer)
        if isinstance(answer, m.Rejected):
            self._activity.reject(device, answer.text)
        if isinstance(answer, m.Assigned):
            work = answer.assignment
            return m.Assigned(assignment=await self._runs.driver(work.run_id).intake.with_state(device, work))
        finished = self._bulletin.finished(check_in)
        return replace(answer, newest=self._bulletin.newer(device, check_in), finished=finished)

    def on_change(self) -> None:
        """Answer the devices that a change of a Run concerns."""
        self._assign(list(self._parked))
        if self._bulletin.has_changed():
            self._announce_versions(list(self._parked))

    def end(self, device: str, error: FaninError) -> None:
        """End the parked check-in of a device with an error, so that no Round selects the device."""
        parked = self._parked.pop(device, None)
        if parked is not None and not parked.answer.done():
            parked.answer.set_exception(error)

    async def stop(self) -> None:
        """Answer all parked check-ins with a short wait."""
        for parked in self._parked.values():
            if not parked.answer.done():
                parked.answer.set_result(m.Wait(retry_min_s=1.0, retry_max_s=5.0))
        self._parked.clear()

    async def _answer(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        if text := protocol_problem(check_in.protocol):
            return m.Rejected(reason=m.RejectReason.UPGRADE, text=text)
        refusals = [driver.intake.refusal(check_in.capabilities) for driver in self._runs.running()]
        if refusals and all(refusals):
            return m.Rejected(reason=m.RejectReason.UNSUITABLE, text="; ".join(refusals))
        earlier = self._parked.pop(device, None)
        if earlier is not None and not earlier.answer.done():
            # The wait keeps two processes with one key from replacing each other as fast as the network allows.
            answer: m.CheckInAnswer = m.Wait(retry_min_s=1.0, retry_max_s=5.0)
            if self._doubles.note(device, asyncio.get_running_loop().time()):
                warning = _online_twice(device)
                for driver in self._runs.running():
                    driver.warn(warning)
                # The owner of the device sees neither the Run nor the log of the coordinator.
                answer = m.Rejected(reason=m.RejectReason.UNSUITABLE, text=warning.text)
            earlier.answer.set_result(answer)
        if len(self._parked) >= self._limits.max_parked:
            retry_min_s, retry_max_s = retry_window(self._devices.num_devices)
            return m.Wait(retry_min_s=retry_min_s, retry_max_s=retry_max_s)
        return await self._park(device, check_in)

    async def _park(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        parked = Parked(check_in, asyncio.get_running_loop().create_future())
        self._parked[device] = parked
        self._assign([device])
        self._announce_versions([device])
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the answer.
            async with asyncio.timeout(min(check_in.wait_s, self._limits.max_wait_s, self._pause_s(device))):
                return await parked.answer
        except TimeoutError:
            # The device has waited already, so it may check in again at once.
            return m.Wait(retry_min_s=0.0, retry_max_s=1.0)
        finally:
            if self._parked.get(device) is parked:
                del self._parked[device]

    def _assign(self, devices: Sequence[str]) -> None:
        """Answer those of these parked devices for which there is work.

        Devices that hold an Assignment, of any Run, receive it again. Then the Plan's policy gives the free places to
        others.
        """
        running = self._runs.running()
        for driver in running:
            self._offer(driver, [device for device in devices if driver.intake.holds(device)])
        for driver in running:
            if driver.intake.num_places:
                self._offer(driver, driver.intake.select(self._suitable(devices, driver), self._rng))

    def _pause_s(self, device: str) -> float:
        """Return the seconds until a device that pauses has a chance again, infinity for all others."""
        pauses_s = (driver.intake.pause_s(device) for driver in self._runs.running())
        return min((pause_s for pause_s in pauses_s if pause_s), default=math.inf)

    def _announce_versions(self, devices: Sequence[str]) -> None:
        """Answer those of these parked devices that serve an older Version of a Run that opens no Round."""
        for device in devices:
            parked = self._parked.get(device)
            if parked is not None and not parked.answer.done():
                answer = self._bulletin.due(parked.check_in, len(devices))
                if answer is not None:
                    parked.answer.set_result(answer)

    def _offer(self, driver: RunDriver, devices: Sequence[str]) -> None:
        for device in devices:
            parked = self._parked.get(device)
            if parked is None or parked.answer.done():
                continue
            assignment = driver.intake.offer(device, reports_progress=parked.check_in.capabilities.reports_progress)
            if assignment is not None:
                del self._parked[device]
                parked.answer.set_result(m.Assigned(assignment=assignment))

    def _suitable(self, devices: Sequence[str], driver: RunDriver) -> dict[str, m.Capabilities]:
        """Return the capabilities of those of these parked devices that a Run can use."""
        # Most devices of a fleet have the same capabilities: a refusal is computed once for each kind of device.
        refusals: dict[m.Capabilities, str] = {}
        suitable = {}
        for device in devices:
            parked = self._parked.get(device)
            if parked is None or parked.answer.done():
                continue
            capabilities = parked.check_in.capabilities
            refusal = refusals.get(capabilities)
            if refusal is None:
                refusal = refusals[capabilities] = driver.intake.refusal(capabilities)
            if not refusal:
                suitable[device] = capabilities
        return suitable


def _online_twice(device: str) -> m.RunWarned:
    text = (
        f"two processes check in as device {device} and end each other's calls: they have one key, as after a copy of "
        "a state folder; stop one of them, and start it with a --state of its own"
    )
    return m.RunWarned(code="shared_key", subject=device, text=text)


class Doubles:
    """The check-ins that another one of the same device ended: two processes may have one key, as after a copy.

    A device has one check-in at a time, and a second one ends the first. A device that lost its connection does this
    once. Two processes do it again and again, because each comes back after a few seconds.
    """

    def __init__(self) -> None:
        # By device: the time of the first such check-in of a window, and their number in it.
        self._replaced: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def note(self, device: str, now: float) -> bool:
        """Note that a check-in ended an earlier one of its device. Return whether the device is online twice."""
        since, num = self._replaced.get(device, (now, 0))
        if now - since > WINDOW_S:
            self._replaced.pop(device)
            since, num = now, 0
        self._replaced[device] = since, num + 1
        if len(self._replaced) > MAX_DEVICES:
            self._replaced.popitem(last=False)
        return num + 1 >= MIN_REPLACED

"""Looks for the devices that a Run expects, and records an alarm for each cause once, and its end.

Expected are the devices that the Plan requires. In a small federation, where each device matters, these are also all
devices that took part before. A population of phones always misses some, so there it is no news.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Final

from fanin.protos.errors import NotFound
from fanin.protos.messages import DeviceInfo, DeviceQuery, RunWarned
from fanin.protos.plans.participants import ID
from fanin.server.runs.driving.course import Course
from fanin.server.runs.driving.intake import Intake, Parked
from fanin.server.runs.view import policy_code
from fanin.server.selection.absence import CODES, ExpectedDevice, alarms_of, window_of
from fanin.server.storage.stores import DriverStores

MAX_WATCHED: Final = 100
"""Most enrolled devices of a federation in which each one that took part is expected."""
MAX_REQUIRED_DEVICES: Final = 1000


class Absences:
    """The alarms of one Run.

    Args:
        course: The state of the Run.
        intake: Knows why a waiting device gets no work.
        stores: The record.
        parked: The check-ins that wait for work, by device.
    """

    def __init__(self, course: Course, intake: Intake, stores: DriverStores, parked: Mapping[str, Parked]) -> None:
        self._course = course
        self._intake = intake
        self._stores = stores
        self._parked = parked
        self._recorded: dict[tuple[str, str], RunWarned] | None = None
        self._started_s = stores.wall()

    async def look(self) -> None:
        """Record the alarms that are new, and the end of those whose cause has ended."""
        cohort = self._course.run.start.plan.cohort
        devices = [device async for device in self._expected()]
        alarms = alarms_of(devices, self._stores.wall(), window_of(cohort.deadline_s))
        if self._recorded is None:
            known = await self._stores.runs.warnings(self._course.run_id)
            self._recorded = {(each.code, each.subject): each for each in known if each.code in CODES}
        now = {(each.code, each.subject): each for each in alarms.values()}
        over = [
            RunWarned(code=each.code, subject=each.subject, text=each.text, is_over=True)
            for key, each in self._recorded.items()
            if key not in now
        ]
        new = [each for key, each in now.items() if key not in self._recorded]
        if over or new:
            await self._stores.writer.warn((*over, *new), self._stores.wall())
        # The text of a recorded alarm stays: "for 3 hours" must not become an event each minute.
        self._recorded = {key: self._recorded.get(key, each) for key, each in now.items()}

    async def _expected(self) -> AsyncIterator[ExpectedDevice]:
        course, directory = self._course, self._stores.devices
        plan = course.run.start.plan.participants
        required = {device for entry in plan.required for device in course.members.of(entry)}
        others: set[str] = set()
        if directory.num_devices <= MAX_WATCHED:
            page = await directory.device_page(DeviceQuery())
            others = {each.device_id for each in page.devices if course.participation.last_round(each.device_id)}
        for device_id in sorted(required)[:MAX_REQUIRED_DEVICES] + sorted(others - required):
            try:
                info = await directory.device(device_id)
            except NotFound:
                if ID + device_id in plan.required:
                    yield ExpectedDevice(
                        device_id=device_id, is_enrolled=False, is_required=True, known_since=self._started_s
                    )
                continue
            yield self._facts_of(info, is_required=device_id in required)

    def _facts_of(self, info: DeviceInfo, *, is_required: bool) -> ExpectedDevice:
        course, parked = self._course, self._parked.get(info.device_id)
        is_at_work = self._intake.holds(info.device_id)
        obstacle = ""
        if info.ban is not None:
            obstacle = f"it is banned: {info.ban.reason}" if is_required else ""
        elif parked is not None:
            obstacle = self._intake.refusal(parked.check_in.capabilities)
            pause_s = self._intake.pause_s(info.device_id)
            if not obstacle and pause_s and policy_code(info.last_rejection):
                obstacle = _refusal(info.last_rejection)
            elif not obstacle and pause_s:
                obstacle = f"it pauses for {pause_s:.0f} s after failures: {course.failures.newest}"
        elif not is_at_work and (info.rejected_at or 0.0) >= (info.last_seen or 0.0):
            obstacle = _refusal(info.last_rejection)
        return ExpectedDevice(
            device_id=info.device_id,
            label=info.label,
            is_required=is_required,
            known_since=max(info.enrolled_at, self._started_s),
            last_seen=info.last_seen,
            is_here=is_at_work or parked is not None,
            obstacle="" if is_at_work else obstacle,
        )


def _refusal(reason: str) -> str:
    """Return why a device was refused last, or refused the Run itself."""
    return f"it refuses the run by its policy: {reason}" if policy_code(reason) else reason

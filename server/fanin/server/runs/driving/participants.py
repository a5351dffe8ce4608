"""The participants that a Plan requires, looked up among the enrolled devices, and the coverage of a Round.

Tags belong to the record of devices, which operators change. They are read when a Round begins, when one is overdue,
and for the device of each committed Update. So no check-in reads the database.
"""

import logging
import time
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from fanin.protos.errors import InvalidPlan, NotFound
from fanin.protos.messages import Coverage, DeviceQuery, Role, RoundLacks
from fanin.protos.plans import Plan
from fanin.protos.plans.participants import ID, TAG
from fanin.protos.texts import counted
from fanin.server.runs.driving.course import Course
from fanin.server.runs.driving.shortage import shown_entry
from fanin.server.selection.coverage import MIN_DEVICES, MIN_EXAMPLES, Lack
from fanin.server.storage.protocols.devices import DeviceStore
from fanin.server.storage.protocols.tokens import TokenStore
from fanin.server.storage.stores import DriverStores

LOG: Final = logging.getLogger("fanin.server.runs.driving.participants")


class Participants:
    """The required participants of one Run.

    Args:
        course: The state of the Run. Its ``members`` are kept current.
        stores: The record.
    """

    def __init__(self, course: Course, stores: DriverStores) -> None:
        self._course = course
        self._stores = stores
        self._plan = course.run.start.plan.participants
        self._devices = stores.devices
        self._members = course.members
        self._recorded: tuple[int, Mapping[str, int]] = 0, {}

    async def refresh(self) -> None:
        """Read which devices have the required tags."""
        for name, value in self._plan.tags:
            found: set[str] = set()
            query = DeviceQuery(tags={name: value})
            while True:
                page = await self._devices.device_page(query)
                found |= {device.device_id for device in page.devices if device.ban is None}
                if not page.next:
                    break
                query = DeviceQuery(after=page.next, tags={name: value})
            self._members.learn(f"{TAG}{name}={value}", found)

    async def learn(self, device_id: str) -> None:
        """Read the tags of one device."""
        try:
            tags = (await self._devices.device(device_id)).tags
        except NotFound:
            return
        for name, value in self._plan.tags:
            entry = f"{TAG}{name}={value}"
            others = self._members.of(entry) - {device_id}
            self._members.learn(entry, others | {device_id} if tags.get(name) == value else others)

    def coverage(self, device_ids: Collection[str]) -> Coverage:
        """Return the coverage of a Round with the Updates of these devices."""
        required = {entry: len(self._members.of(entry) & set(device_ids)) for entry in self._plan.required}
        return Coverage(
            num_devices=len(device_ids), num_enrolled=self._devices.num_devices, required=MappingProxyType(required)
        )

    async def record_lack(self, round_number: int) -> None:
        """Look for missing participants among the enrolled devices, and record which are missing, once."""
        course = self._course
        await self.refresh()
        lack = Lack() if course.round is None else course.round.lack
        if not lack:
            return
        course.lack_text = await self.text_of(lack)
        if (round_number, lack.missing) != self._recorded:
            self._recorded = round_number, lack.missing
            event = RoundLacks(round=round_number, missing=lack.missing, text=course.lack_text)
            LOG.warning("run %s: round %d waits: %s", course.run_id, round_number, course.lack_text)
            await self._stores.writer.note(event, self._stores.wall())
        course.announce()

    async def text_of(self, lack: Lack) -> str:
        """Return what is missing, for operators."""
        parts = [await self._part(entry, number) for entry, number in lack.missing.items()]
        return f"required participants are missing: {', '.join(parts)}"

    async def _part(self, entry: str, number: int) -> str:
        if entry == MIN_DEVICES:
            return f"{number} of {counted(self._plan.min_devices, 'device')} (participants.min_devices)"
        if entry == MIN_EXAMPLES:
            return f"{number} of {self._plan.min_examples} examples (participants.min_examples)"
        if entry.startswith(TAG):
            known = len(self._members.of(entry))
            return f"{number} of {self._plan.required[entry]} with {entry}, which {known} enrolled have"
        device_id = entry.removeprefix(ID)
        try:
            info = await self._devices.device(device_id)
        except NotFound:
            return f"{shown_entry(entry)}, which is not enrolled"
        label = f" ({info.label!r})" if info.label else ""
        tags = ", ".join(f"{name}={value}" for name, value in sorted(info.tags.items()))
        cause = "never came"
        if info.ban is not None:
            cause = "banned"
        elif info.last_seen is not None:
            cause = time.strftime("last seen %Y-%m-%d %H:%M UTC", time.gmtime(info.last_seen))
        notes = "; ".join(text for text in (tags, cause) if text)
        return f"{shown_entry(entry)}{label}{f' [{notes}]' if notes else ''}"


async def check_tags_are_known(plan: Plan, devices: DeviceStore, tokens: TokenStore) -> None:
    """Raise InvalidPlan if a Plan requires a tag that no device and no enrollment token has."""
    for name, value in plan.participants.tags:
        query = DeviceQuery(tags={name: value})
        while True:
            page = await devices.device_page(query)
            if page.devices or not page.next:
                break
            query = DeviceQuery(after=page.next, tags={name: value})
        if page.devices or await _is_of_a_token(name, value, tokens):
            continue
        raise InvalidPlan(
            f"plan: participants.required: got {f'{TAG}{name}={value}'!r}, but no device and no enrollment token has "
            "this tag, expected a known one; correct it, or give it to devices first",
            code="FN-1504",
        )


async def _is_of_a_token(name: str, value: str, tokens: TokenStore) -> bool:
    after = ""
    while True:
        page = await tokens.token_page(after, (Role.DEVICE,))
        if any(token.tags.get(name) == value for token in page.tokens):
            return True
        if not page.next:
            return False
        after = page.next

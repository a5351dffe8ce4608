"""Rounds and Updates in memory, to read."""

from collections.abc import Sequence

from fanin.protos.messages import MAX_PAGE_DEVICES, AcceptedDevices, UpdateHeader, Version
from fanin.server.storage.memory.database import MemoryDatabase
from fanin.server.storage.memory.runs import MemoryRunArchive
from fanin.server.storage.origins import recorded_grid, recorded_state, recorded_steps
from fanin.server.storage.records import (
    CommittedUpdate,
    Contributors,
    OuterState,
    Roster,
    RoundMark,
    RoundMessage,
    RoundRecord,
    RoundSummary,
)


class MemoryRoundArchive:
    """``RoundArchive`` and ``MessageArchive`` in memory."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database

    def rounds(self, run_id: str) -> tuple[RoundRecord, ...]:
        """See ``RoundArchive.rounds``."""
        rows = self._database.runs.get(run_id)
        return () if rows is None else tuple(rows.rounds.values())

    def round(self, run_id: str, number: int) -> RoundRecord | None:
        """See ``RoundArchive.round``."""
        return self._database.runs[run_id].rounds.get(number)

    def updates(self, run_id: str, round_number: int) -> tuple[CommittedUpdate, ...]:
        """See ``RoundArchive.updates``."""
        return tuple(self._database.runs[run_id].updates[round_number].values())

    def messages(self, run_id: str, round_number: int) -> tuple[RoundMessage, ...]:
        """See ``MessageArchive.messages``."""
        return tuple(self._database.runs[run_id].messages[round_number].values())

    def rosters(self, run_id: str, round_number: int) -> tuple[Roster, ...]:
        """See ``MessageArchive.rosters``."""
        return tuple(self._database.runs[run_id].rosters[round_number])

    def noise_seed(self, run_id: str, round_number: int) -> bytes | None:
        """See ``RoundArchive.noise_seed``."""
        return self._database.runs[run_id].seeds.get(round_number)

    def grid_after(self, run_id: str, version: int) -> tuple[int, ...] | None:
        """See ``RoundArchive.grid_after``."""
        rows = self._database.runs[run_id]
        published = rows.rounds.get(rows.round_by_version[version])
        return None if published is None else published.next_grid

    def outer_state(self, run_id: str, round_number: int) -> OuterState:
        """See ``RoundArchive.outer_state``."""
        return self._database.runs[run_id].outer_states.get(round_number, {})

    def outer_state_after(self, run_id: str, version: int) -> OuterState:
        """See ``RoundArchive.outer_state_after``."""
        return self.outer_state(run_id, self._database.runs[run_id].round_by_version[version])


class MemoryMessages:
    """``MessageStore`` in memory."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self._archive = MemoryRoundArchive(database)

    async def message(self, run_id: str, round_number: int, phase: str, device_id: str) -> bytes | None:
        """See ``MessageStore.message``."""
        message = self._database.runs[run_id].messages[round_number].get((phase, device_id))
        return None if message is None else message.payload

    async def messages(self, run_id: str, round_number: int) -> tuple[RoundMessage, ...]:
        """See ``MessageStore.messages``."""
        return self._archive.messages(run_id, round_number)

    async def senders(self, run_id: str, round_number: int, phase: str) -> tuple[str, ...]:
        """See ``MessageStore.senders``."""
        return tuple(device for name, device in self._database.runs[run_id].messages[round_number] if name == phase)

    async def rosters(self, run_id: str, round_number: int) -> tuple[Roster, ...]:
        """See ``MessageStore.rosters``."""
        return self._archive.rosters(run_id, round_number)


class MemoryRounds:
    """``RoundRecords`` in memory."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self._runs = MemoryRunArchive(database)
        self._archive = MemoryRoundArchive(database)

    async def last(self, run_id: str) -> RoundRecord | None:
        """See ``RoundStore.last``."""
        rows = self._database.runs.get(run_id)
        return None if rows is None else next(reversed(rows.rounds.values()), None)

    async def unfinished(self, run_id: str) -> RoundRecord | None:
        """See ``RoundStore.unfinished``."""
        last = await self.last(run_id)
        return None if last is None or last.mark.is_final else last

    async def since(self, run_id: str, base_version: int) -> tuple[RoundRecord, ...]:
        """See ``RoundStore.since``."""
        return tuple(record for record in self._archive.rounds(run_id) if record.base_version >= base_version)

    async def latest(self, run_id: str, limit: int) -> tuple[RoundSummary, ...]:
        """See ``RoundStore.latest``."""
        newest = reversed(self._archive.rounds(run_id)[-limit:])
        return tuple(self._database.runs[run_id].summary(record) for record in newest)

    async def num_published(self, run_id: str) -> int:
        """See ``RoundStore.num_published``."""
        return self._database.runs[run_id].num_published

    async def contributors(self, run_id: str) -> Contributors:
        """See ``RoundStore.contributors``."""
        rounds = [record for record in self._archive.rounds(run_id) if record.mark is RoundMark.PUBLISHED]
        devices = [device for record in rounds for device in record.accepted]
        forgotten = self._database.runs[run_id].contributions
        num_updates = len(devices) + sum(number for number, _, _ in forgotten.values())
        return Contributors(num_updates=num_updates, num_devices=len(set(devices) | set(forgotten)))

    async def accepted_devices(self, run_id: str, round_number: int, from_index: int) -> AcceptedDevices | None:
        """See ``RoundStore.accepted_devices``."""
        record = self._database.runs[run_id].rounds.get(round_number)
        if record is None:
            return None
        page = record.accepted[from_index : from_index + MAX_PAGE_DEVICES]
        return AcceptedDevices(num_accepted=record.num_accepted, device_ids=page)

    async def update(self, run_id: str, made_for: int, device_id: str) -> CommittedUpdate | None:
        """See ``CommittedUpdates.update``."""
        return self._database.runs[run_id].updates_by_assigned_round[made_for].get(device_id)

    async def updates(self, run_id: str, round_number: int) -> tuple[CommittedUpdate, ...]:
        """See ``CommittedUpdates.updates``."""
        return self._archive.updates(run_id, round_number)

    async def updates_of(self, run_id: str, round_number: int, devices: Sequence[str]) -> tuple[CommittedUpdate, ...]:
        """See ``CommittedUpdates.updates_of``."""
        return tuple(update for update in self._archive.updates(run_id, round_number) if update.device_id in devices)

    async def last_folded(self, run_id: str, device_id: str, *, lineage: int) -> int:
        """See ``CommittedUpdates.last_folded``."""
        rows = self._database.runs[run_id]
        folded = (
            rows.updates[record.round][device_id].header.round
            for record in reversed(rows.rounds.values())
            if record.mark is RoundMark.PUBLISHED
            and record.base_version >= lineage
            and device_id in rows.updates[record.round]
        )
        if (made_for := next(folded, None)) is not None:
            return made_for
        _, last, made_for = rows.contributions.get(device_id, (0, 0, 0))
        return made_for if last and rows.rounds[last].base_version >= lineage else 0

    async def headers_made_for(self, run_id: str, round_number: int) -> dict[str, UpdateHeader]:
        """See ``CommittedUpdates.headers_made_for``."""
        rows = self._database.runs[run_id]
        return {
            device: update.header
            for device, update in rows.updates_by_assigned_round[round_number].items()
            if rows.rounds[update.round].mark is not RoundMark.FAILED
        }

    async def recorded_grid(self, base: Version) -> tuple[int, ...] | None:
        """See ``OriginStore.recorded_grid``."""
        return recorded_grid(base, self._runs, self._archive)

    async def recorded_state(self, base: Version) -> OuterState:
        """See ``OriginStore.recorded_state``."""
        return recorded_state(base, self._runs, self._archive)

    async def recorded_steps(self, base: Version) -> int:
        """See ``OriginStore.recorded_steps``."""
        return recorded_steps(base, self._runs)

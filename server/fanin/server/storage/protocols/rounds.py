"""Rounds and Updates, as any process reads them. Only the driver of a Run writes them (``leases.RunWriter``)."""

from collections.abc import Sequence
from typing import Final, Protocol

from fanin.protos.messages import AcceptedDevices, UpdateHeader, Version
from fanin.server.storage.records import (
    CommittedUpdate,
    Contributors,
    OuterState,
    Roster,
    RoundMessage,
    RoundRecord,
    RoundSummary,
)

PAGE_UPDATES: Final = 256
"""Largest number of devices in one query for Updates. A header has some 2 kB for each 16 MiB of its payload."""


class RoundStore(Protocol):
    """The Rounds of the Runs."""

    async def last(self, run_id: str) -> RoundRecord | None:
        """Return the newest Round of a Run, or None without one."""
        ...

    async def unfinished(self, run_id: str) -> RoundRecord | None:
        """Return the newest Round of a Run if it is open or closed, None if it has ended or there is none."""
        ...

    async def since(self, run_id: str, base_version: int) -> tuple[RoundRecord, ...]:
        """Return the Rounds of a Run on this Version or a later one, oldest first."""
        ...

    async def latest(self, run_id: str, limit: int) -> tuple[RoundSummary, ...]:
        """Return the last ``limit`` Rounds of a Run, newest first."""
        ...

    async def num_published(self, run_id: str) -> int:
        """Return the number of Rounds of a Run that published a Version."""
        ...

    async def contributors(self, run_id: str) -> Contributors:
        """Return the numbers of Updates and of their devices in the Rounds of a Run that published a Version."""
        ...

    async def accepted_devices(self, run_id: str, round_number: int, from_index: int) -> AcceptedDevices | None:
        """Return a page of the devices whose Updates a closed Round accepted.

        Args:
            run_id: The Run.
            round_number: The number of the Round.
            from_index: The place of the first device in the order of acceptance.

        Returns:
            The number of all accepted devices, and up to ``MAX_PAGE_DEVICES`` of them. Both are empty before the Round
            is closed. None if there is no such Round.
        """
        ...


class CommittedUpdates(Protocol):
    """The committed Updates of the Rounds."""

    async def update(self, run_id: str, made_for: int, device_id: str) -> CommittedUpdate | None:
        """Return the accepted Update of a device for a Round, or None without one."""
        ...

    async def updates(self, run_id: str, round_number: int) -> tuple[CommittedUpdate, ...]:
        """Return the Updates that a Round folds, in the order of their commits."""
        ...

    async def updates_of(self, run_id: str, round_number: int, devices: Sequence[str]) -> tuple[CommittedUpdate, ...]:
        """Return the Updates of some devices that a Round folds, in any order; none for a device without one.

        Args:
            run_id: The Run.
            round_number: The number of the Round.
            devices: At most ``PAGE_UPDATES`` devices.
        """
        ...

    async def headers_made_for(self, run_id: str, round_number: int) -> dict[str, UpdateHeader]:
        """Return the accepted Updates for a Round, by device. Any Round may fold them.

        Updates in failed Rounds are left out, because no Version is ever computed from them.
        """
        ...

    async def last_folded(self, run_id: str, device_id: str, *, lineage: int) -> int:
        """Return the Round that the last Update of a device in a Version of a lineage was made for, 0 without one.

        Devices name a state by the Round of its Assignment. A stale Update is folded in a later Round.

        Args:
            run_id: The Run.
            device_id: The device.
            lineage: The Version with which the lineage starts. Rounds before it started from lower Versions.
        """
        ...


class MessageStore(Protocol):
    """The messages of the phases of the Rounds, and their rosters."""

    async def message(self, run_id: str, round_number: int, phase: str, device_id: str) -> bytes | None:
        """Return the recorded message of a device in a phase, or None without one."""
        ...

    async def messages(self, run_id: str, round_number: int) -> tuple[RoundMessage, ...]:
        """Return all messages of a Round, in the order of their commits; none if its Updates were removed."""
        ...

    async def senders(self, run_id: str, round_number: int, phase: str) -> tuple[str, ...]:
        """Return the devices with a message of a phase, in the order of their commits."""
        ...

    async def rosters(self, run_id: str, round_number: int) -> tuple[Roster, ...]:
        """Return the rosters of a Round, in the order of the phases."""
        ...


class OriginStore(Protocol):
    """The recorded grid and outer state at the start of a Round (``storage.origins``)."""

    async def recorded_grid(self, base: Version) -> tuple[int, ...] | None:
        """Return the recorded grid of a Version: an exponent for each block, or None without a record."""
        ...

    async def recorded_state(self, base: Version) -> OuterState:
        """Return the recorded outer state of a Version, empty without a record."""
        ...

    async def recorded_steps(self, base: Version) -> int:
        """Return the number of outer steps that led to a Version from the optimizer's initial state."""
        ...


class RoundRecords(RoundStore, CommittedUpdates, OriginStore, Protocol):
    """Everything that is recorded of Rounds."""

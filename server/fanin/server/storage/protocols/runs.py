"""Bundles, Runs, Versions and events."""

from collections.abc import Collection
from typing import Final, Protocol

from fanin.protos.chunks import Artifact
from fanin.protos.messages import (
    BundleRef,
    LoggedEvent,
    Principal,
    RunState,
    RunWarned,
    StartRun,
    Version,
    VersionPublished,
)
from fanin.server.storage.records import RunRecord

PAGE_EVENTS: Final = 100
"""Largest number of events in a page. Each has at most some 40 kB."""


class BundleStore(Protocol):
    """The Bundles that operators published."""

    async def add_bundle(self, bundle: BundleRef) -> None:
        """Record a Bundle under the digest of its manifest. A known Bundle is not changed.

        Args:
            bundle: A Bundle that passed verification.
        """
        ...

    async def bundle(self, sha256: str) -> BundleRef | None:
        """Return a Bundle.

        Args:
            sha256: The digest of its manifest.

        Returns:
            The Bundle, or None if it is not recorded.
        """
        ...

    async def bundles(self) -> tuple[BundleRef, ...]:
        """Return all Bundles. Raises Corrupted if one record is damaged."""
        ...

    async def artifact_page(self, after: int) -> tuple[tuple[Artifact, ...], int | None]:
        """Return some of the Artifacts of Versions and outer states: all bytes that the record names beside Bundles.

        Args:
            after: 0 for the first page, then the number that came with the page before.

        Returns:
            The Artifacts, and the number for the next page, None after the last one. Pages have every Artifact that
            was recorded before the first one was read.

        Raises:
            Corrupted: A record is damaged.
        """
        ...


class RunStore(Protocol):
    """The Runs, and the keys that sign their Versions."""

    async def run_key(self, run_id: str, epoch: int, new_key: bytes, now_s: float) -> bytes:
        """Return the private key of one epoch of a Run.

        Args:
            run_id: The Run. It may not be recorded yet.
            epoch: The epoch: of the Run or the next one, or ``FIRST_EPOCH`` of a Run that is not recorded.
            new_key: Becomes the key if there is none.
            now_s: Wall time, in seconds.

        Returns:
            The key: the same bytes for every caller, until the Run has a later epoch.

        Raises:
            Conflict: The Run has another epoch, or it has this one and the key is lost.
        """
        ...

    async def remove_unused_keys(self, before_s: float) -> int:
        """Remove the keys that no Run uses and that were created before a wall time. Returns their number."""
        ...

    async def add_run(self, start: StartRun, now_s: float, by: Principal | None = None) -> None:
        """Record a Run that is running, its Version 0, and its population unless that is recorded.

        Args:
            start: The command that starts the Run.
            now_s: Wall time, in seconds.
            by: The principal that starts the Run.

        Raises:
            Conflict: A Run of this id is recorded, or the budget of its population is smaller than that of its Plan.
        """
        ...

    async def run_ids(self, states: Collection[RunState] = ()) -> tuple[str, ...]:
        """Return the ids of the Runs in any of these states, oldest first, also of those whose record is damaged.

        Without states, return the ids of all Runs.
        """
        ...

    async def run(self, run_id: str) -> RunRecord | None:
        """Return the Run of an id, or None without one. Raises Corrupted if its record is damaged."""
        ...

    async def run_state(self, run_id: str) -> RunState:
        """Return the state of a recorded Run, also if the rest of its record is damaged."""
        ...


class VersionStore(Protocol):
    """The Versions of the Runs."""

    async def version(self, run_id: str, number: int | None = None) -> Version | None:
        """Return a Version.

        Args:
            run_id: The Run.
            number: The number of the Version, None for the newest one.

        Returns:
            The Version, or None if there is no such Version.
        """
        ...

    async def newest_version(self, run_id: str) -> Version:
        """Return the newest Version of a Run that is recorded."""
        ...

    async def lineage_start(self, run_id: str, until: int | None = None) -> int:
        """See ``RunArchive.lineage_start``."""
        ...

    async def publication(self, run_id: str, number: int) -> VersionPublished | None:
        """Return the event that published a Version, or None without one (Version 0 has none)."""
        ...


class EventStore(Protocol):
    """The events of the Runs, numbered from 1 without gaps in each Run."""

    async def event_page(self, run_id: str, from_sequence: int) -> tuple[LoggedEvent, ...]:
        """Return the next events of a Run.

        Args:
            run_id: The Run.
            from_sequence: The first sequence number.

        Returns:
            Up to ``PAGE_EVENTS`` events in order, none after the last event.
        """
        ...

    async def newest_sequence(self, run_id: str) -> int:
        """Return the sequence number of a Run's newest event, 0 without one."""
        ...

    async def warnings(self, run_id: str) -> tuple[RunWarned, ...]:
        """Return the warnings of a Run, oldest first."""
        ...


class RunRecords(BundleStore, RunStore, VersionStore, EventStore, Protocol):
    """Everything that is recorded of Runs, besides their Rounds."""

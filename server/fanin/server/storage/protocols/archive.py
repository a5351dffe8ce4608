"""The record of Runs, read synchronously: for verification, which runs in a separate process without an event loop.

A store whose record ``fanin verify`` can read implements these Protocols besides the async ones.
"""

from collections.abc import Iterator
from typing import Protocol

from fanin.protos.messages import BundleRef, LoggedEvent, Version
from fanin.server.storage.protocols.retention import Removed
from fanin.server.storage.records import CommittedUpdate, OuterState, Roster, RoundMessage, RoundRecord, RunRecord


class RunArchive(Protocol):
    """Runs, their Bundles and Versions."""

    def run(self, run_id: str) -> RunRecord | None:
        """Return the Run of an id, or None without one."""
        ...

    def bundle(self, sha256: str) -> BundleRef | None:
        """Return the Bundle of a digest, or None if it is not recorded."""
        ...

    def version(self, run_id: str, number: int | None = None) -> Version | None:
        """Return a Version by number, or the newest one. None if there is no such Version."""
        ...

    def events(self, run_id: str) -> Iterator[LoggedEvent]:
        """Yield all events of a Run, oldest first."""
        ...

    def round_by_version(self, run_id: str) -> dict[int, int]:
        """Return, for each Version's number, the Round that published it; 0 for a Version from outside."""
        ...

    def lineage_start(self, run_id: str, until: int | None = None) -> int:
        """Return the number of the newest Version that no Round published: Version 0, or a later one from outside.

        Args:
            run_id: The Run.
            until: The newest Version that counts; None: the newest one of the Run.
        """
        ...

    def removed(self, run_id: str) -> Removed:
        """Return what retention removed of a Run."""
        ...

    def adopted(self, run_id: str, version: int) -> tuple[str, int] | None:
        """Return the source of a Version that a rollback or a promotion published, or None for any other Version.

        Returns:
            The Run and the number of the Version with the same parameters.
        """
        ...


class RoundArchive(Protocol):
    """Rounds, their Updates and results."""

    def rounds(self, run_id: str) -> tuple[RoundRecord, ...]:
        """Return all Rounds of a Run, oldest first. Raises Corrupted if one record is damaged."""
        ...

    def round(self, run_id: str, number: int) -> RoundRecord | None:
        """Return a Round, or None without one. Raises Corrupted if its record is damaged."""
        ...

    def updates(self, run_id: str, round_number: int) -> tuple[CommittedUpdate, ...]:
        """Return the Updates of a Round, in the order of their commits."""
        ...

    def grid_after(self, run_id: str, version: int) -> tuple[int, ...] | None:
        """Return the final grid of the Round that published a Version, or None if no Round published it."""
        ...

    def outer_state(self, run_id: str, round_number: int) -> OuterState:
        """Return the state of the outer optimizer after a Round, empty if its optimizer has none."""
        ...

    def noise_seed(self, run_id: str, round_number: int) -> bytes | None:
        """Return the seed of the noise of a Round, None if there is none or it was erased."""
        ...

    def outer_state_after(self, run_id: str, version: int) -> OuterState:
        """Return the outer state that belongs to a Version, empty without one."""
        ...


class MessageArchive(Protocol):
    """The messages of the phases of Rounds, and their rosters."""

    def messages(self, run_id: str, round_number: int) -> tuple[RoundMessage, ...]:
        """Return all messages of the phases of a Round, in the order of their commits."""
        ...

    def rosters(self, run_id: str, round_number: int) -> tuple[Roster, ...]:
        """Return the rosters of a Round, in the order of the phases."""
        ...

"""The removal of what a Run no longer needs, as a store records it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from fanin.protos.chunks import Artifact
from fanin.protos.messages import UpdateHeader
from fanin.protos.plans import RetentionPlan
from fanin.server.storage.retention import Removable, RunFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What retention removed of a Run: the wall time of each removal.

    Attributes:
        versions: By the number of the Version whose parameters were removed.
        rounds: By the number of the Round whose Updates were removed.
    """

    versions: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    rounds: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRound:
    """A Round whose Updates are recorded as removed, while their payloads may still be stored: (header, device)."""

    run_id: str
    round: int
    updates: tuple[tuple[UpdateHeader, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingVersion:
    """A Version whose parameters are recorded as removed, while their Chunks may still be stored."""

    run_id: str
    number: int
    artifacts: tuple[Artifact, ...]


class RetentionStore(Protocol):
    """What retention removes. The record of a removal comes before the removal."""

    async def facts(self, run_id: str) -> RunFacts:
        """Return what is stored of a Run, as far as retention reads it."""
        ...

    async def contents(
        self, run_id: str, what: Removable
    ) -> tuple[tuple[PendingVersion, ...], tuple[PendingRound, ...], int]:
        """Return the Artifacts, the Updates and the number of events of what could be removed."""
        ...

    async def remove(self, run_id: str, retention: RetentionPlan, now_s: float) -> Removable:
        """Record as removed what the limits do not keep, and remove the events, in one transaction."""
        ...

    async def pending_rounds(self) -> tuple[PendingRound, ...]:
        """Return some of the Rounds whose payloads may still be stored, none if there are none."""
        ...

    async def pending_versions(self) -> tuple[PendingVersion, ...]:
        """Return all Versions whose Chunks may still be stored."""
        ...

    async def finish(self, pending: PendingRound | PendingVersion, now_s: float) -> None:
        """Record that the bytes are gone."""
        ...

    async def forget(self, run_id: str) -> int:
        """Replace the Updates of some Rounds of a Run by a digest of their set and counts.

        A Round is forgotten after ``finish``, once no later Round can count an Update that was made for it. A failed
        Round before it is forgotten, too. The counts of devices stay (``contributors``, ``last_folded``).

        Returns:
            The number of Rounds; 0 if none is left.
        """
        ...

    async def give_back(self) -> bool:
        """Return some of the free space of the database to the disk. Return whether more is left."""
        ...

    async def removed(self, run_id: str) -> Removed:
        """Return what was removed of a Run."""
        ...

"""The record as people read it: newest first, in pages.

Nothing of a Round depends on these reads. They never wait for a transaction of a Round, nor a Round for them.
"""

from collections.abc import Collection
from typing import Protocol

from fanin.protos.messages import LoggedEvent, VersionEvaluation
from fanin.server.storage.records import FeedEntry, RoundSummary, VersionRow


class HistoryStore(Protocol):
    """Pages of the record."""

    async def feed(self, before: int | None, limit: int, run_id: str = "") -> tuple[FeedEntry, ...]:
        """Return events, newest first.

        Args:
            before: The position of an entry: only older ones are returned. None begins with the newest.
            limit: The largest number of events.
            run_id: Only events of this Run; "" for all Runs.
        """
        ...

    async def feed_after(self, after: int, limit: int) -> tuple[FeedEntry, ...]:
        """Return the events of all Runs after a position, oldest first. A position of 0 precedes all of them."""
        ...

    async def rounds_before(self, run_id: str, before: int | None, limit: int) -> tuple[RoundSummary, ...]:
        """Return Rounds of a Run with a number below ``before``, newest first. None begins with the newest."""
        ...

    async def versions_before(self, run_id: str, before: int | None, limit: int) -> tuple[VersionRow, ...]:
        """Return Versions of a Run with a number below ``before``, newest first. None begins with the newest."""
        ...

    async def publications(self, run_id: str, limit: int) -> tuple[LoggedEvent, ...]:
        """Return events that published Versions, oldest first: all of them if there are few, else evenly spaced ones.

        Args:
            run_id: The Run.
            limit: The largest number of events. The newest publication is always one of them.
        """
        ...

    async def evaluations_of(self, run_id: str, versions: Collection[int]) -> tuple[VersionEvaluation, ...]:
        """Return the evaluations on held-out data of these Versions, in the order of the Versions."""
        ...

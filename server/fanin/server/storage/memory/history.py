"""The record in pages, in memory."""

from collections.abc import Collection, Iterator
from heapq import merge

from fanin.protos.messages import LoggedEvent, VersionEvaluation, VersionPublished
from fanin.server.storage.memory.database import MemoryDatabase, RunRows
from fanin.server.storage.records import FeedEntry, RoundSummary, VersionRow


class MemoryHistory:
    """``HistoryStore`` in memory. The position of an event is its place in the order of the times of all events."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database

    async def feed(self, before: int | None, limit: int, run_id: str = "") -> tuple[FeedEntry, ...]:
        """See ``HistoryStore.feed``."""
        entries = [each for each in self._entries() if not run_id or each.run_id == run_id]
        older = [each for each in entries if before is None or each.position < before]
        return tuple(older[::-1][:limit])

    async def feed_after(self, after: int, limit: int) -> tuple[FeedEntry, ...]:
        """See ``HistoryStore.feed_after``."""
        return tuple([each for each in self._entries() if each.position > after][:limit])

    async def rounds_before(self, run_id: str, before: int | None, limit: int) -> tuple[RoundSummary, ...]:
        """See ``HistoryStore.rounds_before``."""
        rows = self._rows(run_id)
        numbers = sorted((each for each in rows.rounds if before is None or each < before), reverse=True)
        return tuple(rows.summary(rows.rounds[number]) for number in numbers[:limit])

    async def versions_before(self, run_id: str, before: int | None, limit: int) -> tuple[VersionRow, ...]:
        """See ``HistoryStore.versions_before``."""
        rows = self._rows(run_id)
        times = {one.event.number: one.time for one in rows.events if isinstance(one.event, VersionPublished)}
        numbers = sorted((each for each in rows.versions if before is None or each < before), reverse=True)
        return tuple(
            VersionRow(
                version=rows.versions[number],
                round=rows.round_by_version[number],
                published=rows.publication(number),
                time_s=times.get(number),
            )
            for number in numbers[:limit]
        )

    async def publications(self, run_id: str, limit: int) -> tuple[LoggedEvent, ...]:
        """See ``HistoryStore.publications``."""
        every = [each for each in self._rows(run_id).events if isinstance(each.event, VersionPublished)]
        if len(every) <= limit:
            return tuple(every)
        return (*(every[index * len(every) // limit] for index in range(limit - 1)), every[-1])

    async def evaluations_of(self, run_id: str, versions: Collection[int]) -> tuple[VersionEvaluation, ...]:
        """See ``HistoryStore.evaluations_of``."""
        evaluations = self._rows(run_id).evaluations
        return tuple(evaluations[number][0] for number in sorted(evaluations) if number in versions)

    def _rows(self, run_id: str) -> RunRows:
        return self._database.runs[run_id]

    def _entries(self) -> Iterator[FeedEntry]:
        feeds = [
            [(one.time, index, one.sequence, run_id, one) for one in rows.events]
            for index, (run_id, rows) in enumerate(self._database.runs.items())
        ]
        for position, (_, _, _, run_id, logged) in enumerate(merge(*feeds, key=lambda row: row[:3]), start=1):
            yield FeedEntry(position=position, run_id=run_id, logged=logged)

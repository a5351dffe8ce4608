"""Group commit: waiting calls share the next transaction, and no call is answered before it is durable."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from support.stored import committed_update
from support.values import RUN

from fanin.protos.errors import StorageFull, Superseded
from fanin.server.storage.records import CommittedUpdate, Lease
from fanin.server.storage.sqlite.laned import GroupCommit
from fanin.server.storage.sqlite.writer import Candidate, Verdict
from fanin.simulation import run_virtual

T = TypeVar("T")


class CountingStore:
    """A store that accepts every Update, or none while the disk is full. It records the groups of each commit."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self.is_full = False

    def commit(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        """Commit the group in one transaction."""
        devices = [candidate.update.device_id for candidate in candidates]
        self.groups.append(devices)
        if self.is_full:
            raise StorageFull("the database cannot grow")
        verdicts: dict[str, Verdict] = {"late": None, "old": Superseded("another driver has taken the run")}
        return [verdicts.get(item.update.device_id, item.update) for item in candidates]


async def slow_lane(work: Callable[[], T]) -> T:
    """Run the work as on a disk that needs a second to sync."""
    await asyncio.sleep(1.0)
    return work()


def candidate_of(device: str) -> Candidate:
    return Candidate(update=committed_update(device), buffer=9, lease=Lease(run_id=RUN, epoch=1, holder="here"))


def test_calls_during_a_sync_share_the_next_one() -> None:
    async def main() -> None:
        store = CountingStore()
        commits = GroupCommit(store.commit, slow_lane)
        clock = asyncio.get_running_loop().time
        start_s = clock()

        async def commit_after(device: str, after_s: float) -> tuple[CommittedUpdate | None, float]:
            await asyncio.sleep(after_s)
            return await commits.commit(candidate_of(device)), clock() - start_s

        devices = {"a": 0.0, "b": 0.1, "late": 0.2, "c": 0.9, "d": 5.0}
        outcomes = await asyncio.gather(*(commit_after(device, after_s) for device, after_s in devices.items()))
        assert store.groups == [["a"], ["b", "late", "c"], ["d"]]
        assert [result and result.device_id for result, _ in outcomes] == ["a", "b", None, "c", "d"]
        assert [duration_s for _, duration_s in outcomes] == pytest.approx([1.0, 2.0, 2.0, 2.0, 6.0])

    run_virtual(main())


def test_a_full_disk_fails_all_waiting_calls_and_later_calls_succeed() -> None:
    async def main() -> None:
        store = CountingStore()
        commits = GroupCommit(store.commit, slow_lane)
        store.is_full = True
        calls = (commits.commit(candidate_of(device)) for device in "ab")
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StorageFull, StorageFull]
        store.is_full = False
        assert await commits.commit(candidate_of("a")) is not None

    run_virtual(main())


def test_a_device_that_hangs_up_does_not_block_the_others() -> None:
    async def main() -> None:
        commits = GroupCommit(CountingStore().commit, slow_lane)
        abandoned_call = asyncio.create_task(commits.commit(candidate_of("a")))
        await asyncio.sleep(0.1)
        abandoned_call.cancel()
        result = await commits.commit(candidate_of("b"))
        assert result is not None

    run_virtual(main())


def test_a_superseded_driver_does_not_block_the_commits_of_others() -> None:
    async def main() -> None:
        commits = GroupCommit(CountingStore().commit, slow_lane)
        calls = (commits.commit(candidate_of(device)) for device in ("a", "old", "b"))
        first, error, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(error, Superseded)
        assert [isinstance(result, CommittedUpdate) and result.device_id for result in (first, second)] == ["a", "b"]

    run_virtual(main())

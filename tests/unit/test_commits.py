"""Group commit: waiting calls share the next transaction, and no call is answered before it is durable."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from support.values import assignment, update

from fanin.clients.testing import run_virtual
from fanin.protos.errors import StorageFull, Superseded
from fanin.server.storage.records import CommittedUpdate, Lease
from fanin.server.storage.sqlite.commits import GroupCommit
from fanin.server.storage.sqlite.writer import Candidate, Verdict

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
        return [verdicts.get(one.update.device_id, one.update) for one in candidates]


async def slow(work: Callable[[], T]) -> T:
    """Run the work as on a disk that needs a second to sync."""
    await asyncio.sleep(1.0)
    return work()


def made_by(device: str) -> Candidate:
    header, _ = update(assignment(device=device))
    made = CommittedUpdate(device_id=device, round=1, header=header)
    return Candidate(update=made, buffer=9, lease=Lease(run_id=header.run_id, epoch=1, holder="here"))


def test_those_who_come_during_a_sync_share_the_next_one() -> None:
    async def main() -> None:
        store = CountingStore()
        commits = GroupCommit(store.commit, slow)
        clock = asyncio.get_running_loop().time
        began = clock()

        async def one(device: str, after_s: float) -> tuple[CommittedUpdate | None, float]:
            await asyncio.sleep(after_s)
            return await commits.commit(made_by(device)), clock() - began

        devices = {"a": 0.0, "b": 0.1, "late": 0.2, "c": 0.9, "d": 5.0}
        outcomes = await asyncio.gather(*(one(device, after_s) for device, after_s in devices.items()))
        assert store.groups == [["a"], ["b", "late", "c"], ["d"]]
        assert [found and found.device_id for found, _ in outcomes] == ["a", "b", None, "c", "d"]
        assert [took_s for _, took_s in outcomes] == pytest.approx([1.0, 2.0, 2.0, 2.0, 6.0])

    run_virtual(main())


def test_all_hear_of_a_full_disk_and_the_next_ones_are_tried_again() -> None:
    async def main() -> None:
        store = CountingStore()
        commits = GroupCommit(store.commit, slow)
        store.is_full = True
        calls = (commits.commit(made_by(device)) for device in "ab")
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StorageFull, StorageFull]
        store.is_full = False
        assert await commits.commit(made_by("a")) is not None

    run_virtual(main())


def test_a_device_that_hangs_up_does_not_keep_the_others_waiting() -> None:
    async def main() -> None:
        commits = GroupCommit(CountingStore().commit, slow)
        gone = asyncio.create_task(commits.commit(made_by("a")))
        await asyncio.sleep(0.1)
        gone.cancel()
        found = await commits.commit(made_by("b"))
        assert found is not None

    run_virtual(main())


def test_a_driver_that_was_superseded_does_not_keep_the_updates_of_others_from_their_commit() -> None:
    async def main() -> None:
        commits = GroupCommit(CountingStore().commit, slow)
        calls = (commits.commit(made_by(device)) for device in ("a", "old", "b"))
        first, refused, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(refused, Superseded)
        assert [isinstance(one, CommittedUpdate) and one.device_id for one in (first, second)] == ["a", "b"]

    run_virtual(main())

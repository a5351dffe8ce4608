"""Errors after a successful commit: the recorded transition is found, and the machine learns of it once.

The tests run the production coordinator on a virtual clock, with a store whose answers are lost.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.staleness import assignment, send, settle
from support.virtual import Place, bundle_in, open_place, place_over, plan, start

from fanin.protos import messages as m
from fanin.protos.errors import Unavailable
from fanin.protos.messages import RoundFailed, RoundOpened, RunState, Version, VersionPublished
from fanin.server.aggregation.verify import verify_run
from fanin.server.storage.protocols.leases import LeaseStore, RunWriter
from fanin.server.storage.records import CommittedUpdate, RoundRecord
from fanin.simulation import run_virtual

PLAN = plan(concurrency=2, buffer=2, quorum=2, max_rounds=2)


class LossyWriter:
    """A writer that loses, after the transaction, the answer to the first call of each name in ``losses``."""

    def __init__(self, writer: RunWriter, losses: set[str]) -> None:
        self.lease = writer.lease
        self.set_deadline = writer.set_deadline
        self.rest = writer.rest
        self._writer = writer
        self._losses = losses

    def _lose(self, name: str) -> None:
        if name in self._losses:
            self._losses.remove(name)
            raise Unavailable("the answer was lost")

    async def open(self, record: RoundRecord) -> bool:
        """See RoundWriter."""
        answer = await self._writer.open(record)
        self._lose("open")
        return answer

    async def commit(self, update: CommittedUpdate, *, buffer: int) -> CommittedUpdate | None:
        """See RoundWriter."""
        answer = await self._writer.commit(update, buffer=buffer)
        self._lose("commit")
        return answer

    async def close(self, round_number: int, **keywords: object) -> RoundRecord:
        """See RoundWriter."""
        answer = await self._writer.close(round_number, **keywords)
        self._lose("close")
        return answer

    async def publish(self, version: Version, event: VersionPublished, **keywords: object) -> RoundRecord:
        """See RoundWriter."""
        answer = await self._writer.publish(version, event, **keywords)
        self._lose("publish")
        return answer

    async def fail(self, round_number: int, **keywords: object) -> RoundRecord:
        """See RoundWriter."""
        answer = await self._writer.fail(round_number, **keywords)
        self._lose("fail")
        return answer


class LossyLeases:
    """Leases that give drivers a ``LossyWriter``."""

    def __init__(self, leases: LeaseStore, losses: set[str]) -> None:
        self.lease = leases.lease
        self._leases = leases
        self._losses = losses

    async def take(self, run_id: str, holder: str, now_s: float) -> LossyWriter:
        """See LeaseStore."""
        return LossyWriter(await self._leases.take(run_id, holder, now_s), self._losses)


@contextmanager
def lossy(folder: Path, *losses: str) -> Iterator[Place]:
    """Yield a coordinator over a store that loses these answers."""
    state = open_place(folder).state
    stores = replace(state.stores, leases=LossyLeases(state.stores.leases, set(losses)))
    yield place_over(replace(state, stores=stores))


@pytest.mark.parametrize("losses", [("open",), ("close",), ("publish",), ("open", "close", "publish")])
def test_a_round_whose_commit_was_reported_as_an_error_is_published_once(tmp_path: Path, losses: Sequence[str]) -> None:
    async def main() -> None:
        with lossy(tmp_path, *losses) as place:
            await start(place.runs, bundle_in(tmp_path), PLAN)
            for _ in range(2):
                await asyncio.sleep(5.0)
                await send(place, "a")
                await send(place, "b")
            await asyncio.sleep(5.0)
            events = [record.event for record in place.state.runs.events("run")]
            assert [event.number for event in events if isinstance(event, VersionPublished)] == [1, 2]
            assert [event.round for event in events if isinstance(event, RoundOpened)] == [1, 2]
            assert (await place.runs.info("run")).state is RunState.FINISHED
            assert not [verdict for verdict in verify_run(place.state, "run") if verdict.problem]
            await place.runs.stop()

    run_virtual(main())


def test_an_update_whose_commit_was_reported_as_an_error_counts_when_its_device_retries(tmp_path: Path) -> None:
    async def main() -> None:
        with lossy(tmp_path, "commit") as place:
            await start(place.runs, bundle_in(tmp_path), PLAN)
            await settle()
            work = await assignment(place, "a")
            with pytest.raises(Unavailable):
                await send(place, "a", work)
            assert (await send(place, "a", work)).update_state is m.UpdateState.ACCEPTED
            start_s = asyncio.get_running_loop().time()
            await send(place, "b")
            await settle()
            # The Round did not wait for its deadline.
            assert (await place.runs.info("run")).version == 1
            assert asyncio.get_running_loop().time() - start_s < 5.0
            await place.runs.stop()

    run_virtual(main())


def test_a_failure_whose_commit_was_reported_as_an_error_is_recorded_once(tmp_path: Path) -> None:
    async def main() -> None:
        before = open_place(tmp_path)
        await start(before.runs, bundle_in(tmp_path), PLAN)
        await settle()
        await send(before, "a")
        await before.runs.stop()
        (payload,) = (tmp_path / "state" / "updates").glob("run/1/*.payload")
        payload.unlink()
        with lossy(tmp_path, "fail") as place:
            await place.runs.start()
            await asyncio.sleep(5.0)
            events = [record.event for record in place.state.runs.events("run")]
            assert len([event for event in events if isinstance(event, RoundFailed)]) == 1
            await place.runs.stop()

    run_virtual(main())

"""Errors after a commit that succeeded: what was recorded is found again, once, and told to the machine.

On a virtual clock, with the production coordinator and a store whose answers are lost.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.staleness import assignment, send, settle
from support.virtual import Place, bundle_in, open_place, place_over, plan, start

from fanin.clients.testing import run_virtual
from fanin.protos import messages as m
from fanin.protos.control import RoundFailed, RoundOpened, RunState, VersionPublished
from fanin.protos.errors import Unavailable
from fanin.protos.messages import Version
from fanin.server.aggregation.verify import verify_run
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline
from fanin.server.storage.sqlite.engine import open_engine
from fanin.server.storage.sqlite.rounds import CommittedUpdate, RoundRecord, RoundStore
from fanin.server.storage.stores import Stores

WANTED = plan(concurrency=2, buffer=2, quorum=2, max_rounds=2)


class LossyRounds(RoundStore):
    """Loses the answer of the first call of each name in ``losses``, after its transaction."""

    losses: frozenset[str] = frozenset()

    def _lose(self, name: str) -> None:
        if name in self.losses:
            self.losses -= {name}
            raise Unavailable("the answer was lost")

    def open(self, record: RoundRecord) -> bool:
        """See RoundStore."""
        answer = super().open(record)
        self._lose("open")
        return answer

    def commit(self, wanted: Sequence[tuple[CommittedUpdate, int]]) -> list[CommittedUpdate | None]:
        """See RoundStore."""
        answer = super().commit(wanted)
        self._lose("commit")
        return answer

    def close(self, run_id: str, round_number: int, **rest: object) -> RoundRecord:
        """See RoundStore."""
        answer = super().close(run_id, round_number, **rest)
        self._lose("close")
        return answer

    def publish(self, version: Version, event: VersionPublished, **rest: object) -> RoundRecord:
        """See RoundStore."""
        answer = super().publish(version, event, **rest)
        self._lose("publish")
        return answer

    def fail(self, run_id: str, round_number: int, **rest: object) -> RoundRecord:
        """See RoundStore."""
        answer = super().fail(run_id, round_number, **rest)
        self._lose("fail")
        return answer


@contextmanager
def lossy(folder: Path, *losses: str) -> Iterator[Place]:
    """A coordinator over such a store."""
    place = open_place(folder)
    engine = open_engine(folder / "state" / "fanin.db", Durability.PROCESS)
    rounds = LossyRounds(engine)
    rounds.losses = frozenset(losses)
    sync = replace(place.state.sync, rounds=rounds)
    yield place_over(replace(place.state, sync=sync, stores=Stores(sync, inline, place.state.stores.wall)))
    engine.dispose()


@pytest.mark.parametrize("losses", [("open",), ("close",), ("publish",), ("open", "close", "publish")])
def test_a_round_whose_commit_was_reported_as_an_error_is_published_once(tmp_path: Path, losses: Sequence[str]) -> None:
    async def main() -> None:
        with lossy(tmp_path, *losses) as place:
            await start(place.runs, bundle_in(tmp_path), WANTED)
            for _ in range(2):
                await asyncio.sleep(5.0)
                await send(place, "a")
                await send(place, "b")
            await asyncio.sleep(5.0)
            events = [recorded.event for recorded in place.state.runs.events("run")]
            assert [event.number for event in events if isinstance(event, VersionPublished)] == [1, 2]
            assert [event.round for event in events if isinstance(event, RoundOpened)] == [1, 2]
            assert (await place.runs.info("run")).state is RunState.FINISHED
            assert not [verdict for verdict in verify_run(place.state, "run") if verdict.problem]
            await place.runs.stop()

    run_virtual(main())


def test_an_update_whose_commit_was_reported_as_an_error_counts_when_its_device_asks_again(tmp_path: Path) -> None:
    async def main() -> None:
        with lossy(tmp_path, "commit") as place:
            await start(place.runs, bundle_in(tmp_path), WANTED)
            await settle()
            work = await assignment(place, "a")
            with pytest.raises(Unavailable):
                await send(place, "a", work)
            assert (await send(place, "a", work)).update_state is m.UpdateState.ACCEPTED
            began_s = asyncio.get_running_loop().time()
            await send(place, "b")
            await settle()
            # It did not have to wait for the deadline.
            assert (await place.runs.info("run")).version == 1
            assert asyncio.get_running_loop().time() - began_s < 5.0
            await place.runs.stop()

    run_virtual(main())


def test_a_failure_whose_commit_was_reported_as_an_error_is_recorded_once(tmp_path: Path) -> None:
    async def main() -> None:
        before = open_place(tmp_path)
        await start(before.runs, bundle_in(tmp_path), WANTED)
        await settle()
        await send(before, "a")
        await before.runs.stop()
        (payload,) = (tmp_path / "state" / "updates").glob("run/1/*.payload")
        payload.unlink()
        with lossy(tmp_path, "fail") as place:
            await place.runs.start()
            await asyncio.sleep(5.0)
            events = [recorded.event for recorded in place.state.runs.events("run")]
            assert len([event for event in events if isinstance(event, RoundFailed)]) == 1
            await place.runs.stop()

    run_virtual(main())

"""An evaluator whose record fails: it evaluates once, repeats the access for a bounded time, and tells operators."""

import asyncio
import logging
import sqlite3
from collections.abc import Collection
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.staleness import settle
from support.virtual import bundle_in, plan, start

from fanin.protos.errors import FaninError, StorageFull
from fanin.protos.messages import Adopt, Command, Pause, VersionEvaluation
from fanin.protos.plans import EvaluationPlan
from fanin.server.evaluation.datasets import DataSets
from fanin.server.evaluation.evaluator import HeldOutEvaluator
from fanin.server.evaluation.jobs import EvaluationJob, EvaluationReply
from fanin.server.evaluation.process import EvaluatorProcess
from fanin.server.folder import open_state
from fanin.server.rounds.troubles import STORAGE_WAIT_S, UNFORESEEN_S
from fanin.server.rounds.worker import LogObserver
from fanin.server.runs.catalog import Runs
from fanin.server.runs.data import NoData
from fanin.server.runs.recorded_setup import Parts
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline
from fanin.server.storage.protocols.evaluations import EvaluationStore
from fanin.simulation import run_virtual

DAY_S = 86_400.0


class CountedProcess(EvaluatorProcess):
    """Replies at once, and counts its jobs."""

    def __init__(self) -> None:
        super().__init__(())
        self.num_jobs = 0
        self.errors: list[Exception] = []

    async def ask(self, job: EvaluationJob) -> EvaluationReply:
        self.num_jobs += 1
        if self.errors:
            raise self.errors.pop()
        return EvaluationReply(values={"loss": 1.0}, score=-1.0, num_examples=1, data_sha256="0" * 64)


class FailingEvaluations:
    """A store of evaluations whose writes fail at first."""

    def __init__(self, store: EvaluationStore, error: Exception, num_failures: float) -> None:
        self._store, self._error, self._num_failures = store, error, num_failures
        self.num_writes = 0

    async def add_evaluation(self, run_id: str, evaluation: VersionEvaluation, score: float | None) -> None:
        self.num_writes += 1
        if self.num_writes <= self._num_failures:
            raise self._error
        await self._store.add_evaluation(run_id, evaluation, score)

    async def unevaluated(self, run_id: str, above: int) -> frozenset[int]:
        return await self._store.unevaluated(run_id, above)

    async def evaluation_page(self, run_id: str, from_version: int) -> tuple[VersionEvaluation, ...]:
        return await self._store.evaluation_page(run_id, from_version)

    async def newest_evaluation(self, run_id: str) -> VersionEvaluation | None:
        return await self._store.newest_evaluation(run_id)

    async def best_evaluation(self, run_id: str) -> VersionEvaluation | None:
        return await self._store.best_evaluation(run_id)


class Accepting(NoData):
    """Data sets that fit every Bundle."""

    @property
    def names(self) -> Collection[str]:
        return ("digits",)


class Scene:
    """A coordinator with one Run whose Version 0 is due, and an evaluator that has not started."""

    def __init__(self, folder: Path, error: Exception, num_failures: float) -> None:
        loop = asyncio.get_running_loop()
        self.folder = folder
        state = open_state(folder / "state", Durability.PROCESS, (inline, inline), loop.time)
        self.evaluations = FailingEvaluations(state.stores.evaluations, error, num_failures)
        stores = replace(state.stores, evaluations=self.evaluations)
        self.runs = Runs(stores, state.files, LogObserver(), Parts(data=Accepting()))
        self.process = CountedProcess()
        data = DataSets(blobs=folder / "state" / "blobs", paths={"digits": folder / "x.npz"}, command=())
        self.new_evaluator = partial(HeldOutEvaluator, self.runs, stores, data, self.process)
        self.evaluator = self.new_evaluator()

    async def begin(self) -> None:
        await start(self.runs, bundle_in(self.folder), replace(plan(), evaluation=EvaluationPlan(data="digits")))
        await settle()

    async def reason(self) -> str:
        return (await self.runs.info("run")).reason

    async def page(self) -> tuple[VersionEvaluation, ...]:
        return await self.evaluations.evaluation_page("run", 0)

    async def restart_evaluator(self) -> None:
        await self.evaluator.stop()
        self.evaluator = self.new_evaluator()
        self.evaluator.start()

    async def stop(self) -> None:
        await self.evaluator.stop()
        await self.runs.stop()


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def test_an_evaluation_that_cannot_be_recorded_is_kept_and_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, StorageFull("disk full: /srv/fanin.db"), 30)
        await scene.begin()
        scene.evaluator.start()
        await asyncio.sleep(60.0)
        assert await scene.reason() == (
            "evaluation on held-out data: the coordinator cannot write: no space is left on the disk; free some"
        )
        assert await scene.page() == ()
        await asyncio.sleep(3600.0)
        (evaluation,) = await scene.page()
        assert (evaluation.values, scene.process.num_jobs, scene.evaluations.num_writes) == ({"loss": 1.0}, 1, 31)
        assert await scene.reason() == ""
        await scene.stop()

    run_virtual(main())
    assert errors_in(caplog) == ["run run: evaluation on held-out data: disk full: /srv/fanin.db"]


def test_a_restart_after_all_evaluations_evaluates_the_next_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, StorageFull("full"), 0)
        await scene.begin()
        await scene.runs.command(Command(command_id="1", run_id="run", what=Pause()))
        scene.evaluator.start()
        await asyncio.sleep(10.0)
        assert [evaluation.version for evaluation in await scene.page()] == [0]
        await scene.restart_evaluator()
        await asyncio.sleep(10.0)
        await scene.runs.command(Command(command_id="2", run_id="run", what=Adopt(number=0)))
        await asyncio.sleep(10.0)
        assert [evaluation.version for evaluation in await scene.page()] == [0, 1]
        await scene.stop()

    run_virtual(main())
    assert errors_in(caplog) == []


def test_an_unforeseen_error_does_not_end_the_evaluator(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, StorageFull("full"), 0)
        scene.process.errors = [ZeroDivisionError("a mistake of ours")]
        await scene.begin()
        scene.evaluator.start()
        await asyncio.sleep(120.0)
        assert [evaluation.version for evaluation in await scene.page()] == [0]
        await scene.stop()

    run_virtual(main())
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == "the evaluation of Versions failed; it is tried again"
    assert record.exc_info is not None and str(record.exc_info[1]) == "a mistake of ours"


@pytest.mark.parametrize(
    ("error", "limit_s"), [(StorageFull("full"), STORAGE_WAIT_S), (OSError(5, "EIO"), UNFORESEEN_S)]
)
def test_the_evaluator_gives_up_after_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception, limit_s: float
) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, error, float("inf"))
        await scene.begin()
        scene.evaluator.start()
        await asyncio.sleep(limit_s + 120.0)
        num_writes = scene.evaluations.num_writes
        assert (await scene.reason()).endswith("; only a restart of the coordinator tries again")
        await asyncio.sleep(DAY_S)
        assert (scene.process.num_jobs, scene.evaluations.num_writes) == (1, num_writes)
        await scene.stop()

    run_virtual(main())
    assert len(errors_in(caplog)) == 2


def test_a_damaged_version_is_a_problem_of_this_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, FaninError("never"), 0)
        await scene.begin()
        with closing(sqlite3.connect(tmp_path / "state" / "fanin.db")) as connection, connection:
            connection.execute("UPDATE versions SET version_proto = ?", (b"\xff\xff\xff",))
        scene.evaluator.start()
        await asyncio.sleep(DAY_S)
        (evaluation,) = await scene.page()
        assert evaluation.problem.endswith("the coordinator's log has the details"), evaluation.problem
        assert scene.process.num_jobs == 0
        await scene.stop()

    run_virtual(main())
    assert len(errors_in(caplog)) == 1

"""The evaluator of a coordinator: it evaluates the Versions of all Runs, one after the other.

There is no queue. The next job follows from the record: the newest Version that is due and has no evaluation. Versions
that were passed over follow while there is nothing newer. After a kill the next start repeats the job. Runs take turns.
"""

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from fanin.protos.control import VersionEvaluation
from fanin.protos.errors import FaninError, InvalidInput, Unavailable
from fanin.protos.messages import Version
from fanin.protos.plans import EvaluationPlan
from fanin.server.evaluation.datasets import DataSets
from fanin.server.evaluation.jobs import EvaluationJob, EvaluationReply
from fanin.server.evaluation.process import EvaluatorProcess
from fanin.server.runs.catalog import Runs
from fanin.server.storage.stores import Stores

LOG: Final = logging.getLogger("fanin.server.evaluation.evaluator")
MAX_TRIES: Final = 2
"""Tries of a Version whose process ends. After that only a restart of the coordinator tries again."""
SETTLE_S: Final = 0.2
"""Seconds from a change of a Run until the next look. A Run may change a thousand times a second."""
IDLE_S: Final = 60.0
"""Seconds until a process without a job ends. It holds the data set in memory. A new one takes a second to start."""
RETRY_S: Final = 5.0
"""Seconds until the next try after an error of the database."""


def next_due(newest: int, every: int, evaluated: Collection[int]) -> int | None:
    """Return the newest Version that is due and has no evaluation, or None without one.

    Args:
        newest: The number of the newest Version.
        every: Versions whose number is a multiple of this are due.
        evaluated: The numbers of Versions with an evaluation, all of them due.
    """
    if len(evaluated) > newest // every:
        return None
    return next((number for number in range(newest - newest % every, -1, -every) if number not in evaluated), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DueVersion:
    """A Version to evaluate."""

    version: Version
    plan: EvaluationPlan
    job: EvaluationJob


class HeldOutEvaluator:
    """Evaluates Versions while the coordinator serves. It reads the Runs and changes none of them.

    Args:
        runs: The Runs.
        stores: The record.
        data: The data sets.
        process: The process that evaluates.
    """

    def __init__(self, runs: Runs, stores: Stores, data: DataSets, process: EvaluatorProcess) -> None:
        self._runs = runs
        self._stores = stores
        self._data = data
        self._process = process
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # By Run: the due Versions that have an evaluation or no tries left. The Run evaluated longest ago is first.
        self._done: dict[str, set[int]] = {}
        self._num_tries: dict[tuple[str, int], int] = {}
        self._without_data: set[str] = set()

    def start(self) -> None:
        """Start to evaluate. Call it after ``Runs.start``."""
        self._runs.subscribe(self._changed.set)
        self._task = asyncio.create_task(self._work(), name="evaluator")

    async def stop(self) -> None:
        """End the evaluation under way. The next start repeats it."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._process.stop()

    async def _work(self) -> None:
        while True:
            self._changed.clear()
            try:
                due = await self._next()
                if due is None:
                    await self._wait()
                else:
                    await self._evaluate(due)
            except Exception as exc:  # Any error: an evaluation must never end the coordinator.
                LOG.error("evaluation: %s", exc, exc_info=not isinstance(exc, FaninError))
                await asyncio.sleep(RETRY_S)

    async def _wait(self) -> None:
        """Wait for a change of a Run. A process without a job ends in the meantime."""
        try:
            async with asyncio.timeout(IDLE_S):
                await self._changed.wait()
        except TimeoutError:
            await self._process.stop()
            await self._changed.wait()
        await asyncio.sleep(SETTLE_S)

    async def _next(self) -> DueVersion | None:
        views = {publications.view.run_id: publications.view for publications in self._runs.publications()}
        turns = {run_id: turn for turn, run_id in enumerate(self._done)}
        for run_id in sorted(views, key=lambda run_id: turns.get(run_id, -1)):
            view = views[run_id]
            plan = view.record.start.plan.evaluation
            if not plan.data or not self._has_data(run_id, plan.data):
                continue
            if run_id not in self._done:
                evaluated = await self._stores.evaluations.evaluated(run_id)
                self._done[run_id] = {number for number in evaluated if number % plan.every == 0}
            number = next_due(view.newest.number, plan.every, self._done[run_id])
            if number is not None:
                # This Run is last from now on.
                self._done[run_id] = self._done.pop(run_id)
                return await self._due(run_id, number, plan)
        return None

    def _has_data(self, run_id: str, name: str) -> bool:
        if name in self._data.paths:
            return True
        if run_id not in self._without_data:
            self._without_data.add(run_id)
            LOG.warning(
                "run %s: its Versions are not evaluated: got no data set %r, expected --data %s=PATH; known are %s",
                *(run_id, name, name, sorted(self._data.paths)),
            )
        return False

    async def _due(self, run_id: str, number: int, plan: EvaluationPlan) -> DueVersion:
        version = await self._stores.runs.version(run_id, number)
        assert version is not None, "versions are numbered without gaps"
        bundle = await self._stores.runs.bundle(version.bundle_sha256)
        assert bundle is not None, "a run has its bundle"
        return DueVersion(version=version, plan=plan, job=self._data.job(plan, bundle, version))

    async def _evaluate(self, due: DueVersion) -> None:
        run_id, number = due.version.run_id, due.version.number
        try:
            reply = await self._process.ask(due.job)
        except Unavailable as exc:
            num_tries = self._num_tries.get((run_id, number), 0) + 1
            self._num_tries[run_id, number] = num_tries
            if num_tries < MAX_TRIES:
                LOG.warning("run %s: version %d: %s; it is tried again", run_id, number, exc)
                return
            reply = EvaluationReply(problem=str(exc))
        evaluation, score = self._recorded(due, reply)
        if evaluation.problem:
            LOG.warning("run %s: version %d was not evaluated: %s", run_id, number, evaluation.problem)
        await self._stores.evaluations.add_evaluation(run_id, evaluation, score)
        self._done[run_id].add(number)
        self._num_tries.pop((run_id, number), None)

    def _recorded(self, due: DueVersion, reply: EvaluationReply) -> tuple[VersionEvaluation, float | None]:
        """Return the evaluation to record, and its score."""
        now_s, version, plan = self._stores.wall(), due.version.number, due.plan
        problem = reply.problem
        if not problem:
            try:
                evaluation = VersionEvaluation(
                    version=version,
                    data=plan.data,
                    data_sha256=reply.data_sha256,
                    num_examples=reply.num_examples,
                    values=reply.values,
                    runtime=reply.runtime,
                    seconds=reply.seconds,
                    time=now_s,
                )
            except InvalidInput as exc:
                problem = str(exc)
            else:
                return evaluation, reply.score
        return VersionEvaluation(version=version, data=plan.data, time=now_s, problem=problem), None

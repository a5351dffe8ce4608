"""The evaluator of a coordinator: it evaluates the Versions of all Runs, one after the other.

There is no queue. The next job follows from the record: the newest Version that is due and has no evaluation. Versions
that were passed over follow while there is nothing newer. After a kill the next start repeats the job. Runs take turns.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final, TypeVar

from fanin.edge.scopes import about_run
from fanin.protos.errors import InvalidInput, Unavailable
from fanin.protos.messages import VersionEvaluation
from fanin.protos.plans import EvaluationPlan
from fanin.server.evaluation.datasets import DataSets
from fanin.server.evaluation.jobs import EvaluationJob, EvaluationReply
from fanin.server.evaluation.process import EvaluatorProcess
from fanin.server.rounds.troubles import patience_s, pause_s, reason_of
from fanin.server.runs.catalog import Runs
from fanin.server.runs.data import data_names
from fanin.server.runs.view import RunView
from fanin.server.storage.stores import Stores

LOG: Final = logging.getLogger("fanin.server.evaluation.evaluator")
MAX_TRIES: Final = 2
"""Tries of a Version whose process ends. After that only a restart of the coordinator tries again."""
SETTLE_S: Final = 0.2
"""Seconds from a change of a Run until the next look. A Run may change a thousand times a second."""
IDLE_S: Final = 60.0
"""Seconds until a process without a job ends. It holds the data set in memory. A new one takes a second to start."""
WORK: Final = "evaluation on held-out data"
LEFT: Final = "; only a restart of the coordinator tries again"

T = TypeVar("T")


class GivenUp(Exception):
    """The record could not be read or written. The message is for operators, who see it with the Run."""


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
        # By Run: the due Versions, and the newest Version at the last look. The Run evaluated longest ago is first.
        self._due: dict[str, set[int]] = {}
        self._newest: dict[str, int] = {}
        self._num_tries: dict[tuple[str, int], int] = {}
        # Runs without data, or whose evaluations cannot be read.
        self._without_data: set[str] = set()
        self._left: set[str] = set()

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
        num_failures = 0
        while True:
            self._changed.clear()
            try:
                turn = await self._next()
                if turn is not None:
                    await self._evaluate(*turn)
            except Exception:  # Any error: without this task no Version would be evaluated, and nobody would know why.
                num_failures += 1
                LOG.exception("the evaluation of Versions failed; it is tried again")
                await asyncio.sleep(pause_s(num_failures))
            else:
                num_failures = 0
                if turn is None:
                    await self._wait()

    async def _persistently(self, run_id: str, access: Callable[[], Awaitable[T]]) -> T:
        """Return the result of an access to the record. Raises GivenUp once no repetition may help."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for num_tries in count(1):
            try:
                result = await access()
            except Exception as exc:  # Any error: an evaluation must never end the coordinator.
                if loop.time() - began_s >= patience_s(exc):
                    self._runs.troubles.report(run_id, WORK, exc, LEFT)
                    raise GivenUp(reason_of(exc)) from exc
                self._runs.troubles.report(run_id, WORK, exc)
                await asyncio.sleep(pause_s(num_tries))
            else:
                self._runs.troubles.clear(run_id, WORK)
                return result
        raise AssertionError("the last try returns or raises")

    async def _wait(self) -> None:
        """Wait for a change of a Run. A process without a job ends in the meantime."""
        try:
            async with asyncio.timeout(IDLE_S):
                await self._changed.wait()
        except TimeoutError:
            await self._process.stop()
            await self._changed.wait()
        await asyncio.sleep(SETTLE_S)

    async def _next(self) -> tuple[RunView, int] | None:
        """Return the Run whose turn it is and the number of the Version to evaluate, or None without one."""
        views = {publications.view.run_id: publications.view for publications in self._runs.publications()}
        turns = {run_id: turn for turn, run_id in enumerate(self._due)}
        for run_id in sorted(views, key=lambda run_id: turns.get(run_id, -1)):
            view = views[run_id]
            plan = view.record.start.plan.evaluation
            if not plan.data or not all(self._has_data(run_id, name) for name in data_names(plan)):
                continue
            await self._look(run_id, view.newest.number, plan.every)
            if due := self._due.get(run_id):
                # This Run is last from now on.
                self._due[run_id] = self._due.pop(run_id)
                return view, max(due)
        return None

    async def _look(self, run_id: str, newest: int, every: int) -> None:
        """Add the due Versions of a Run since the last look."""
        above = self._newest.get(run_id, -1)
        if newest <= above or run_id in self._left:
            return
        try:
            read = partial(self._stores.evaluations.unevaluated, run_id, above)
            numbers = await self._persistently(run_id, read)
        except GivenUp:
            self._left.add(run_id)
            return
        due = self._due.setdefault(run_id, set())
        due.update(number for number in numbers if number % every == 0)
        self._newest[run_id] = max((newest, *numbers))

    def _has_data(self, run_id: str, name: str) -> bool:
        if name in self._data.paths:
            return True
        if run_id not in self._without_data:
            self._without_data.add(run_id)
            about_run(LOG, run_id).warning(
                "its Versions are not evaluated: got no data set %r, expected --data %s=PATH; known are %s",
                *(name, name, sorted(self._data.paths)),
            )
        return False

    async def _evaluate(self, view: RunView, number: int) -> None:
        run_id, plan = view.run_id, view.record.start.plan.evaluation
        try:
            job = await self._persistently(run_id, partial(self._job, run_id, number, plan))
        except GivenUp as exc:
            reply = EvaluationReply(problem=str(exc))
        else:
            outcome = await self._reply(run_id, number, job)
            if outcome is None:
                return
            reply = outcome
        evaluation, score = self._recorded(number, plan, reply)
        if evaluation.problem:
            about_run(LOG, run_id).warning("version %d was not evaluated: %s", number, evaluation.problem)
        record = partial(self._stores.evaluations.add_evaluation, run_id, evaluation, score)
        with suppress(GivenUp):
            await self._persistently(run_id, record)
        self._due[run_id].discard(number)
        self._num_tries.pop((run_id, number), None)

    async def _job(self, run_id: str, number: int, plan: EvaluationPlan) -> EvaluationJob:
        version = await self._stores.runs.version(run_id, number)
        assert version is not None, "it was recorded when it became due"
        bundle = await self._stores.runs.bundle(version.bundle_sha256)
        assert bundle is not None, "a run has its bundle"
        return self._data.job(plan, bundle, version)

    async def _reply(self, run_id: str, number: int, job: EvaluationJob) -> EvaluationReply | None:
        """Return the reply of the process, or None to try the Version again."""
        try:
            return await self._process.ask(job)
        except Unavailable as exc:
            num_tries = self._num_tries.get((run_id, number), 0) + 1
            self._num_tries[run_id, number] = num_tries
            if num_tries < MAX_TRIES:
                about_run(LOG, run_id).warning("version %d: %s; it is tried again", number, exc)
                return None
            return EvaluationReply(problem=str(exc))

    def _recorded(
        self, version: int, plan: EvaluationPlan, reply: EvaluationReply
    ) -> tuple[VersionEvaluation, float | None]:
        """Return the evaluation to record, and its score."""
        now_s = self._stores.wall()
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

"""The data sets of a coordinator: the check before a Run starts, and the ranges of activations on a data set.

A Round waits for the ranges of its Version, so they have a process of their own: that of the evaluations may be busy
for an hour. A process that fails or hangs costs the Version its own ranges, and the next Round tries again.
"""

import asyncio
import base64
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from fanin.protos.errors import Conflict, InvalidPlan, Unavailable
from fanin.protos.messages import BundleRef, StartRun, Version
from fanin.protos.plans import DATA, EvaluationPlan, Plan
from fanin.server.evaluation.jobs import EvaluationJob, EvaluationReply
from fanin.server.evaluation.process import EvaluatorProcess
from fanin.server.runs.data import no_data
from fanin.server.storage.records import MeasuredRanges

LOG: Final = logging.getLogger("fanin.server.evaluation.datasets")
CHECK_TIMEOUT_S: Final = 90.0
"""Seconds until a check counts as hung. An operator's call ends after 120 s. The check measures ranges, too."""
MEASURE_TIMEOUT_S: Final = 120.0
"""Seconds until a measurement of ranges counts as hung. A Round waits for it."""
IDLE_S: Final = 60.0
"""Seconds until a process without a job ends."""


class DataSets:
    """The data sets that an operator registered. See ``DataSource``.

    Args:
        blobs: The folder with the coordinator's Chunks.
        paths: The file of each data set by its name.
        command: The program that evaluates.
        measure_s: Seconds until a measurement of ranges counts as hung.

    Attributes:
        paths: The file of each data set by its name.
    """

    def __init__(
        self, *, blobs: Path, paths: Mapping[str, Path], command: Sequence[str], measure_s: float = MEASURE_TIMEOUT_S
    ) -> None:
        self.paths = paths
        self._blobs, self._command = blobs, command
        self._process = EvaluatorProcess(command, measure_s)
        # The process carries out one job at a time; several Runs may measure.
        self._free = asyncio.Lock()
        self._idle: asyncio.Task[None] | None = None

    @property
    def names(self) -> Collection[str]:
        """See ``DataSource.names``."""
        return self.paths

    def job(
        self, plan: EvaluationPlan, bundle: BundleRef, version: Version | None = None, *, measures: bool = False
    ) -> EvaluationJob:
        """Return the job that evaluates a Version or measures its ranges, or without one the job that checks the data.

        Args:
            plan: Names the data set and the metrics.
            bundle: The Bundle.
            version: The Version; None to check the data set.
            measures: Whether ranges are measured, for a Version instead of the evaluation.
        """
        return EvaluationJob(
            blobs=self._blobs,
            data=self.paths[plan.data],
            bundle=bundle,
            best=plan.best,
            metrics=tuple(metric.name for metric in plan.metrics),
            sets={each.name: self.paths[each.data] for each in plan.sets},
            version=version,
            measures=measures,
        )

    async def check(self, start: StartRun, bundle: BundleRef) -> None:
        """Check the data set of a Plan with a Bundle: see ``DataSource.check``.

        The check runs in a separate process, because it must not wait for an evaluation.

        Raises:
            InvalidPlan: A metric is unknown, the file cannot be read, or it does not fit the Bundle. Or ranges cannot
                be measured, because a graph format of the Bundle has no runtime here.
            Conflict: The process of the check has ended or hangs.
        """
        plan = start.plan.evaluation
        if not plan.data:
            return
        process = EvaluatorProcess(self._command, CHECK_TIMEOUT_S)
        try:
            reply = await process.ask(self.job(plan, bundle, measures=start.plan.int8.ranges == DATA))
        except Unavailable as exc:
            raise Conflict(
                f"run {start.run_id}: data set {plan.data!r} cannot be checked now ({exc}); see the coordinator's log",
                code="FN-0662",
            ) from exc
        finally:
            await process.stop()
        if reply.problem:
            raise InvalidPlan(f"run {start.run_id}: evaluation on {plan.data!r}: {reply.problem}", code="FN-0661")

    async def measure(self, plan: Plan, bundle: BundleRef, version: Version) -> MeasuredRanges:
        """See ``DataSource.measure``."""
        name = plan.evaluation.data
        if name not in self.paths:
            return no_data(name)
        async with self._free:
            if self._idle is not None:
                self._idle.cancel()
            try:
                reply = await self._process.ask(self.job(plan.evaluation, bundle, version, measures=True))
            except Unavailable as exc:
                reply = EvaluationReply(problem=str(exc))
            finally:
                self._idle = asyncio.create_task(self._end_idle(), name="idle evaluator")
        if reply.problem:
            kept = "run %s: version %d keeps the ranges before it: %s"
            LOG.warning(kept, version.run_id, version.number, reply.problem)
        return measured_of(name, reply)

    async def stop(self) -> None:
        """See ``DataSource.stop``."""
        if self._idle is not None:
            self._idle.cancel()
            with suppress(asyncio.CancelledError):
                await self._idle
        await self._process.stop()

    async def _end_idle(self) -> None:
        await asyncio.sleep(IDLE_S)
        await self._process.stop()


def measured_of(name: str, reply: EvaluationReply) -> MeasuredRanges:
    """Return the ranges that a process measured on a data set."""
    if reply.problem:
        return MeasuredRanges(data=name, problem=reply.problem)
    return MeasuredRanges(
        data=name,
        data_sha256=reply.data_sha256,
        num_examples=reply.num_examples,
        runtime=reply.runtime,
        values=base64.b64decode(reply.ranges),
    )

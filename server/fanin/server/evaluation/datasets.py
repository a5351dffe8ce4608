"""The data sets of a coordinator, and the check of a Plan's data set before its Run starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.protos.errors import Conflict, InvalidPlan, Unavailable
from fanin.protos.messages import BundleRef, StartRun, Version
from fanin.protos.plans import EvaluationPlan
from fanin.server.evaluation.jobs import EvaluationJob
from fanin.server.evaluation.process import EvaluatorProcess
from fanin.server.runs.admission import unknown_data

CHECK_TIMEOUT_S: Final = 90.0
"""Seconds until a check counts as hung. An operator's call ends after 120 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSets:
    """The data sets that an operator registered.

    Attributes:
        blobs: The folder with the coordinator's Chunks.
        paths: The file of each data set by its name.
        command: The program that evaluates.
    """

    blobs: Path
    paths: Mapping[str, Path]
    command: Sequence[str]

    def job(self, plan: EvaluationPlan, bundle: BundleRef, version: Version | None = None) -> EvaluationJob:
        """Return the job that evaluates a Version, or without one the job that checks the data set."""
        return EvaluationJob(
            blobs=self.blobs,
            data=self.paths[plan.data],
            bundle=bundle,
            best=plan.best,
            metrics=tuple(metric.name for metric in plan.metrics),
            version=version,
        )

    async def check(self, start: StartRun, bundle: BundleRef) -> None:
        """Check the data set of a Plan with a Bundle: the ``DataCheck`` of ``Runs``.

        The check runs in a separate process, because it must not wait for an evaluation.

        Raises:
            InvalidPlan: The name or a metric is unknown, the file cannot be read, or it does not fit the Bundle.
            Conflict: The process of the check has ended or hangs.
        """
        plan = start.plan.evaluation
        if not plan.data:
            return
        if plan.data not in self.paths:
            raise unknown_data(start, self.paths)
        process = EvaluatorProcess(self.command, CHECK_TIMEOUT_S)
        try:
            reply = await process.ask(self.job(plan, bundle))
        except Unavailable as exc:
            raise Conflict(
                f"run {start.run_id}: data set {plan.data!r} cannot be checked now ({exc}); see the coordinator's log",
                code="FN-0662",
            ) from exc
        finally:
            await process.stop()
        if reply.problem:
            raise InvalidPlan(f"run {start.run_id}: evaluation on {plan.data!r}: {reply.problem}", code="FN-0661")

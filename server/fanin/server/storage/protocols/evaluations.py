"""Evaluations of Versions on held-out data."""

from typing import Protocol

from fanin.protos.messages import VersionEvaluation


class EvaluationStore(Protocol):
    """At most one evaluation of each Version. Evaluations belong to no Round: no driver's lease is needed."""

    async def add_evaluation(self, run_id: str, evaluation: VersionEvaluation, score: float | None) -> None:
        """Record the evaluation of a Version. One without a problem is final; one with a problem is replaced.

        Args:
            run_id: The Run of the Version. Both must be recorded.
            evaluation: The evaluation.
            score: The value that ranks Versions, larger is better. None if the evaluation has a problem.
        """
        ...

    async def unevaluated(self, run_id: str, above: int) -> frozenset[int]:
        """Return the numbers larger than ``above`` of the Versions that have no evaluation, or one with a problem."""
        ...

    async def evaluation_page(self, run_id: str, from_version: int) -> tuple[VersionEvaluation, ...]:
        """Return up to ``MAX_PAGE_EVALUATIONS`` evaluations from a Version on, in the order of the Versions."""
        ...

    async def newest_evaluation(self, run_id: str) -> VersionEvaluation | None:
        """Return the evaluation of the newest Version that has one, or None without one."""
        ...

    async def best_evaluation(self, run_id: str) -> VersionEvaluation | None:
        """Return the evaluation with the highest score, or None without one.

        Among equal scores, the oldest Version wins. Scores on different data cannot be compared. So only evaluations
        count whose ``data_sha256`` is that of the newest Version with a score.
        """
        ...

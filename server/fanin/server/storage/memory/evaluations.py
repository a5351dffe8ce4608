"""Evaluations of Versions in memory."""

from fanin.protos.messages import MAX_PAGE_EVALUATIONS, VersionEvaluation
from fanin.server.storage.memory.database import MemoryDatabase


class MemoryEvaluations:
    """``EvaluationStore`` in memory."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database

    async def add_evaluation(self, run_id: str, evaluation: VersionEvaluation, score: float | None) -> None:
        """See ``EvaluationStore.add_evaluation``."""
        if evaluation.version in await self.unevaluated(run_id, evaluation.version - 1):
            self._database.runs[run_id].evaluations[evaluation.version] = (evaluation, score)

    async def unevaluated(self, run_id: str, above: int) -> frozenset[int]:
        """See ``EvaluationStore.unevaluated``."""
        rows = self._database.runs[run_id]
        evaluated = {number for number, (_, score) in rows.evaluations.items() if score is not None}
        return frozenset(
            number
            for number in rows.versions
            if number > above and number not in evaluated and number not in rows.removed.versions
        )

    async def evaluation_page(self, run_id: str, from_version: int) -> tuple[VersionEvaluation, ...]:
        """See ``EvaluationStore.evaluation_page``."""
        rows = [evaluation for number, evaluation, _ in self._rows(run_id) if number >= from_version]
        return tuple(rows[:MAX_PAGE_EVALUATIONS])

    async def newest_evaluation(self, run_id: str) -> VersionEvaluation | None:
        """See ``EvaluationStore.newest_evaluation``."""
        rows = self._rows(run_id)
        return rows[-1][1] if rows else None

    async def best_evaluation(self, run_id: str) -> VersionEvaluation | None:
        """See ``EvaluationStore.best_evaluation``."""
        scored = [(score, -number, one) for number, one, score in self._rows(run_id) if score is not None]
        same = [row for row in scored if row[2].data_sha256 == scored[-1][2].data_sha256]
        return max(same, key=lambda row: row[:2])[2] if same else None

    def _rows(self, run_id: str) -> list[tuple[int, VersionEvaluation, float | None]]:
        """Return number, evaluation and score of each row, in the order of the Versions."""
        rows = self._database.runs.get(run_id)
        return [] if rows is None else [(number, *rows.evaluations[number]) for number in sorted(rows.evaluations)]

"""Evaluations of Versions on held-out data."""

from sqlalchemy import Engine, Select, select
from sqlalchemy.dialects.sqlite import insert as upsert

from fanin.protos.messages import MAX_PAGE_EVALUATIONS, VersionEvaluation
from fanin.protos.wire import to_proto
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.columns import decode, is_removed
from fanin.server.storage.sqlite.engine import writing
from fanin.v1 import control_pb2


class SqliteEvaluations:
    """Evaluations of Versions. The methods are those of ``EvaluationStore``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add_evaluation(self, run_id: str, evaluation: VersionEvaluation, score: float | None) -> None:
        """See ``EvaluationStore.add_evaluation``."""
        table = schema.version_evaluations
        values = {
            "data_sha256": evaluation.data_sha256,
            "score": score,
            "evaluation_proto": to_proto(evaluation, control_pb2.VersionEvaluation).SerializeToString(
                deterministic=True
            ),
        }
        row = upsert(table).values(run_id=run_id, number=evaluation.version, **values)
        keys = [table.c.run_id, table.c.number]
        with writing(self._engine) as connection:
            connection.execute(
                row.on_conflict_do_update(index_elements=keys, set_=values, where=table.c.score.is_(None))
            )

    def unevaluated(self, run_id: str, above: int) -> frozenset[int]:
        """See ``EvaluationStore.unevaluated``."""
        table, versions = schema.version_evaluations, schema.versions
        evaluated = select(table.c.number).where(
            table.c.run_id == run_id, table.c.number > above, table.c.score.is_not(None)
        )
        query = select(versions.c.number).where(
            versions.c.run_id == run_id, versions.c.number > above, versions.c.number.not_in(evaluated), ~is_removed()
        )
        with self._engine.connect() as connection:
            return frozenset(connection.execute(query).scalars())

    def evaluation_page(self, run_id: str, from_version: int) -> tuple[VersionEvaluation, ...]:
        """See ``EvaluationStore.evaluation_page``."""
        table = schema.version_evaluations
        query = self._query(run_id).where(table.c.number >= from_version).order_by(table.c.number)
        return self._read(run_id, query.limit(MAX_PAGE_EVALUATIONS))

    def newest_evaluation(self, run_id: str) -> VersionEvaluation | None:
        """See ``EvaluationStore.newest_evaluation``."""
        query = self._query(run_id).order_by(schema.version_evaluations.c.number.desc()).limit(1)
        return next(iter(self._read(run_id, query)), None)

    def best_evaluation(self, run_id: str) -> VersionEvaluation | None:
        """See ``EvaluationStore.best_evaluation``."""
        table = schema.version_evaluations
        has_score = (table.c.run_id == run_id) & table.c.score.is_not(None)
        newest = select(table.c.data_sha256).where(has_score).order_by(table.c.number.desc()).limit(1)
        query = self._query(run_id).where(has_score, table.c.data_sha256 == newest.scalar_subquery())
        best = query.order_by(table.c.score.desc(), table.c.number).limit(1)
        return next(iter(self._read(run_id, best)), None)

    def _query(self, run_id: str) -> Select[bytes]:
        table = schema.version_evaluations
        return select(table.c.evaluation_proto).where(table.c.run_id == run_id)

    def _read(self, run_id: str, query: Select[bytes]) -> tuple[VersionEvaluation, ...]:
        with self._engine.connect() as connection:
            rows = connection.execute(query).scalars().all()
        what = f"run {run_id}, an evaluation"
        return tuple(decode(what, VersionEvaluation, control_pb2.VersionEvaluation, data) for data in rows)

"""What retention removed, the time and the source of each Version, and the Runs of a restored backup."""

import sqlalchemy as sa
from alembic import op

from fanin.v1 import control_pb2

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them. Versions of Rounds get the time at which their Round was opened, others the time of their event."""
    op.create_table(
        "removals",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("removed_at", sa.Float, nullable=False),
        sa.Column("finished_at", sa.Float),
    )
    op.add_column("runs", sa.Column("restored_at", sa.Float))
    op.add_column("versions", sa.Column("published_at", sa.Float))
    op.add_column("versions", sa.Column("adopted_run_id", sa.String))
    op.add_column("versions", sa.Column("adopted_number", sa.BigInteger().with_variant(sa.Integer, "sqlite")))
    op.execute(
        "UPDATE versions SET published_at = coalesce("
        "(SELECT opened_at FROM rounds WHERE rounds.run_id = versions.run_id AND rounds.round = versions.round),"
        "(SELECT started_at FROM runs WHERE runs.run_id = versions.run_id), 0.0)"
    )
    connection = op.get_bind()
    outside = "SELECT DISTINCT run_id FROM versions WHERE round = 0 AND number > 0"
    for (run_id,) in connection.execute(sa.text(outside)).all():
        events = connection.execute(sa.text("SELECT event_proto FROM events WHERE run_id = :run"), {"run": run_id})
        for (data,) in events.all():
            event = control_pb2.Event.FromString(data)
            published = event.version_published
            if not event.HasField("version_published") or published.round:
                continue
            row = {"time": event.time, "run": run_id, "number": published.number}
            row |= {"source": published.adopted_run_id or None, "adopted": published.adopted_number}
            connection.execute(
                sa.text(
                    "UPDATE versions SET published_at = :time, adopted_run_id = :source, "
                    "adopted_number = CASE WHEN :source IS NULL THEN NULL ELSE :adopted END "
                    "WHERE run_id = :run AND number = :number"
                ),
                row,
            )

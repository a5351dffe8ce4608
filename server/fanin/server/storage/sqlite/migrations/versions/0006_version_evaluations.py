"""Evaluations of Versions on held-out data."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    op.create_table(
        "version_evaluations",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("data_sha256", sa.String, nullable=False),
        sa.Column("score", sa.Float),
        sa.Column("evaluation_proto", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "number"], ["versions.run_id", "versions.number"], name="evaluations_version"
        ),
    )

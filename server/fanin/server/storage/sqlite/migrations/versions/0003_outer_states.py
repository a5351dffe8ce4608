"""The states of outer optimizers."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    op.create_table(
        "outer_states",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("round", sa.Integer, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("artifact_proto", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(["run_id", "round"], ["rounds.run_id", "rounds.round"], name="outer_states_round"),
    )

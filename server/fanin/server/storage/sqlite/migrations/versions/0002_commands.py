"""Operators' commands, the deadline of a paused Round, and Updates for an earlier Round."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    op.create_table(
        "commands",
        sa.Column("command_id", sa.String, primary_key=True),
        sa.Column("command_sha256", sa.String, nullable=False),
        sa.Column("carried_out_at", sa.Float, nullable=False),
    )
    op.add_column("rounds", sa.Column("left_s", sa.Float))
    with op.batch_alter_table("updates") as updates:
        updates.add_column(sa.Column("made_for", sa.Integer))
    op.execute("UPDATE updates SET made_for = round")
    with op.batch_alter_table("updates") as updates:
        updates.alter_column("made_for", existing_type=sa.Integer, nullable=False)
        updates.create_unique_constraint("one_update_an_assignment", ["run_id", "made_for", "device_id"])

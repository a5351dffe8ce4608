"""Run keys of epochs, and the delegation with which a publisher reclaimed a Run."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them. Keys from before this are of the first epoch."""
    op.rename_table("run_keys", "old_run_keys")
    op.create_table(
        "run_keys",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("private_key", sa.LargeBinary, nullable=False),
        sa.Column("prepared_at", sa.Float, nullable=False),
    )
    op.execute("INSERT INTO run_keys SELECT run_id, 1, private_key, 0.0 FROM old_run_keys")
    op.drop_table("old_run_keys")
    op.add_column("runs", sa.Column("delegation_proto", sa.LargeBinary))

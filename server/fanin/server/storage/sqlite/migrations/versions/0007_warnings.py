"""The warnings of Runs."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    op.create_table(
        "warnings",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("code", sa.String, primary_key=True),
        sa.Column("subject", sa.String, primary_key=True),
        sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
    )

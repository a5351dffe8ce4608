"""What is left of the Updates of a Round that retention removed: a digest, and the counts of its devices."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.add_column("rounds", sa.Column("num_accepted", number))
    op.add_column("rounds", sa.Column("accepted_sha256", sa.String))
    op.create_table(
        "contributions",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("device_id", sa.String, primary_key=True),
        sa.Column("num_updates", number, nullable=False),
        sa.Column("last_round", number, nullable=False),
        sa.Column("last_made_for", number, nullable=False),
    )
    op.create_index("contributions_by_device", "contributions", ["device_id"])

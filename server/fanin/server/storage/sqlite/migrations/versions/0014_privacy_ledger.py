"""The privacy ledgers of populations, and the seeds of noise."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.add_column("runs", sa.Column("population", sa.String))
    op.add_column("runs", sa.Column("uncharged_at", sa.Float))
    op.create_table(
        "populations",
        sa.Column("population", sa.String, primary_key=True),
        sa.Column("epsilon", sa.Float, nullable=False),
        sa.Column("delta", sa.Float, nullable=False),
        sa.Column("size", number, nullable=False),
        sa.Column("run_id", sa.String, nullable=False),
        sa.Column("begun_at", sa.Float, nullable=False),
    )
    op.create_table(
        "privacy_ledger",
        sa.Column("population", sa.String, primary_key=True),
        sa.Column("number", number, primary_key=True, autoincrement=False),
        sa.Column("run_id", sa.String, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("lineage", number, nullable=False),
        sa.Column("round", number, nullable=False),
        sa.Column("release", sa.Text, nullable=False),
        sa.Column("count", number, nullable=False),
        sa.Column("epsilon", sa.Float, nullable=False),
        sa.Column("delta", sa.Float, nullable=False),
        sa.Column("committed_at", sa.Float, nullable=False),
    )
    op.create_index("ledger_of_round", "privacy_ledger", ["run_id", "round"])
    op.create_table(
        "noise_seeds",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("round", number, primary_key=True),
        sa.Column("seed", sa.LargeBinary),
        sa.Column("erased_at", sa.Float),
    )

"""The leases of Runs, numbers of 64 bits, and an index of the Updates of a device."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

NUMBERS = {
    "runs": ("max_rounds",),
    "versions": ("number", "round"),
    "rounds": ("round", "base_version"),
    "outer_states": ("round",),
    "updates": ("sequence", "round", "made_for"),
}
"""The columns of 32 bits, by table."""


def upgrade() -> None:
    """Add the table and the index, and widen the columns. SQLite's INTEGER has 64 bits already."""
    op.create_table(
        "leases",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("epoch", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("holder", sa.String, nullable=False),
        sa.Column("taken_at", sa.Float, nullable=False),
    )
    op.create_index("updates_of_device", "updates", ["run_id", "device_id", "round"])
    if op.get_context().dialect.name == "sqlite":
        return
    for table, columns in NUMBERS.items():
        for column in columns:
            op.alter_column(table, column, type_=sa.BigInteger, existing_type=sa.Integer, existing_nullable=False)

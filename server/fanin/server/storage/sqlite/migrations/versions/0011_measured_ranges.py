"""The ranges of activations that the coordinator measured for the Version of a Round."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    op.add_column("rounds", sa.Column("measured", sa.Text))

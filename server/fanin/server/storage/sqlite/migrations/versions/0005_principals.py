"""The principals that sent a command and started a Run."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns. Commands and Runs from before this have no principal."""
    op.add_column("commands", sa.Column("principal", sa.String))
    op.add_column("runs", sa.Column("started_by", sa.String))

"""The messages and rosters of the phases of a Round, and the phase of its deadline."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Add them."""
    op.add_column("rounds", sa.Column("deadline_rosters", NUMBER))
    op.create_table(
        "messages",
        sa.Column("sequence", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("run_id", sa.String, nullable=False),
        sa.Column("round", NUMBER, nullable=False),
        sa.Column("phase", sa.String, nullable=False),
        sa.Column("device_id", sa.String, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("run_id", "round", "phase", "device_id", name="one_message_a_device_and_phase"),
        sa.ForeignKeyConstraint(["run_id", "round"], ["rounds.run_id", "rounds.round"], name="messages_round"),
    )
    op.create_table(
        "rosters",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("round", NUMBER, primary_key=True),
        sa.Column("number", NUMBER, primary_key=True),
        sa.Column("phase", sa.String, nullable=False),
        sa.Column("devices", sa.Text, nullable=False),
        sa.UniqueConstraint("run_id", "round", "phase", name="one_roster_a_phase"),
        sa.ForeignKeyConstraint(["run_id", "round"], ["rounds.run_id", "rounds.round"], name="rosters_round"),
    )

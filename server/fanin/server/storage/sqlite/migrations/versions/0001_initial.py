"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "devices",
        sa.Column("device_id", sa.String, primary_key=True),
        sa.Column("public_key", sa.String, nullable=False),
        sa.Column("enrolled_at", sa.Float, nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("sha256", sa.String, primary_key=True),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "bundles",
        sa.Column("bundle_sha256", sa.String, primary_key=True),
        sa.Column("bundle_proto", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "run_keys",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("private_key", sa.LargeBinary, nullable=False),
    )
    _create_run_tables()
    _create_round_tables()


def _create_run_tables() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("start_proto", sa.LargeBinary, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("max_rounds", sa.Integer, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
    )
    op.create_table(
        "versions",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("version_proto", sa.LargeBinary, nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("event_proto", sa.LargeBinary, nullable=False),
    )


def _create_round_tables() -> None:
    op.create_table(
        "rounds",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("round", sa.Integer, primary_key=True),
        sa.Column("base_version", sa.Integer, nullable=False),
        sa.Column("grid", sa.Text, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("opened_at", sa.Float, nullable=False),
        sa.Column("deadline_at", sa.Float),
        sa.Column("accepted", sa.Text),
        sa.Column("next_grid", sa.Text),
    )
    op.create_table(
        "updates",
        sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("run_id", sa.String, nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("device_id", sa.String, nullable=False),
        sa.Column("header_proto", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("run_id", "round", "device_id", name="one_update_a_device_and_round"),
        sa.ForeignKeyConstraint(["run_id", "round"], ["rounds.run_id", "rounds.round"], name="updates_round"),
    )

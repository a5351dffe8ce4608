"""Names, roles, expiry and uses of tokens; what is known of a device; the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
DEVICE_COLUMNS = (
    ("label", sa.String),
    ("tags", sa.Text),
    ("enrolled_by", sa.String),
    ("banned_at", sa.Float),
    ("ban_reason", sa.Text),
    ("banned_by", sa.String),
    ("last_seen", sa.Float),
    ("reported_proto", sa.LargeBinary),
    ("last_rejection", sa.Text),
    ("rejected_at", sa.Float),
)


def upgrade() -> None:
    """Add them. The tokens of operators from before this are those of the person who started the coordinator."""
    op.rename_table("tokens", "old_tokens")
    op.create_table(
        "tokens",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("sha256", sa.String, nullable=False, unique=True),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("created_by", sa.String, nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Column("revoked_at", sa.Float),
        sa.Column("max_uses", NUMBER),
        sa.Column("num_uses", NUMBER, nullable=False),
        sa.Column("label", sa.String, nullable=False),
        sa.Column("tags", sa.Text, nullable=False),
    )
    role = "CASE role WHEN 'operator' THEN 'admin' ELSE role END"
    op.execute(
        f"INSERT INTO tokens SELECT substr(sha256, 1, 12), sha256, {role}, created_at, '', "
        "NULL, NULL, NULL, 0, '', '' FROM old_tokens"
    )
    op.drop_table("old_tokens")
    for name, kind in DEVICE_COLUMNS:
        op.add_column("devices", sa.Column(name, kind))
    op.create_index("updates_by_device", "updates", ["device_id"])
    op.create_table(
        "audit",
        sa.Column("sequence", NUMBER, primary_key=True, autoincrement=False),
        sa.Column("time_us", sa.BigInteger, nullable=False),
        sa.Column("principal", sa.String, nullable=False),
        sa.Column("call", sa.String, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("outcome", sa.String, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
    )

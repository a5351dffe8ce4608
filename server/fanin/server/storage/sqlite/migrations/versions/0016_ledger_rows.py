"""The claim of a population, the number of rows of its ledger, and the database file that was opened last."""

import sqlalchemy as sa
from alembic import op

from fanin.v1 import control_pb2

revision = "0016"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them. The claim is that of the Run which began the population."""
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    with op.batch_alter_table("populations") as table:
        table.add_column(sa.Column("relation", sa.String, nullable=False, server_default="zero-out"))
        table.add_column(sa.Column("num_rows", number, nullable=False, server_default="0"))
        table.add_column(sa.Column("place", sa.String))
    with op.batch_alter_table("populations") as table:
        # The defaults are for the rows of before alone.
        table.alter_column("relation", server_default=None)
        table.alter_column("num_rows", server_default=None)
    connection = op.get_bind()
    connection.exec_driver_sql(
        "UPDATE populations SET num_rows = "
        "(SELECT count(*) FROM privacy_ledger WHERE privacy_ledger.population = populations.population)"
    )
    query = "SELECT p.population, r.start_proto FROM populations p JOIN runs r ON r.run_id = p.run_id"
    for name, data in connection.exec_driver_sql(query).all():
        if control_pb2.StartRunRequest.FromString(data).plan.privacy.sampling == "coins":
            connection.exec_driver_sql(
                "UPDATE populations SET relation = 'add-or-remove' WHERE population = ?", (name,)
            )

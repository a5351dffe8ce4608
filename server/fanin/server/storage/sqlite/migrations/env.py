"""Runs migrations on the connection that ``storage.sqlite.engine`` passes in."""

from alembic import context

from fanin.server.storage.sqlite.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()

"""Alembic's entry: migrates on the connection that study.migrations.upgrade hands over."""

from alembic import context

from study.schema import VERSION_TABLE

connection = context.config.attributes["connection"]
context.configure(connection=connection, version_table=VERSION_TABLE, transaction_per_migration=False)
context.run_migrations()

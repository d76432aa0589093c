"""The catalogue's schema, version by version (Alembic); run by the driver at its start.

A new version: a file in versions/ and its number in study.schema.SCHEMA_VERSION.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from study.schema import check_version, schema_version

if TYPE_CHECKING:
    from study.catalogue import Catalogue

ADVISORY_LOCK = 0x67726164  # "grad"
LOCK_SECONDS = 120  # how long a driver waits for another one that migrates


def upgrade(catalogue: "Catalogue") -> None:
    """Upgrade to the newest version, under a lock that other drivers wait for."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    with catalogue.engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text(f"set local lock_timeout = '{LOCK_SECONDS}s'"))
            connection.execute(sa.text(f"select pg_advisory_xact_lock({ADVISORY_LOCK})"))
        elif connection.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")  # readers don't wait for the writer
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        if found := schema_version(connection):
            check_version(found, migrating=True)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()

"""The catalogue's schema, version by version (Alembic); run by the driver at its start.

A new version: a file in versions/ and its number in study.catalogue.SCHEMA_VERSION.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

if TYPE_CHECKING:
    from study.catalogue import Catalogue

VERSION_TABLE = "gradnorm_alembic_version"  # Optuna keeps its own `alembic_version` in the same database


def upgrade(catalogue: "Catalogue") -> None:
    """Upgrade to the newest version, under a lock that other drivers wait for."""
    from study.catalogue import ADVISORY_LOCK, SCHEMA_VERSION, CatalogueError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    with catalogue.engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text(f"select pg_advisory_xact_lock({ADVISORY_LOCK})"))
        elif connection.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")  # readers don't wait for the writer
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        if sa.inspect(connection).has_table(VERSION_TABLE):
            found = connection.scalar(sa.text(f"select version_num from {VERSION_TABLE}"))
            if found is not None and found > SCHEMA_VERSION:
                raise CatalogueError(
                    f"database '{catalogue.name}' has schema {found}; this code knows up to "
                    f"{SCHEMA_VERSION}: update the code"
                )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()

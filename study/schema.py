"""The catalogue's tables, and which version of them a database has.

A change here goes with a migration in study/migrations/versions, and its number into SCHEMA_VERSION.
"""

import sqlalchemy as sa

SCHEMA_VERSION = "0001"
VERSION_TABLE = "gradnorm_alembic_version"  # Optuna keeps its own `alembic_version` in the same database


class CatalogueError(RuntimeError):
    """The catalogue can't be used as it is; says which and why."""


class SchemaError(CatalogueError):
    """The database's schema isn't the one that this code knows; names no place, so it may be served."""


def schema_version(connection: sa.Connection) -> str | None:
    """The version of the schema in the database, None where there is no catalogue yet."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.scalar(sa.text(f"select version_num from {VERSION_TABLE}"))


def check_version(version: str, *, migrating: bool = False) -> None:
    """SchemaError unless this code knows that version; an older one is fine for who migrates."""
    if version > SCHEMA_VERSION:
        raise SchemaError(
            f"the database has schema {version}; this code knows up to {SCHEMA_VERSION}: update the code"
        )
    if version < SCHEMA_VERSION and not migrating:
        raise SchemaError(
            f"the database has schema {version}; this code needs {SCHEMA_VERSION}: the next start of "
            "study/run.py migrates it"
        )


metadata = sa.MetaData()

# Times are seconds since the epoch (UTC): the one form that SQLite and PostgreSQL keep alike.
runs = sa.Table(
    "gradnorm_runs",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("study", sa.String(200), nullable=False, index=True),
    sa.Column("status", sa.String(16), nullable=False, index=True),
    sa.Column("created_at", sa.Double, nullable=False, index=True),
    sa.Column("ended_at", sa.Double),
    sa.Column("heartbeat", sa.Double),
    sa.Column("storage", sa.Text, nullable=False),
    sa.Column("host", sa.String(255)),
    sa.Column("git_commit", sa.String(64)),
    sa.Column("versions", sa.JSON),  # {"python": "3.11.7", "torch": ..., "ray": ...}
    sa.Column("config", sa.JSON, nullable=False),  # the resolved study file
    sa.Column("data", sa.JSON),  # identities of the corpora: [{name, bytes, sha256}]
    sa.Column("notes", sa.JSON),  # sentences that a reader of the results must know
    sa.Column("results", sa.JSON),  # verdicts, Pareto front: what is known at the end
    sa.Column("error", sa.Text),
)

trials = sa.Table(
    "gradnorm_trials",
    metadata,
    sa.Column("id", sa.String(72), primary_key=True),
    sa.Column("run_id", sa.String(64), sa.ForeignKey("gradnorm_runs.id"), nullable=False, index=True),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("arm", sa.Text, nullable=False),  # the label that pictures and tables show
    sa.Column("arm_number", sa.Integer, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("status", sa.String(16), nullable=False, index=True),
    sa.Column("reason", sa.String(32)),
    sa.Column("diverged_step", sa.Integer),
    sa.Column("step", sa.Integer, nullable=False),  # the last recorded step
    sa.Column("num_steps", sa.Integer, nullable=False),
    sa.Column("loss", sa.Double),
    sa.Column("grad_norm", sa.Double),
    sa.Column("steps_per_second", sa.Double),
    sa.Column("started_at", sa.Double),
    sa.Column("ended_at", sa.Double),
    sa.Column("heartbeat", sa.Double),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("num_parameters", sa.BigInteger),
    sa.Column("config", sa.JSON, nullable=False),  # the resolved trial
    sa.Column("overrides", sa.JSON, nullable=False),  # what this arm sets: dotted key -> value
    sa.Column("notes", sa.JSON),  # e.g. which variant is a no-op in this precision
    sa.Column("summary", sa.JSON),  # stability numbers, once it has ended
    sa.Column("error", sa.Text),
)

"""The catalogue: runs and trials in SQL (SQLAlchemy, Alembic). No torch, no Ray.

SQLite beside the runs by default, PostgreSQL for teams. The driver is its only writer; the service
reads. Numbers that are not finite never come here: a metric that has no finite value is null.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

RUN_STATUSES = ("pending", "running", "finished", "failed", "interrupted")
TRIAL_STATUSES = ("pending", "running", "finished", "diverged", "pruned", "failed")
REASONS = ("nonfinite_loss", "nonfinite_grad", "loss_scale_floor", "loss_above_init")
LOST_AFTER = 60.0  # seconds without a heartbeat
SCHEMA_VERSION = "0001"
ADVISORY_LOCK = 0x67726164  # "grad": held while a driver migrates

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
    sa.Column("data", sa.JSON),  # identity of the corpus: name, bytes, hash
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
    sa.Column("seed", sa.Integer, nullable=False),
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


class CatalogueError(RuntimeError):
    """The catalogue can't be used as it is; says which and why."""


class Catalogue:
    """Runs and trials in the database at `url`; every row is a plain dict, keyed by column."""

    def __init__(self, url: str) -> None:
        try:
            self.url = sa.make_url(url)
        except (sa.exc.ArgumentError, ValueError) as error:
            raise CatalogueError(
                "the database must be a URL like sqlite:///runs/gradnorm.db or postgresql://user@host/name"
            ) from error
        if self.url.get_backend_name() == "postgresql":
            self.url = self.url.set(drivername="postgresql+psycopg")
        try:
            self.engine = sa.create_engine(self.url, pool_pre_ping=True, connect_args=self._connect_args())
        except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ImportError) as error:
            raise CatalogueError(f"database '{self.name}' can't be used: {error}") from error

    @property
    def name(self) -> str:
        """The URL as it may be shown: without its password."""
        return self.url.render_as_string(hide_password=True)

    def _connect_args(self) -> dict[str, Any]:
        if self.url.get_backend_name() == "sqlite":
            return {"timeout": 15}
        return {"connect_timeout": 5} if self.url.get_backend_name() == "postgresql" else {}

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        if not self.has_database():
            raise CatalogueError(f"database '{self.name}' isn't there yet: no run has been started with it")
        try:
            with self.engine.connect() as connection:
                yield connection
        except (sa.exc.OperationalError, sa.exc.ProgrammingError, sa.exc.DatabaseError) as error:
            raise CatalogueError(f"database '{self.name}' can't be read: {error.orig}") from error

    def has_database(self) -> bool:
        """Whether there is something to connect to: a SQLite file comes with the first run."""
        if self.url.get_backend_name() != "sqlite":
            return True
        name = self.url.database
        return not name or name == ":memory:" or Path(name).exists()

    def is_there(self) -> bool:
        """Whether a database can be read that holds a catalogue."""
        return self.has_database() and self.schema_version() is not None

    def schema_version(self) -> str | None:
        """The version of the schema in the database, None where there is no catalogue yet."""
        with self._reading() as connection:
            if not sa.inspect(connection).has_table("gradnorm_alembic_version"):
                return None
            return connection.scalar(sa.text("select version_num from gradnorm_alembic_version"))

    def migrate(self) -> None:
        """Bring the schema to this code's version, one driver at a time.

        CatalogueError if the database is newer than this code or can't be reached.
        """
        from study.migrations import upgrade

        if self.url.get_backend_name() == "sqlite" and self.url.database:
            Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
        try:
            upgrade(self)
        except sa.exc.DatabaseError as error:
            raise CatalogueError(f"database '{self.name}' can't be used: {error.orig}") from error

    def add_run(self, run: Mapping[str, Any], its_trials: Iterable[Mapping[str, Any]]) -> None:
        """A new run with its trials, in one transaction; CatalogueError if the id exists."""
        try:
            with self.engine.begin() as connection:
                connection.execute(sa.insert(runs).values(**run))
                rows = [dict(trial) for trial in its_trials]
                if rows:
                    connection.execute(sa.insert(trials), rows)
        except sa.exc.IntegrityError as error:
            raise CatalogueError(f"run '{run['id']}' exists already in {self.name}") from error

    def save(
        self,
        run_id: str,
        run: Mapping[str, Any],
        new: Iterable[Mapping[str, Any]] = (),
        changes: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """In one transaction: set columns of a run, add trials, set columns of trials by id."""
        with self.engine.begin() as connection:
            if run:
                connection.execute(sa.update(runs).where(runs.c.id == run_id).values(**run))
            if rows := [dict(row) for row in new]:
                connection.execute(sa.insert(trials), rows)
            for trial_id, values in (changes or {}).items():
                connection.execute(sa.update(trials).where(trials.c.id == trial_id).values(**values))

    def delete_run(self, run_id: str) -> None:
        """Forget a run and its trials; its traces are the storage's matter."""
        with self.engine.begin() as connection:
            connection.execute(sa.delete(trials).where(trials.c.run_id == run_id))
            connection.execute(sa.delete(runs).where(runs.c.id == run_id))

    def run(self, run_id: str) -> dict[str, Any] | None:
        """One run by id, or the newest by `latest`; None if there is none."""
        query = sa.select(runs)
        if run_id == "latest":
            query = query.order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(1)
        else:
            query = query.where(runs.c.id == run_id)
        with self._reading() as connection:
            row = connection.execute(query).mappings().first()
        return _present(dict(row)) if row else None

    def runs(
        self,
        *,
        status: str | None = None,
        study: str | None = None,
        limit: int = 50,
        before: tuple[float, str] | None = None,
    ) -> list[dict[str, Any]]:
        """Runs, newest first; `before` is (created_at, id) of the last row of the page before."""
        query = sa.select(runs).order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(limit)
        if study is not None:
            query = query.where(runs.c.study == study)
        if status is not None:
            query = query.where(_status_is(runs, status))
        if before is not None:
            query = query.where(sa.tuple_(runs.c.created_at, runs.c.id) < sa.tuple_(*map(sa.literal, before)))
        with self._reading() as connection:
            return [_present(dict(row)) for row in connection.execute(query).mappings()]

    def trials(self, run_id: str) -> list[dict[str, Any]]:
        """A run's trials by number."""
        query = sa.select(trials).where(trials.c.run_id == run_id).order_by(trials.c.number)
        with self._reading() as connection:
            return [_present(dict(row)) for row in connection.execute(query).mappings()]

    def trial_counts(self, run_ids: Iterable[str]) -> dict[str, dict[str, int]]:
        """For several runs at once: run id -> {status: number of trials}; `lost` is not told apart."""
        query = (
            sa.select(trials.c.run_id, trials.c.status, sa.func.count())
            .where(trials.c.run_id.in_(list(run_ids)))
            .group_by(trials.c.run_id, trials.c.status)
        )
        counts: dict[str, dict[str, int]] = {}
        with self._reading() as connection:
            for run_id, status, number in connection.execute(query):
                counts.setdefault(run_id, {})[status] = number
        return counts

    def trial(self, trial_id: str) -> dict[str, Any] | None:
        """One trial by id."""
        with self._reading() as connection:
            row = connection.execute(sa.select(trials).where(trials.c.id == trial_id)).mappings().first()
        return _present(dict(row)) if row else None


def _status_is(table: sa.Table, status: str) -> sa.ColumnElement[bool]:
    stale = table.c.heartbeat < time.time() - LOST_AFTER
    if status == "lost":
        return table.c.status.in_(("pending", "running")) & stale
    if status in ("pending", "running"):
        return (table.c.status == status) & ~sa.func.coalesce(stale, sa.false())
    return table.c.status == status


def _present(values: dict[str, Any]) -> dict[str, Any]:
    """A row; one that should be alive but has no fresh heartbeat reads as lost."""
    alive = values["status"] in ("pending", "running")
    if alive and values["heartbeat"] is not None and values["heartbeat"] < time.time() - LOST_AFTER:
        values["status"] = "lost"
    return values

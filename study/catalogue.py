"""The catalogue: runs and trials in SQL (SQLAlchemy, Alembic). No torch, no Ray.

SQLite beside the runs by default, PostgreSQL for teams. The driver is its only writer; the service
reads. Numbers that are not finite never come here: a metric that has no finite value is null.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from study.schema import CatalogueError, check_version, runs, schema_version, trials

RUN_STATUSES = ("pending", "running", "finished", "failed", "interrupted")
TRIAL_STATUSES = ("pending", "running", "finished", "diverged", "pruned", "failed")
REASONS = ("nonfinite_loss", "nonfinite_grad", "loss_scale_floor", "loss_above_init")
LOST_AFTER = 60.0  # seconds without a heartbeat


class Catalogue:
    """Runs and trials in the database at `url`; every row is a plain dict, keyed by column.

    A connection is tested before it is used and replaced if the server has gone and come back.
    """

    def __init__(self, url: str) -> None:
        try:
            self.url = sa.make_url(url)
        except (sa.exc.ArgumentError, ValueError) as error:
            known = "sqlite:///FILE, postgresql://USER@HOST/NAME"
            raise CatalogueError(f"the database's URL can't be read; known: {known}") from error
        if self.url.get_backend_name() in ("postgresql", "postgres"):
            self.url = self.url.set(drivername="postgresql+psycopg")
        try:
            self.engine = sa.create_engine(self.url, pool_pre_ping=True, connect_args=self._connect_args())
        except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ImportError) as error:
            raise CatalogueError(f"database '{self.name}' can't be used: {error}") from error
        self._is_current = False  # whether the schema was seen to be the one that this code knows

    @property
    def name(self) -> str:
        """The URL as it may be shown: without its password."""
        return self.url.render_as_string(hide_password=True)

    def _connect_args(self) -> dict[str, Any]:
        if self.url.get_backend_name() == "sqlite":
            return {"timeout": 15}
        if self.url.get_backend_name() != "postgresql":
            return {}
        # A server whose machine is gone without a word is noticed within 20 s, not within TCP's 15 minutes.
        known = {
            "application_name": "gradnorm-study",
            "connect_timeout": 5,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 2,
            "tcp_user_timeout": 20_000,
        }
        return {key: value for key, value in known.items() if key not in self.url.query}

    @contextmanager
    def _connected(self) -> Iterator[sa.Connection]:
        if not self.has_database():
            raise CatalogueError(f"database '{self.name}' isn't there yet: no run has been started with it")
        try:
            with self.engine.connect() as connection:
                yield connection
        except sa.exc.DBAPIError as error:
            raise CatalogueError(f"database '{self.name}' can't be read: {_words(error)}") from error

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with self._connected() as connection:
            if not self._is_current:
                version = schema_version(connection)
                if version is None:
                    raise CatalogueError(
                        f"database '{self.name}' holds no runs: none has been started with it"
                    )
                check_version(version)
                self._is_current = True
            yield connection

    def has_database(self) -> bool:
        """Whether there is something to connect to: a SQLite file comes with the first run."""
        if self.url.get_backend_name() != "sqlite":
            return True
        name = self.url.database
        return not name or name == ":memory:" or Path(name).exists()

    def is_there(self) -> bool:
        """Whether a database can be read that holds a catalogue."""
        return self.has_database() and self.schema_version() is not None

    def check(self) -> None:
        """CatalogueError unless the database answers now and holds a catalogue of this code's schema."""
        self._is_current = False
        with self._reading():
            return

    def schema_version(self) -> str | None:
        """The version of the schema in the database, None where there is no catalogue yet."""
        with self._connected() as connection:
            return schema_version(connection)

    def migrate(self) -> None:
        """Bring the schema to this code's version, one driver at a time.

        SchemaError if the database is newer than this code, CatalogueError if it can't be reached.
        """
        from study.migrations import upgrade

        if self.url.get_backend_name() == "sqlite" and self.url.database:
            Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
        try:
            upgrade(self)
        except sa.exc.DBAPIError as error:
            raise CatalogueError(f"database '{self.name}' can't be used: {_words(error)}") from error

    def update(self) -> None:
        """Migrate a catalogue that an older version of this code made; makes none."""
        if self.is_there():
            self.migrate()

    def add_run(self, run: Mapping[str, Any], its_trials: Iterable[Mapping[str, Any]]) -> None:
        """A new run with its trials, in one transaction; CatalogueError if the id exists."""
        try:
            with self.engine.begin() as connection:
                connection.execute(sa.insert(runs).values(**_storable(run)))
                rows = [_storable(trial) for trial in its_trials]
                if rows:
                    connection.execute(sa.insert(trials), rows)
        except sa.exc.IntegrityError as error:
            raise CatalogueError(f"run '{run['id']}' exists already in {self.name}") from error
        except sa.exc.DBAPIError as error:
            raise CatalogueError(f"database '{self.name}' can't be written: {_words(error)}") from error

    def save(
        self,
        run_id: str,
        run: Mapping[str, Any],
        new: Iterable[Mapping[str, Any]] = (),
        changes: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """In one transaction: set columns of a run, add trials, set columns of trials by id.

        Saving the same again is fine: whether a commit came through isn't known to one whose server
        went away in the middle of it.
        """
        with self.engine.begin() as connection:
            if run:
                connection.execute(sa.update(runs).where(runs.c.id == run_id).values(**_storable(run)))
            if rows := [_storable(row) for row in new]:
                insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
                connection.execute(insert(trials).on_conflict_do_nothing(index_elements=["id"]), rows)
            # In one order always, so that two writers of a run wait for each other, but never both.
            for trial_id, values in sorted((changes or {}).items()):
                query = sa.update(trials).where(trials.c.id == trial_id)
                connection.execute(query.values(**_storable(values)))

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


def _words(error: sa.exc.DBAPIError) -> str:
    """What the database said, in one line."""
    return " ".join(str(error.orig).split())


def _storable(values: Mapping[str, Any]) -> dict[str, Any]:
    """A row that every database takes: PostgreSQL refuses some that SQLite doesn't, for ever."""
    return {key: _storable_value(value) for key, value in values.items()}


def _storable_value(value: Any) -> Any:
    """Text without NUL and lone surrogates, null for NaN and inf."""
    if isinstance(value, str):
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return _storable(value)
    if isinstance(value, list | tuple):
        return [_storable_value(item) for item in value]
    return value


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

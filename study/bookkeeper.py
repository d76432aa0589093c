"""Keeps the catalogue up with a run, from a thread of its own.

Changes are collected and written about once a second, so that neither Tune's loop nor a trial ever
waits for the database. If it goes away, the changes wait here, and the catalogue catches up.
"""

import threading
import time
from typing import Any

import sqlalchemy as sa

from study.catalogue import Catalogue

WRITE_SECONDS = 1.0
HEARTBEAT_SECONDS = 10.0
PATIENCE_SECONDS = 60.0  # how long the end of a run waits for a database that is away


class Bookkeeper:
    """Writes what `run_changed` and `trial_changed` are told; use as a context manager."""

    def __init__(self, catalogue: Catalogue, run_id: str) -> None:
        self.catalogue, self.run_id = catalogue, run_id
        self.away: str | None = None  # why the database can't be written now
        self._run: dict[str, Any] = {}
        self._trials: dict[str, dict[str, Any]] = {}
        self._new: list[dict[str, Any]] = []
        self._alive: set[str] = set()
        self._beat = 0.0
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="bookkeeper", daemon=True)

    def __enter__(self) -> "Bookkeeper":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Write what is left; waits for a database that is away, but not for ever."""
        self._stop.set()
        self._thread.join()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._write() and time.monotonic() < deadline:
            time.sleep(1.0)

    def run_changed(self, **values: Any) -> None:
        with self._lock:
            self._run |= values

    def trial_added(self, *rows: dict[str, Any]) -> None:
        """New trials; they come into the catalogue together or not at all."""
        with self._lock:
            self._new.extend(rows)

    def write_now(self) -> None:
        """Write what is known, from the caller's thread; what a database that is away can't take waits."""
        self._write()

    def trial_changed(self, trial_id: str, **values: Any) -> None:
        with self._lock:
            self._trials.setdefault(trial_id, {}).update(values)
            if "status" in values:
                (self._alive.add if values["status"] == "running" else self._alive.discard)(trial_id)

    def _work(self) -> None:
        while not self._stop.wait(WRITE_SECONDS):
            self._write()

    def _write(self) -> bool:
        """One transaction with all that has changed; False if the database is away."""
        now = time.time()
        with self._lock:
            new, run, changes = self._new, self._run, self._trials
            self._new, self._run, self._trials = [], {}, {}
            if now - self._beat >= HEARTBEAT_SECONDS:
                # Over one that waited out an outage: else what comes back alive would read as lost.
                run = run | {"heartbeat": now}
                for trial_id in self._alive:
                    changes[trial_id] = changes.get(trial_id, {}) | {"heartbeat": now}
        try:
            if new or run or changes:
                self.catalogue.save(self.run_id, run, new, changes)
        except sa.exc.DBAPIError as error:
            self.away = str(error.orig)
            self._put_back(run, new, changes)
            return False
        if "heartbeat" in run:
            self._beat = now
        self.away = None
        return True

    def _put_back(
        self, run: dict[str, Any], new: list[dict[str, Any]], changes: dict[str, dict[str, Any]]
    ) -> None:
        """Keep what couldn't be written, under what has come since."""
        with self._lock:
            self._run = run | self._run
            self._new = new + self._new
            for trial_id, values in changes.items():
                self._trials[trial_id] = values | self._trials.get(trial_id, {})

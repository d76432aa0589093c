"""The books are kept from a thread; a database that goes away costs nothing but lateness."""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from study import bookkeeper
from study.bookkeeper import Bookkeeper
from study.catalogue import Catalogue


def trial_row(number: int) -> dict[str, Any]:
    return {
        "id": f"run_{number:05d}", "run_id": "run", "number": number, "arm": "an arm", "arm_number": 0,
        "seed": 0, "status": "pending", "step": 0, "num_steps": 100, "attempts": 0, "config": {},
        "overrides": {},
    }  # fmt: skip


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalogue:
    """A run of two trials; the clocks run twenty times as fast."""
    monkeypatch.setattr(bookkeeper, "WRITE_SECONDS", 0.05)
    monkeypatch.setattr(bookkeeper, "HEARTBEAT_SECONDS", 0.5)
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'gradnorm.db'}")

    @sa.event.listens_for(catalogue.engine, "connect")
    def give_up_soon(connection: sqlite3.Connection, record: Any) -> None:
        connection.execute("pragma busy_timeout = 50")

    catalogue.migrate()
    catalogue.add_run(
        {"id": "run", "study": "figure", "status": "running", "created_at": 1.0, "heartbeat": time.time(),
         "storage": "runs", "config": {}},
        [trial_row(0), trial_row(1)],
    )  # fmt: skip
    return catalogue


@contextlib.contextmanager
def locked(catalogue: Catalogue) -> Iterator[None]:
    """Another process holds the database: nobody can write it."""
    connection = sqlite3.connect(str(catalogue.url.database), isolation_level=None)
    connection.execute("begin immediate")
    try:
        yield
    finally:
        connection.execute("rollback")
        connection.close()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def test_changes_are_in_the_catalogue_soon_and_at_the_latest_at_the_end(catalogue: Catalogue) -> None:
    with Bookkeeper(catalogue, "run") as books:
        books.trial_changed("run_00000", status="running", step=10)
        books.trial_changed("run_00000", step=20, loss=2.5)
        wait_until(lambda: catalogue.trial("run_00000")["step"] == 20)
        books.trial_added(trial_row(2))
        books.trial_changed("run_00002", status="finished")
        books.run_changed(status="finished", ended_at=9.0)
    assert catalogue.trial("run_00000")["status"] == "running"
    assert catalogue.trial("run_00000")["loss"] == 2.5
    assert catalogue.trial("run_00002")["status"] == "finished"
    assert catalogue.run("run")["status"] == "finished"
    assert catalogue.trial("run_00001") == trial_row(1) | {
        key: None for key, value in catalogue.trial("run_00001").items() if value is None
    }


def test_what_is_written_now_is_there_at_once(catalogue: Catalogue) -> None:
    """A search tells its database of a result; the trial's row has to be there before it."""
    books = Bookkeeper(catalogue, "run")  # its thread has not begun
    books.trial_added(trial_row(2))
    books.write_now()
    assert catalogue.trial("run_00002") is not None


def test_while_the_database_is_away_changes_wait_and_nobody_else_does(catalogue: Catalogue) -> None:
    with Bookkeeper(catalogue, "run") as books:
        with locked(catalogue):
            slowest = 0.0
            for step in range(1, 201):
                began = time.perf_counter()
                books.trial_changed("run_00000", status="running", step=step)
                books.run_changed(notes=[f"step {step}"])
                slowest = max(slowest, time.perf_counter() - began)
                time.sleep(0.002)
            books.trial_added(trial_row(2))
            wait_until(lambda: books.away is not None)
            assert slowest < 0.2 and "locked" in str(books.away)
            assert catalogue.trial("run_00000")["step"] == 0 and catalogue.trial("run_00002") is None
        wait_until(lambda: books.away is None and catalogue.trial("run_00000")["step"] == 200)
        assert catalogue.run("run")["notes"] == ["step 200"]
        assert catalogue.trial("run_00002") is not None


def test_the_last_word_waits_for_the_database(catalogue: Catalogue) -> None:
    with contextlib.ExitStack() as stack:
        books = stack.enter_context(Bookkeeper(catalogue, "run"))
        lock = stack.enter_context(contextlib.ExitStack())
        lock.enter_context(locked(catalogue))
        books.trial_changed("run_00000", status="finished", step=100)
        wait_until(lambda: books.away is not None)
        lock.close()
    assert catalogue.trial("run_00000")["step"] == 100


def test_a_run_whose_database_stays_away_ends_all_the_same(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookkeeper, "PATIENCE_SECONDS", 0.1)
    with locked(catalogue), Bookkeeper(catalogue, "run") as books:
        books.trial_changed("run_00000", step=100)
    assert catalogue.trial("run_00000")["step"] == 0


def test_what_runs_has_a_heartbeat_and_what_ended_has_none(catalogue: Catalogue) -> None:
    with Bookkeeper(catalogue, "run") as books:
        books.trial_changed("run_00000", status="running")
        began = time.time()
        wait_until(lambda: (catalogue.trial("run_00000")["heartbeat"] or 0) > began + 0.4)
        assert catalogue.run("run")["heartbeat"] > began
        assert catalogue.trial("run_00001")["heartbeat"] is None
        books.trial_changed("run_00000", status="finished", heartbeat=7.0)
        wait_until(lambda: catalogue.trial("run_00000")["heartbeat"] == 7.0)
        beat = catalogue.run("run")["heartbeat"]
        wait_until(lambda: catalogue.run("run")["heartbeat"] > beat)
        assert catalogue.trial("run_00000")["heartbeat"] == 7.0


def test_after_an_outage_the_heartbeat_is_of_now_and_not_of_its_beginning(catalogue: Catalogue) -> None:
    with Bookkeeper(catalogue, "run") as books:
        with locked(catalogue):
            books.trial_changed("run_00000", status="running", heartbeat=time.time())
            wait_until(lambda: books.away is not None)
            time.sleep(0.8)
            back = time.time()
        wait_until(lambda: books.away is None)
        assert catalogue.run("run")["heartbeat"] >= back - 0.3
        assert catalogue.trial("run_00000")["heartbeat"] >= back - 0.3

"""The catalogue on SQLite and on PostgreSQL: one behaviour; and what only a server can do: go away."""

import math
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from servers import PASSWORD
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import Settings
from study import bookkeeper
from study.bookkeeper import Bookkeeper
from study.catalogue import Catalogue
from study.migrations import ADVISORY_LOCK
from study.schema import CatalogueError, SchemaError, metadata


def run_row(run_id, **values):
    row = {"id": run_id, "study": "figure", "status": "finished", "created_at": 1000.0, "storage": "/runs"}
    return row | {"config": {"name": "figure"}} | values


def trial_row(run_id, number=0, **values):
    row = {"id": f"{run_id}_{number:05d}", "run_id": run_id, "number": number, "arm": "an arm", "seed": 0}
    row |= {"arm_number": 0, "status": "pending", "step": 0, "num_steps": 100, "attempts": 0}
    return row | {"config": {}, "overrides": {}} | values


def set_version(catalogue, version):
    with catalogue.engine.begin() as connection:
        connection.execute(sa.text("update gradnorm_alembic_version set version_num = :v"), {"v": version})


@contextmanager
def served(url, tmp_path):
    """A service on the database at `url`."""
    with TestClient(create_app(Settings(storage=str(tmp_path), db=url))) as client:
        yield client


@pytest.fixture
def catalogue(database):
    made = Catalogue(database)
    made.migrate()
    yield made
    made.engine.dispose()


def test_the_migrated_schema_is_the_one_that_the_code_uses(catalogue):
    with catalogue.engine.connect() as connection:
        found = compare_metadata(
            MigrationContext.configure(connection, opts={"compare_type": True}), metadata
        )
    ours = [one for one in found if "gradnorm_alembic_version" not in str(one)]
    assert ours == []


def test_a_row_comes_back_as_it_was_saved(catalogue):
    loss = 0.1 + 0.2  # not the shortest of decimals
    summary = {"peak": 1e-300, "list": [1, None, "ä"], "deep": {"flag": True}}
    trial = trial_row("a", seed=2**62 + 1, loss=loss, summary=summary, num_parameters=7_000_000_000)
    catalogue.add_run(run_row("a", created_at=math.pi, data=[{"sha256": "ff"}]), [trial])
    found = catalogue.trial("a_00000")
    assert {key: found[key] for key in trial} == trial
    assert found["reason"] is None and found["ended_at"] is None
    assert catalogue.run("a")["created_at"] == math.pi
    assert catalogue.run("a")["data"] == [{"sha256": "ff"}]


def test_latest_is_the_newest_and_pages_neither_skip_nor_repeat(catalogue):
    times = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 2.0, "e": 2.0}
    for run_id, created_at in times.items():
        catalogue.add_run(run_row(run_id, created_at=created_at), [])
    seen, before = [], None
    while page := catalogue.runs(limit=2, before=before):
        seen += [row["id"] for row in page]
        before = (page[-1]["created_at"], page[-1]["id"])
    assert seen == ["a", "e", "d", "c", "b"]
    assert catalogue.run("latest")["id"] == "a"


def test_a_run_without_a_heartbeat_reads_as_lost(catalogue):
    now = time.time()
    catalogue.add_run(run_row("fresh", status="running", heartbeat=now), [])
    catalogue.add_run(run_row("stale", status="running", heartbeat=now - 100), [])
    catalogue.add_run(run_row("unborn", status="pending", heartbeat=None), [])
    assert [run["id"] for run in catalogue.runs(status="lost")] == ["stale"]
    assert [run["id"] for run in catalogue.runs(status="running")] == ["fresh"]
    assert [run["id"] for run in catalogue.runs(status="pending")] == ["unborn"]
    assert catalogue.run("stale")["status"] == "lost"


def test_a_taken_id_is_refused_and_nothing_of_it_is_kept(catalogue):
    catalogue.add_run(run_row("a", study="first"), [trial_row("a")])
    with pytest.raises(CatalogueError, match="run 'a' exists already"):
        catalogue.add_run(run_row("a", study="second"), [trial_row("a", 1)])
    assert catalogue.run("a")["study"] == "first"
    assert len(catalogue.trials("a")) == 1


def test_saving_again_what_may_have_been_saved_changes_nothing(catalogue):
    catalogue.add_run(run_row("a"), [])
    for _ in range(2):
        changes = {"a_00001": {"step": 7}, "a_00000": {"step": 3}}
        catalogue.save("a", {"status": "running"}, [trial_row("a"), trial_row("a", 1)], changes)
    assert [trial["step"] for trial in catalogue.trials("a")] == [3, 7]


def test_text_and_numbers_that_a_database_refuses_are_saved_as_it_takes_them(catalogue):
    catalogue.add_run(run_row("a", error="torn\0text \ud800"), [trial_row("a")])
    summary = {"peak": math.inf, "values": [1.0, math.nan]}
    catalogue.save("a", {}, (), {"a_00000": {"loss": math.nan, "grad_norm": -math.inf, "summary": summary}})
    found = catalogue.trial("a_00000")
    assert "\0" not in catalogue.run("a")["error"] and catalogue.run("a")["error"].startswith("torn")
    assert found["loss"] is None and found["grad_norm"] is None
    assert found["summary"] == {"peak": None, "values": [1.0, None]}


def test_a_deleted_run_is_gone_with_its_trials_and_no_other(catalogue):
    for run_id in ("a", "b"):
        catalogue.add_run(run_row(run_id), [trial_row(run_id), trial_row(run_id, 1, status="finished")])
    catalogue.delete_run("a")
    assert catalogue.run("a") is None and catalogue.trials("a") == []
    assert catalogue.trial_counts(["a", "b"]) == {"b": {"pending": 1, "finished": 1}}


def test_a_database_without_runs_is_said_to_be_empty(database, tmp_path):
    catalogue = Catalogue(database)
    with pytest.raises(CatalogueError, match="no run has been started|none has been started"):
        catalogue.runs()
    catalogue.update()  # makes nothing
    with served(database, tmp_path) as client:
        assert client.get("/runs").json()["runs"] == []
    catalogue.migrate()
    assert catalogue.is_there()
    assert catalogue.runs() == []


def test_a_newer_schema_is_refused_by_driver_and_service(catalogue, database, tmp_path):
    set_version(catalogue, "9999")
    with pytest.raises(SchemaError, match="schema 9999; this code knows up to 0001: update the code"):
        catalogue.migrate()
    with served(database, tmp_path) as client:
        answer = client.get("/runs")
    assert answer.status_code == 503
    assert "schema 9999; this code knows up to 0001" in answer.json()["detail"]


def test_an_older_schema_is_named_by_the_service(catalogue, database, tmp_path):
    set_version(catalogue, "0000")
    with served(database, tmp_path) as client:
        for path in ("/runs", "/runs/latest", "/runs/a/gradnorm.png"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert "schema 0000; this code needs 0001" in answer.json()["detail"]
        set_version(catalogue, "0001")
        assert client.get("/runs").status_code == 200


def test_drivers_that_start_at_once_migrate_once(database, tmp_path):
    code = """
        import pathlib, sys, time
        from study.catalogue import Catalogue
        catalogue = Catalogue(sys.argv[1])
        import alembic.command
        while not pathlib.Path(sys.argv[2]).exists():
            time.sleep(0.005)
        catalogue.migrate()
        row = {"id": sys.argv[3], "study": "s", "status": "finished", "created_at": 1.0, "storage": "/"}
        catalogue.add_run(row | {"config": {}}, [])
    """
    start = tmp_path / "start"
    command = [sys.executable, "-c", textwrap.dedent(code), database, str(start)]
    drivers = [subprocess.Popen([*command, f"run-{n}"], stderr=subprocess.PIPE, text=True) for n in range(3)]
    time.sleep(2.0)
    start.touch()
    for driver in drivers:
        _, error = driver.communicate(timeout=60)
        assert driver.returncode == 0, error
    assert sorted(run["id"] for run in Catalogue(database).runs()) == ["run-0", "run-1", "run-2"]


def test_a_driver_waits_for_one_that_migrates(postgresql_server):
    url = postgresql_server.new_database()
    name = url.rsplit("/", 1)[1]
    catalogue = Catalogue(url)
    with postgresql_server.connect(name) as other:
        other.execute(f"select pg_advisory_lock({ADVISORY_LOCK})")
        driver = threading.Thread(target=catalogue.migrate)
        driver.start()
        waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
        deadline = time.monotonic() + 20
        while other.execute(waiting).fetchone()[0] == 0:
            assert driver.is_alive() and time.monotonic() < deadline, "it didn't wait"
            time.sleep(0.02)
        assert not catalogue.is_there()
    driver.join(20)
    assert catalogue.is_there()


def test_a_driver_doesnt_wait_for_ever(postgresql_server, monkeypatch):
    monkeypatch.setattr("study.migrations.LOCK_SECONDS", 1)
    url = postgresql_server.new_database()
    with postgresql_server.connect(url.rsplit("/", 1)[1]) as other:
        other.execute(f"select pg_advisory_lock({ADVISORY_LOCK})")
        with pytest.raises(CatalogueError, match="lock timeout"):
            Catalogue(url).migrate()


@pytest.mark.parametrize("prefix", ["postgresql", "postgres", "postgresql+psycopg"])
def test_the_usual_spellings_of_the_url_lead_to_one_driver(postgresql_server, prefix):
    url = postgresql_server.new_database().replace("postgresql", prefix, 1) + "?connect_timeout=9"
    Catalogue(url).migrate()
    assert Catalogue(url).is_there()


def test_an_error_shows_no_password(postgresql_server):
    url = postgresql_server.url("no_such_database")
    with pytest.raises(CatalogueError, match="no_such_database") as caught:
        Catalogue(url).runs()
    assert PASSWORD not in str(caught.value) and "%3A" not in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(CatalogueError, match="URL can't be read") as caught:
        Catalogue(f"no url {PASSWORD}")
    assert PASSWORD not in str(caught.value)


@pytest.fixture
def own_server(postgresql_server):
    """The server, for a test that stops it; it runs again afterwards."""
    yield postgresql_server
    if postgresql_server.process is None:
        postgresql_server.start()


@pytest.fixture
def kept(own_server, monkeypatch):
    """A catalogue with the run `a` of two trials, for a bookkeeper in a hurry."""
    monkeypatch.setattr(bookkeeper, "WRITE_SECONDS", 0.05)
    catalogue = Catalogue(own_server.new_database())
    catalogue.migrate()
    catalogue.add_run(run_row("a", status="running"), [trial_row("a"), trial_row("a", 1)])
    return catalogue


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in 20 s"
        time.sleep(0.05)


def test_a_reader_survives_a_restart_of_the_server(own_server, kept, tmp_path):
    with served(kept.url.render_as_string(hide_password=False), tmp_path) as client:
        assert client.get("/runs").json()["runs"][0]["id"] == "a"
        own_server.stop()
        assert client.get("/runs").status_code == 503
        assert client.get("/healthz").status_code == 200
        own_server.start()
        assert client.get("/runs").status_code == 200
        assert kept.run("a")["id"] == "a"


def test_what_changes_while_the_database_is_away_is_written_when_it_is_back(own_server, kept):
    with Bookkeeper(kept, "a") as books:
        books.trial_changed("a_00000", status="running", step=1, loss=5.0)
        until(lambda: kept.trial("a_00000")["step"] == 1)
        own_server.stop()
        for step in range(2, 50):
            books.trial_changed("a_00000", step=step, loss=5.0 / step)
            time.sleep(0.01)
        books.trial_added(trial_row("a", 2, step=11))
        books.trial_changed("a_00001", status="diverged", reason="nonfinite_loss", diverged_step=9, step=9)
        until(lambda: books.away is not None)
        books.trial_changed("a_00000", step=50, loss=0.1)
        own_server.start()
        until(lambda: books.away is None)
        until(lambda: kept.trial("a_00000")["step"] == 50)
    first, second, third = kept.trials("a")
    assert (first["loss"], first["status"]) == (0.1, "running")
    assert (second["status"], second["reason"], second["diverged_step"]) == ("diverged", "nonfinite_loss", 9)
    assert third["step"] == 11


def test_what_changes_while_a_write_fails_is_not_undone_by_it(own_server, kept):
    class Slow(Catalogue):
        """A change comes while a write is on its way."""

        def save(self, *args):
            if not told:
                told.append(args)
                books.trial_changed("a_00000", step=2)
            super().save(*args)

    told = []
    own_server.stop()
    with Bookkeeper(Slow(kept.url.render_as_string(hide_password=False)), "a") as books:
        books.trial_changed("a_00000", step=1, loss=4.0)
        until(lambda: told and books.away is not None)
        own_server.start()
    trial = kept.trial("a_00000")
    assert (trial["step"], trial["loss"]) == (2, 4.0)


def test_the_end_of_a_run_waits_for_the_database(own_server, kept):
    back = threading.Timer(2.0, own_server.start)
    with Bookkeeper(kept, "a") as books:
        own_server.stop()
        back.start()
        books.run_changed(status="finished", ended_at=12.5)
    back.join()
    assert (kept.run("a")["status"], kept.run("a")["ended_at"]) == ("finished", 12.5)

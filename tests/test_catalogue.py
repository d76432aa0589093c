"""The catalogue keeps what a run was and how it came out (SQLite here)."""

import re
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa

from study.catalogue import LOST_AFTER, Catalogue, CatalogueError
from study.schema import SCHEMA_VERSION


def run_row(run_id: str, **values: Any) -> dict[str, Any]:
    return {
        "id": run_id, "study": "figure", "status": "running", "created_at": 100.0, "heartbeat": time.time(),
        "storage": "runs", "config": {"name": "figure", "arms": [{"clip.max_norm": 10.0}]}, **values,
    }  # fmt: skip


def trial_row(run_id: str, number: int, **values: Any) -> dict[str, Any]:
    return {
        "id": f"{run_id}_{number:05d}", "run_id": run_id, "number": number, "arm": "an arm", "arm_number": 0,
        "seed": 0, "status": "pending", "step": 0, "num_steps": 100, "attempts": 0, "config": {},
        "overrides": {}, **values,
    }  # fmt: skip


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'runs' / 'gradnorm.db'}")
    catalogue.migrate()
    return catalogue


def test_a_run_comes_back_as_it_was_given(catalogue: Catalogue) -> None:
    given = run_row("one", versions={"torch": "2.13"}, notes=["a sentence"], git_commit="abc", host="here")
    catalogue.add_run(given, [trial_row("one", 1), trial_row("one", 0, overrides={"clip.max_norm": 10.0})])
    run = catalogue.run("one")
    assert run is not None and {key: run[key] for key in given} == given
    assert {key for key, value in run.items() if value is None} == {"ended_at", "data", "results", "error"}
    trials = catalogue.trials("one")
    assert [trial["number"] for trial in trials] == [0, 1]
    assert trials[0] == catalogue.trial("one_00000") and trials[0]["overrides"] == {"clip.max_norm": 10.0}
    assert catalogue.run("two") is None and catalogue.trial("one_00002") is None
    assert catalogue.trials("two") == []


def test_an_id_that_exists_is_refused_and_changes_nothing(catalogue: Catalogue) -> None:
    catalogue.add_run(run_row("one"), [trial_row("one", 0)])
    with pytest.raises(CatalogueError, match="run 'one' exists already in sqlite:///"):
        catalogue.add_run(run_row("one", study="other"), [trial_row("one", 1)])
    with pytest.raises(CatalogueError):  # the second trial's id is taken: not even the run is left behind
        catalogue.add_run(run_row("two"), [trial_row("two", 0), trial_row("one", 0)])
    assert catalogue.run("two") is None and catalogue.trial("two_00000") is None
    assert [trial["id"] for trial in catalogue.trials("one")] == ["one_00000"]
    assert catalogue.run("one")["study"] == "figure"


def test_a_save_is_one_transaction(catalogue: Catalogue) -> None:
    catalogue.add_run(run_row("one"), [trial_row("one", 0)])
    catalogue.save(
        "one",
        {"status": "finished", "ended_at": 5.0},
        [trial_row("one", 1)],
        {"one_00000": {"status": "diverged", "reason": "nonfinite_loss", "diverged_step": 7}},
    )
    assert catalogue.run("one")["status"] == "finished"
    assert [trial["status"] for trial in catalogue.trials("one")] == ["diverged", "pending"]
    with pytest.raises(sa.exc.CompileError):  # the last of it can't be done: nothing of it is
        catalogue.save("one", {"status": "failed"}, [trial_row("one", 2)], {"one_00000": {"nosuch": 9}})
    assert catalogue.run("one")["status"] == "finished" and catalogue.trial("one_00002") is None


def test_saving_the_same_again_changes_nothing(catalogue: Catalogue) -> None:
    catalogue.add_run(run_row("one"), [trial_row("one", 0)])
    for _ in range(2):  # a commit whose answer was lost is done again
        catalogue.save("one", {"notes": ["a"]}, [trial_row("one", 1)], {"one_00001": {"step": 9}})
    assert [trial["step"] for trial in catalogue.trials("one")] == [0, 9]


def test_latest_is_the_newest_and_pages_follow_without_gap_or_repeat(catalogue: Catalogue) -> None:
    assert catalogue.run("latest") is None
    for number, created_at in enumerate([3.0, 1.0, 2.0, 2.0, 2.0]):
        study = "odd" if number % 2 else "even"
        catalogue.add_run(run_row(f"r{number}", created_at=created_at, study=study, status="finished"), [])
    assert catalogue.run("latest")["id"] == "r0"
    newest_first = ["r0", "r4", "r3", "r2", "r1"]
    assert [run["id"] for run in catalogue.runs()] == newest_first
    seen, before = [], None
    while page := catalogue.runs(limit=2, before=before):
        seen += [run["id"] for run in page]
        before = (page[-1]["created_at"], page[-1]["id"])
    assert seen == newest_first
    assert [run["id"] for run in catalogue.runs(study="odd")] == ["r3", "r1"]


def test_without_a_heartbeat_for_a_minute_a_run_reads_as_lost(catalogue: Catalogue) -> None:
    now = time.time()
    ages = {"fresh": 0.0, "stale": LOST_AFTER + 5, "ended": 1e6, "waits": None}
    for name, age in ages.items():
        status = "finished" if name == "ended" else "running"
        heartbeat = None if age is None else now - age
        catalogue.add_run(
            run_row(name, status=status, heartbeat=heartbeat),
            [trial_row(name, 0, status=status, heartbeat=heartbeat)],
        )
    expected = {"fresh": "running", "stale": "lost", "ended": "finished", "waits": "running"}
    assert {name: catalogue.run(name)["status"] for name in ages} == expected
    assert {name: catalogue.trials(name)[0]["status"] for name in ages} == expected
    assert {run["id"]: run["status"] for run in catalogue.runs()} == expected
    for status in ("running", "lost", "finished", "failed"):
        found = {run["id"] for run in catalogue.runs(status=status)}
        assert found == {name for name, reads in expected.items() if reads == status}
    catalogue.save("stale", {"heartbeat": now})
    assert catalogue.run("stale")["status"] == "running"


def test_trials_are_counted_by_status(catalogue: Catalogue) -> None:
    catalogue.add_run(run_row("one"), [trial_row("one", 0, status="finished"), trial_row("one", 1)])
    catalogue.add_run(run_row("two"), [trial_row("two", 0)])
    catalogue.add_run(run_row("none"), [])
    assert catalogue.trial_counts(["one", "two", "none"]) == {
        "one": {"finished": 1, "pending": 1},
        "two": {"pending": 1},
    }


def test_a_deleted_run_takes_its_trials_along(catalogue: Catalogue) -> None:
    catalogue.add_run(run_row("one"), [trial_row("one", 0)])
    catalogue.add_run(run_row("two"), [trial_row("two", 0)])
    catalogue.delete_run("one")
    assert catalogue.run("one") is None and catalogue.trial("one_00000") is None
    assert catalogue.trial("two_00000") is not None


def test_migrating_again_keeps_everything(catalogue: Catalogue) -> None:
    catalogue.add_run(run_row("one"), [trial_row("one", 0)])
    catalogue.migrate()
    assert catalogue.schema_version() == SCHEMA_VERSION
    assert catalogue.run("one") is not None and len(catalogue.trials("one")) == 1


def test_the_migrated_schema_is_the_one_that_the_code_reads(catalogue: Catalogue) -> None:
    from study.schema import metadata

    inspector = sa.inspect(catalogue.engine)
    for name, table in metadata.tables.items():
        found = {column["name"]: column["nullable"] for column in inspector.get_columns(name)}
        assert found == {column.name: column.nullable for column in table.columns}
        indexed = {tuple(index["column_names"]) for index in inspector.get_indexes(name)}
        assert indexed == {tuple(column.name for column in index.columns) for index in table.indexes}


def test_drivers_that_start_at_once_make_one_schema(tmp_path: Path) -> None:
    url, errors = f"sqlite:///{tmp_path / 'gradnorm.db'}", []

    def start() -> None:
        try:
            Catalogue(url).migrate()
        except Exception as error:
            errors.append(error)

    drivers = [threading.Thread(target=start) for _ in range(4)]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()
    assert errors == [] and Catalogue(url).schema_version() == SCHEMA_VERSION


def test_a_newer_database_is_left_alone(catalogue: Catalogue) -> None:
    with catalogue.engine.begin() as connection:
        connection.execute(sa.text("update gradnorm_alembic_version set version_num = '9999'"))
    with pytest.raises(CatalogueError, match="has schema 9999; this code knows up to"):
        catalogue.migrate()
    assert catalogue.schema_version() == "9999"


def test_optuna_lives_in_the_same_database(catalogue: Catalogue) -> None:
    catalogue.add_run(run_row("one"), [trial_row("one", 0)])
    url = str(catalogue.url)
    optuna.create_study(storage=url, study_name="search").add_trial(optuna.create_trial(value=1.0))
    catalogue.migrate()
    assert len(optuna.load_study(storage=url, study_name="search").trials) == 1
    assert [trial["id"] for trial in catalogue.trials("one")] == ["one_00000"]


def test_a_database_that_is_not_there_yet_says_so(tmp_path: Path) -> None:
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'gradnorm.db'}")
    assert not catalogue.is_there()
    with pytest.raises(CatalogueError, match="isn't there yet"):
        catalogue.runs()
    assert list(tmp_path.iterdir()) == []  # asking made no file
    sqlite3.connect(tmp_path / "gradnorm.db").close()
    assert not catalogue.is_there()


@pytest.mark.parametrize("ask", ["migrate", "runs", "is_there"])
def test_a_file_that_is_no_database_is_named(tmp_path: Path, ask: str) -> None:
    path = tmp_path / "gradnorm.db"
    path.write_text("this is a diary, not a database; " * 50)
    with pytest.raises(
        CatalogueError, match=r"database 'sqlite:///.*gradnorm.db' can't be (used|read): file is"
    ):
        getattr(Catalogue(f"sqlite:///{path}"), ask)()
    assert path.read_text().startswith("this is a diary")


@pytest.mark.parametrize("url", ["nosuch://host/db", "sqlite+nosuch:///x.db"])
def test_an_unknown_kind_of_database_is_named(url: str) -> None:
    with pytest.raises(CatalogueError, match=f"database '{re.escape(url)}' can't be used"):
        Catalogue(url)


@pytest.mark.parametrize("url", ["runs/gradnorm.db", "", "postgresql://team:secret@host:port/name"])
def test_what_is_no_url_is_told_how_one_looks_and_not_repeated(url: str) -> None:
    with pytest.raises(CatalogueError, match="URL can't be read; known: sqlite:///FILE") as caught:
        Catalogue(url)
    assert "secret" not in str(caught.value)


def test_a_password_is_never_shown() -> None:
    catalogue = Catalogue("postgresql://team:secret@localhost:1/gradnorm")
    assert catalogue.name == "postgresql+psycopg://team:***@localhost:1/gradnorm"
    for ask in (catalogue.migrate, catalogue.runs):
        with pytest.raises(CatalogueError) as caught:
            ask()
        assert "secret" not in str(caught.value)

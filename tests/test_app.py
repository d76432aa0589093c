"""The service as a whole: what it loads, its odd states, and what caches may keep."""

import subprocess
import sys
import time

import numpy as np
import pytest
import sqlalchemy as sa

from service.app import create_app
from service.settings import Settings


def test_starting_loads_neither_ray_nor_torch_nor_a_renderer():
    program = (
        "import sys, service.app; "
        "print([name for name in ('ray', 'torch', 'matplotlib', 'optuna', 'alembic') if name in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_an_empty_folder_is_an_empty_list(client_at, tmp_path):
    client = client_at(tmp_path / "nothing")
    assert client.get("/runs").json() == {"runs": [], "next": None}
    assert client.get("/runs/latest").status_code == 404
    assert client.get("/readyz").json() == {"status": "ok", "catalogue": "empty"}
    assert not (tmp_path / "nothing").exists()


def test_a_newer_catalogue_is_503_that_says_so(client_of, store):
    store.add_run("r", steps=5)
    with store.catalogue.engine.begin() as connection:
        connection.execute(sa.text("update gradnorm_alembic_version set version_num = '9999'"))
    client = client_of(store)
    for path in ("/runs", "/runs/r", "/runs/r/gradnorm.png", "/runs/r/traces", "/runs/r/events", "/readyz"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert "9999" in answer.json()["detail"]
        assert "retry-after" in answer.headers
    assert client.get("/healthz").status_code == 200


def test_a_file_that_is_no_database_is_503(client_at, tmp_path):
    (tmp_path / "gradnorm.db").write_bytes(b"this is no database, and long enough to be looked at" * 100)
    client = client_at(tmp_path)
    for path in ("/runs", "/runs/latest", "/readyz"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert str(tmp_path) not in answer.text


def test_a_database_that_is_away_is_503_soon(client_at, tmp_path):
    client = client_at(tmp_path, db="postgresql://nobody:pw@127.0.0.1:1/none")
    begin = time.perf_counter()
    answer = client.get("/runs")
    assert answer.status_code == 503
    assert time.perf_counter() - begin < 10
    assert "pw" not in answer.text
    assert client.get("/healthz").status_code == 200


def test_a_deleted_folder_leaves_the_numbers_of_the_catalogue(client_of, store):
    store.add_run("gone")
    store.storage.delete_folder("gone")
    client = client_of(store)
    assert client.get("/runs/gone").status_code == 200
    traces = client.get("/runs/gone/traces").json()
    assert (traces["num_total"], len(traces["warnings"])) == (0, 4)
    assert client.get("/runs/gone/gradnorm.png").status_code == 200
    assert client.get("/runs/gone/traces?format=csv").status_code == 200


def test_a_part_that_is_no_trace_is_named_and_left_out(client_of, store):
    import pyarrow as pa
    import pyarrow.parquet as pq

    trials = store.add_run("odd", arms=1)
    folder = store.folder / "odd" / trials[0] / "trace"
    pq.write_table(pa.table({"other": [1, 2]}), folder / "000000061.parquet")
    answer = client_of(store).get("/runs/odd/traces?metrics=loss").json()
    assert answer["trials"][0]["series"][0]["num_total"] == 60
    assert "000000061.parquet" in answer["warnings"][0]


def test_a_run_in_its_first_second_is_served(client_of, store):
    store.add_run("young", steps=0, status="pending")
    client = client_of(store)
    assert client.get("/runs/young/traces").json()["last_step"] == 0
    assert client.get("/runs/young/gradnorm.png").status_code == 200
    assert client.get("/runs/young").json()["num_trials"] == {"pending": 4}


def test_what_has_ended_may_be_kept_and_what_lives_is_asked_for_again(client_of, store):
    trials = store.add_run("done")
    store.add_run("live", status="running")
    client = client_of(store)
    for path in ("/runs/done/gradnorm.png", "/runs/done/traces", f"/runs/{trials[0]}/traces", "/runs/done"):
        assert "immutable" in client.get(path).headers["cache-control"]
    for path in ("/runs/live/gradnorm.png", "/runs/live/traces", "/runs/latest/gradnorm.png", "/runs"):
        assert client.get(path).headers["cache-control"] == "private, no-cache"


def test_what_the_client_has_is_not_sent_again_until_it_changes(client_of, store):
    from study.traces import TraceWriter

    (trial,) = store.add_run("live", status="running", arms=1)
    client = client_of(store)
    for path in ("/runs/live/traces", "/runs/live/gradnorm.png", "/runs/live", "/runs"):
        etag = client.get(path).headers["etag"]
        again = client.get(path, headers={"If-None-Match": etag})
        assert (again.status_code, again.content) == (304, b"")
    before = client.get("/runs/live/traces").headers["etag"]
    writer = TraceWriter(store.storage, "live", trial, after=60)
    writer.append({"step": np.arange(61, 71), "loss": np.ones(10), "grad_norm": np.ones(10)})
    changed = client.get("/runs/live/traces", headers={"If-None-Match": before})
    assert (changed.status_code, changed.json()["last_step"]) == (200, 70)
    assert client.get("/runs/live/traces", headers={"If-None-Match": "*"}).status_code == 304


def test_json_travels_packed(client_of, store):
    store.add_run("r")
    answer = client_of(store).get("/runs/r/traces", headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["etag"].startswith("W/")


def test_a_remote_storage_without_a_database_is_refused_at_start():
    with pytest.raises(ValueError, match="GRADNORM_DB"):
        create_app(Settings(storage="s3://bucket/runs?region=eu-west-1"))


def test_the_documentation_shows_every_route_without_scripts(client_of, store):
    client = client_of(store)
    page = client.get("/docs").text
    assert "<script" not in page
    for path in client.get("/openapi.json").json()["paths"]:
        assert path in page

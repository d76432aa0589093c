"""Object storage: the same files, traces, checkpoints and runs on S3, over HTTP against moto's server."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import Settings
from study import storage as storage_module
from study import traces
from study.catalogue import Catalogue
from study.checkpoints import load_checkpoints, save_checkpoint
from study.storage import Storage, StorageError
from study.traces import TraceWriter, list_part_names, read_trace

ROOT = Path(__file__).parent.parent


@pytest.fixture
def s3(object_store):
    """A storage under a prefix of an empty bucket."""
    made = Storage(f"s3://{object_store.new_bucket()}/some/prefix/")
    object_store.requests.clear()
    return made


def rows(first, last):
    steps = np.arange(first, last + 1)
    return {"step": steps, "loss": 5.0 / steps, "grad_norm": np.where(steps == 7, np.inf, steps / 3)}


def test_files_are_written_read_listed_and_deleted(s3):
    s3.check_writable()
    assert s3.names("run/trial") == [] and not s3.exists("run")
    s3.write("run/trial/b", b"old")
    s3.write("run/trial/b", b"\x00new")
    s3.write("run/trial/a", b"")
    s3.write("run/trial/deep/c", b"123")
    assert s3.names("run/trial") == ["a", "b"]
    assert s3.read("run/trial/b").to_pybytes() == b"\x00new"
    assert s3.exists("run") and s3.exists("run/trial/a") and not s3.exists("ru")
    assert s3.size("run") == 7
    s3.delete("run/trial/a")
    s3.delete("run/trial/a")
    assert s3.names("run/trial") == ["b"]
    with pytest.raises(FileNotFoundError):
        s3.read("run/trial/a")
    s3.delete_folder("run")
    s3.delete_folder("run")
    assert not s3.exists("run") and s3.names("run/trial") == []


def test_a_file_is_one_put(s3, object_store):
    s3.write("run/trial/trace/000000001.parquet", b"x" * 100_000)
    assert [request.split()[0] for request in object_store.requests] == ["PUT"]


def test_a_storage_at_the_root_of_a_bucket_and_one_with_options_work(object_store):
    bucket = object_store.new_bucket()
    for uri in (f"s3://{bucket}", f"s3://{bucket}/", f"s3://{bucket}/deep/er?region=us-east-1"):
        storage = Storage(uri)
        storage.write("a/b", b"1")
        assert storage.names("a") == ["b"]
        assert Storage(storage.uri).names("a") == ["b"]


def test_a_missing_bucket_is_named_in_one_line(object_store):
    with pytest.raises(StorageError) as caught:
        Storage("s3://nobody-has-this/prefix").check_writable()
    expected = "storage 's3://nobody-has-this/prefix' can't be written: there is no bucket 'nobody-has-this'"
    assert str(caught.value) == expected


def test_keys_in_an_address_are_refused_and_not_repeated():
    with pytest.raises(StorageError, match="AWS_ACCESS_KEY_ID") as caught:
        Storage("s3://AKIA:hush@bucket/prefix")
    assert "hush" not in str(caught.value)
    with pytest.raises(StorageError, match="names no bucket"):
        Storage("s3://")


def test_an_endpoint_that_is_away_is_a_storage_error(s3, object_store):
    object_store.stop()
    with pytest.raises(StorageError, match=r"can't be read: .*connect.* \(NETWORK_CONNECTION"):
        s3.exists("run")
    object_store.start()


def test_a_write_waits_for_a_storage_that_is_away(s3, object_store):
    object_store.stop()
    back = threading.Timer(8.0, object_store.start)  # longer than the client's own retries last
    back.start()
    s3.write("run/late", b"content")
    back.join()
    assert s3.read("run/late").to_pybytes() == b"content"


def test_a_write_doesnt_wait_for_ever(s3, object_store, monkeypatch):
    monkeypatch.setattr(storage_module, "PATIENCE_SECONDS", 1.0)
    object_store.stop()
    began = time.monotonic()
    with pytest.raises(OSError, match="NETWORK_CONNECTION"):
        s3.write("run/never", b"content")
    assert time.monotonic() - began < 20
    object_store.start()


def test_a_trace_on_s3_is_the_trace(s3):
    writer = TraceWriter(s3, "run", "run_00000")
    for first in range(1, 40, 10):
        writer.append(rows(first, first + 9))
    found = read_trace(s3, "run", "run_00000")
    assert len(list_part_names(s3, "run", "run_00000")) == 4 and found.unreadable == []
    writer.close()
    merged = read_trace(s3, "run", "run_00000")
    assert list_part_names(s3, "run", "run_00000") == ["000000001.parquet"]
    for name, values in rows(1, 40).items():
        kept = values.astype(np.int32 if name == "step" else np.float32)
        np.testing.assert_array_equal(found.numpy(name), kept)
        np.testing.assert_array_equal(merged.numpy(name), kept)
    assert list(read_trace(s3, "run", "run_00000", ["loss"], first=12, last=21).numpy("step")) == [
        *range(12, 22)
    ]


def test_a_long_trace_never_has_many_parts(s3, monkeypatch):
    monkeypatch.setattr(traces, "MAX_PARTS", 8)
    writer = TraceWriter(s3, "run", "run_00000")
    for step in range(1, 31):
        writer.append(rows(step, step))
        assert len(writer.parts) <= 8
    assert len(list_part_names(s3, "run", "run_00000")) == len(writer.parts)
    steps = read_trace(s3, "run", "run_00000", columns=[]).numpy("step")
    np.testing.assert_array_equal(steps, np.arange(1, 31))


def test_a_resumed_trace_drops_what_came_after_its_checkpoint(s3):
    writer = TraceWriter(s3, "run", "run_00000")
    for first in (1, 11, 21):
        writer.append(rows(first, first + 9))
    again = TraceWriter(s3, "run", "run_00000", after=15)
    assert (again.last, again.attempt) == (15, 2)
    again.append(rows(16, 40))
    again.close()
    steps = read_trace(s3, "run", "run_00000").numpy("step")
    np.testing.assert_array_equal(steps, np.arange(1, 41))


def test_many_parts_are_listed_by_one_request(s3, object_store):
    writer = TraceWriter(s3, "run", "run_00000")
    for step in range(1, 51):
        writer.append(rows(step, step))
    object_store.requests.clear()
    assert len(list_part_names(s3, "run", "run_00000")) == 50
    assert len(object_store.requests) == 1


def test_a_read_takes_a_few_requests_a_part_and_none_a_step(s3, object_store):
    writer = TraceWriter(s3, "run", "run_00000")
    writer.append(rows(1, 20_000))
    writer.append(rows(20_001, 40_000))
    object_store.requests.clear()
    assert read_trace(s3, "run", "run_00000", ["grad_norm"]).table.num_rows == 40_000
    assert len(object_store.requests) <= 1 + 2 * 4


def test_a_flush_is_a_handful_of_requests(s3, object_store):
    writer = TraceWriter(s3, "run", "run_00000")
    writer.append(rows(1, 10))
    object_store.requests.clear()
    writer.append(rows(11, 20))
    assert len(object_store.requests) <= 3, object_store.requests


def test_checkpoints_on_s3_come_back_bit_for_bit_and_newest_first(s3):
    state = {"weights": torch.randn(7, 5), "step": 100}
    save_checkpoint(s3, "run", "run_00000", {"step": 50, "weights": torch.zeros(1)})
    save_checkpoint(s3, "run", "run_00000", state)
    assert s3.names("run/run_00000/checkpoint") == ["000000100.pt"]
    (found,) = load_checkpoints(s3, "run", "run_00000")
    assert found["step"] == 100 and torch.equal(found["weights"], state["weights"])


def command_line(*words):
    """Run the command; its output where it fails."""
    command = [sys.executable, ROOT / "study" / "run.py", *words]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_on_s3_and_postgresql_is_recorded_served_and_deleted(s3, object_store, postgresql_server):
    database = postgresql_server.new_database()
    place = ["--storage", s3.uri, "--db", database]
    smaller = ["trial.steps=20", "trial.model.num_layers=2", "trial.batch_size=2"]
    smaller.append('arms=[{"label": "one"}, {"label": "two", "clip.max_norm": 10.0}]')
    smaller.append("claims=[]")
    command_line(*place, "--run-id", "far", *[word for setting in smaller for word in ("--set", setting)])
    catalogue = Catalogue(database)
    assert catalogue.run("far")["status"] == "finished"
    assert [trial["status"] for trial in catalogue.trials("far")] == ["finished", "finished"]
    for trial in catalogue.trials("far"):
        trace = read_trace(s3, "far", trial["id"])
        np.testing.assert_array_equal(trace.numpy("step"), np.arange(1, 21))
        assert float(trace.numpy("loss")[-1]) == trial["loss"]
    # Ray's record of the experiment lies beside the traces, not on the disk of whoever started it.
    (record,) = [name for name in folders(s3, "far") if name.startswith("tune")]
    assert any(name.startswith("experiment_state") for name in s3.names(f"far/{record}"))

    with TestClient(create_app(Settings(storage=s3.uri, db=database))) as client:
        assert client.get("/runs/far/gradnorm.png").content.startswith(b"\x89PNG")
        object_store.requests.clear()
        assert b"<svg" in client.get("/runs/far/gradnorm.svg").content
        assert client.get("/runs/far/traces?metrics=grad_norm").status_code == 200
        read = [request for request in object_store.requests if ".parquet" in request]
        assert read == []  # the traces of a finished run are fetched once

    command_line(*place, "--delete", "far", "--yes")
    assert catalogue.run("far") is None and not s3.exists("far")


def folders(storage, name):
    from pyarrow import fs

    infos = storage.fs.get_file_info(fs.FileSelector(storage.path(name)))
    return [info.base_name for info in infos if info.type == fs.FileType.Directory]

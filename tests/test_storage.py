"""Files appear whole or not at all, on a local disk and on an object store alike."""

import os
import threading
from pathlib import Path

import pytest
from pyarrow import fs

from study.storage import Storage, StorageError


def test_what_was_written_is_read_listed_measured_and_deleted(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    assert storage.names("a/b") == [] and not storage.exists("a")
    storage.write("a/b/two", b"22")
    storage.write("a/b/one", b"1")
    storage.write("a/b/deeper/three", b"333")
    assert storage.names("a/b") == ["one", "two"]
    assert storage.size("a") == 6
    assert storage.read("a/b/two").to_pybytes() == b"22"
    storage.write("a/b/two", b"other")
    assert storage.read("a/b/two").to_pybytes() == b"other"
    storage.delete("a/b/two")
    storage.delete("a/b/two")
    assert storage.names("a/b") == ["one"]
    storage.delete_folder("a")
    storage.delete_folder("a")
    assert not storage.exists("a")
    with pytest.raises(FileNotFoundError):
        storage.read("a/b/one")


def test_a_reader_never_sees_a_half_written_file(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    contents = {bytes([letter]) * 1_000_000 for letter in b"xyz"}
    storage.write("file", b"x" * 1_000_000)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for content in contents:
                storage.write("file", content)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {storage.read("file").to_pybytes() for _ in range(100)}
    finally:
        stop.set()
        writer.join()
    assert seen <= contents
    assert storage.names(".") == ["file"]


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.write("file", b"old")
    with pytest.raises(TypeError):
        storage.write("file", "not bytes")  # type: ignore[arg-type]
    assert storage.names(".") == ["file"]
    assert storage.read("file").to_pybytes() == b"old"


def test_a_storage_that_cannot_be_written_says_which_and_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"storage '.*/file/runs' can't be written: .*[Nn]ot a directory"):
        Storage(tmp_path / "file" / "runs").check_writable()
    storage = Storage(tmp_path / "new")
    storage.check_writable()
    assert storage.names(".") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_storage_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="can't be written"):
        Storage(tmp_path).check_writable()


@pytest.mark.parametrize("uri", ["nosuch://bucket/runs", "http://example.org/runs"])
def test_an_unknown_kind_of_storage_is_named(uri: str) -> None:
    with pytest.raises(StorageError, match=f"storage '{uri}' can't be opened"):
        Storage(uri)


def test_paths_of_every_spelling_are_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    spellings = ["runs", "./runs", "~/runs", f"file://{tmp_path}/runs", tmp_path / "runs"]
    assert {Storage(spelling).uri for spelling in spellings} == {str(tmp_path / "runs")}


def test_an_object_store_goes_the_same_way(tmp_path: Path) -> None:
    # The `mock` file system is Arrow's own in-memory store: no rename, no folders made beforehand.
    storage = Storage("mock:///bucket")
    assert not storage.is_local and isinstance(storage.fs, fs.FileSystem)
    storage.fs.create_dir(storage.path("run/trial/trace"))
    storage.write("run/trial/trace/000000001.parquet", b"content")
    assert storage.names("run/trial/trace") == ["000000001.parquet"]
    assert storage.read("run/trial/trace/000000001.parquet").to_pybytes() == b"content"
    storage.delete("run/trial/trace/000000001.parquet")
    storage.delete("run/trial/trace/000000001.parquet")
    assert storage.names("run/trial/trace") == []
